"""ProcessGroup: one rank of an epoch's process group, over NCCL or Gloo.

Building has three phases, all before the epoch's deadline:

    gather   every rank registers in the rendezvous store; rank 0 then publishes a verdict: proceed, or who is missing
    connect  the process group is built
    probe    one byte is broadcast (NCCL connects only here)

Any later failure closes the group on every rank: a failed rank closes its connections, which ends the operations of the
ranks that wait for it. NCCL over NVLink notices a dead peer only at the bucket's timeout.

On GPUs, a process survives the death of a peer only if it was started with `NCCL_ENVIRONMENT` of
`slipstream.runtime.process`, and if no operation reaches NCCL's own timeout, after which NCCL's watchdog would block
closing for a minute and its monitor would end the process. So NCCL gets a day, and this module enforces deadlines.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from threading import Event, Thread, Timer
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import DeviceName, GroupBackend
from slipstream.broker.weights.double_buffer import DoubleBuffer, StartBroadcast
from slipstream.broker.weights.rendezvous import (
    SENDER_RANK,
    TORCH_ERRORS,
    EpochRank,
    gather,
    naming_phase,
    seconds_left,
)

_PIECE_BYTES = 1024 * 1024
"""Size of one operation on host memory, equal on all ranks. It fits into the socket buffer: Gloo notices a peer's death
only at the deadline while it blocks in a write."""
_GLOO_CONNECT_S, _NCCL_CONNECT_S = 10.0, 30.0
"""Limits for connect and probe together, below the epoch's deadline because a dead member blocks all others and their
engines. NCCL first detects the topology."""
_GRACE_S = 1.0
"""Time for an operation of Gloo that timed out to raise its error."""
_NCCL_TIMEOUT = timedelta(days=1)
_NCCL_POLL_S = 0.0002
"""A bucket of 256 MB takes 5 ms at 50 GB/s."""
_Move = Callable[[DoubleBuffer, Sequence[Tensor], StartBroadcast], None]
_ABORT_S = 5.0
"""Maximum wait for an NCCL abort, which may hang; it continues in the background."""


def device_name(device: torch.device) -> str:
    """Return `cpu`, or `cuda:` and the GPU's UUID, which is the same in every process."""
    return f"cuda:{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else "cpu"


def choose_backend(
    setting: Literal["auto", "gloo", "nccl"], own: DeviceName, others: Sequence[DeviceName]
) -> GroupBackend:
    """Choose an epoch's backend: NCCL if the learner and each member have separate GPUs.

    Raises WeightTransferError if the setting is `nccl` but NCCL cannot work.
    """
    devices = [own, *others]
    if on_cpu := sum(not device.startswith("cuda:") for device in devices):
        obstacle = f"{on_cpu} of {len(devices)} on a CPU"
    else:
        obstacle = "two on one GPU" if len(set(devices)) < len(devices) else ""
    if setting == "nccl" and obstacle:
        must = "weights.backend=nccl needs the learner and each generator on separate GPUs"
        raise WeightTransferError(f"{must}, got {obstacle}: use weights.backend=auto")
    return "gloo" if obstacle or setting == "gloo" else "nccl"


class Backend(Protocol):
    """ProcessGroupGloo, or ProcessGroupNCCL, which only CUDA builds of torch have."""

    def broadcast(self, tensor: Tensor, root: int, *, timeout: timedelta) -> "dist.Work": ...

    def abort(self) -> None: ...


class ProcessGroup:
    """Life: open -> (send | receive)* -> close. Belongs to one thread; others may `abort`, even during `open`."""

    def __init__(self, own: EpochRank, *, device: torch.device, is_aborted: Event | None = None) -> None:
        """`is_aborted`: set by `abort`, or by the caller to end `open`."""
        self._own = own
        self._phase = partial(naming_phase, own)
        self._device = device
        self._is_aborted = is_aborted or Event()
        self._cancelled = self._is_aborted
        self._is_on_host = device.type == "cpu"
        self._double_buffer = None if self._is_on_host else DoubleBuffer(device)
        self._backend: Backend | None = None

    def open(self, store: dist.Store, *, own_host: str, timeout_s: float) -> "ProcessGroup":
        """Block until all ranks have joined. Raises WeightTransferError and closes the group.

        `own_host`: address of this machine.
        """
        deadline = time.monotonic() + timeout_s
        # The prefix separates it from late writes of earlier epochs.
        prefixed = dist.PrefixStore(f"weights/epoch-{self._own.epoch}", store)
        with self._phase("gather"):
            gather(prefixed, self._own, deadline=deadline, is_aborted=self._is_aborted)
        deadline = min(deadline, time.monotonic() + (_GLOO_CONNECT_S if self._is_on_host else _NCCL_CONNECT_S))
        with self._phase("connect"):
            self._backend = build_backend(
                prefixed, self._own, own_host=own_host, device=self._device, timeout_s=seconds_left(deadline)
            )
        try:
            # NCCL's timeout starts only after the communicator is established, which may never happen.
            with self._phase("probe"), self._aborting_at(deadline):
                byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
                self._begin_operation(byte, timeout_s=seconds_left(deadline))()
                self._check_not_aborted()
        except WeightTransferError:
            self.close()
            raise
        return self

    def send(self, buckets: Sequence[Tensor], *, timeout_s: float) -> None:
        """Send buckets in order, each within `timeout_s`. Raises WeightTransferError."""
        self._broadcast(buckets, DoubleBuffer.send, timeout_s=timeout_s)

    def receive(self, buckets: Sequence[Tensor], *, timeout_s: float, cancelled: Event) -> None:
        """Receive into host buckets of the same sizes. Raises WeightTransferError, soon after `cancelled` is set."""
        self._cancelled = cancelled
        self._broadcast(buckets, DoubleBuffer.receive, timeout_s=timeout_s)

    def abort(self) -> None:
        """Abort the running operation; Gloo finishes its current piece first."""
        self._is_aborted.set()
        self._abort_backend()

    def close(self) -> None:
        """Close all connections, which ends the other ranks' operations. This rank must not be in one."""
        self._abort_backend()
        # Gloo disconnects with the last reference to the backend, and a traceback may keep this object alive.
        self._backend = None

    def _abort_backend(self) -> None:
        if (backend := self._backend) is None:
            return
        aborting = Thread(target=_abort, args=(backend,), name="abort-weights", daemon=True)
        aborting.start()
        aborting.join(_ABORT_S)

    def _broadcast(self, buckets: Sequence[Tensor], move: _Move, *, timeout_s: float) -> None:
        if self._double_buffer:
            move(self._double_buffer, buckets, partial(self._start_bucket, of=len(buckets), timeout_s=timeout_s))
            return
        for index, bucket in enumerate(buckets):
            deadline = time.monotonic() + timeout_s
            with self._phase(_phase_of(index, bucket, of=len(buckets))):
                for piece in bucket.split(_PIECE_BYTES):
                    self._begin_operation(piece, timeout_s=seconds_left(deadline))()
                    self._check_not_aborted()

    def _start_bucket(self, index: int, bucket: Tensor, *, of: int, timeout_s: float) -> Callable[[], None]:
        phase = _phase_of(index, bucket, of=of)
        with self._phase(phase):
            finish = self._begin_operation(bucket, timeout_s=timeout_s)

        def finish_in_phase() -> None:
            with self._phase(phase):
                finish()
                self._check_not_aborted()

        return finish_in_phase

    def _begin_operation(self, bucket: Tensor, *, timeout_s: float) -> Callable[[], object]:
        if bucket.numel() == 0:
            return lambda: None
        assert self._backend is not None, "a closed group must not be used"
        if not self._is_on_host:
            deadline = time.monotonic() + timeout_s
            work = self._backend.broadcast(bucket, SENDER_RANK, timeout=_NCCL_TIMEOUT)
            return partial(self._finish_nccl, work, deadline=deadline, timeout_s=timeout_s)
        # The timeout makes `wait` raise. Gloo cannot cancel earlier: deleting the group would block with the GIL held.
        # No local variable holds `work` while it runs: a traceback would keep it and Gloo's connections alive.
        work = self._backend.broadcast(bucket, SENDER_RANK, timeout=timedelta(seconds=timeout_s))
        return partial(work.wait, timedelta(seconds=timeout_s + _GRACE_S))

    def _finish_nccl(self, work: "dist.Work", *, deadline: float, timeout_s: float) -> None:
        while not work.is_completed():
            self._check_not_aborted()
            if time.monotonic() >= deadline:
                raise RuntimeError(f"timed out after {timeout_s:.3g} s, because a member did not take part")
            time.sleep(_NCCL_POLL_S)
        # Raises the operation's error, and makes the current stream wait.
        work.wait()

    def _check_not_aborted(self) -> None:
        # An aborted NCCL operation ends like a successful one.
        if self._is_aborted.is_set() or self._cancelled.is_set():
            raise RuntimeError("it was aborted")

    @contextmanager
    def _aborting_at(self, deadline: float) -> Iterator[None]:
        if self._is_on_host:
            yield
            return
        timer = Timer(seconds_left(deadline), self.abort)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def build_backend(
    store: dist.Store, own: EpochRank, *, own_host: str, device: torch.device, timeout_s: float
) -> Backend:
    """Build the process group: NCCL for a GPU, else Gloo. Raises `TORCH_ERRORS`."""
    store.set_timeout(timedelta(seconds=timeout_s))
    if device.type != "cpu":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = _NCCL_TIMEOUT
        nccl.group_name = f"weights-epoch-{own.epoch}"
        # Another thread can abort non-blocking calls that never connect.
        nccl.config.blocking = 0
        return dist.ProcessGroupNCCL(store, own.rank, own.num_ranks, nccl)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_host)]
    return dist.ProcessGroupGloo(store, own.rank, own.num_ranks, options)


def _abort(backend: Backend) -> None:
    with suppress(*TORCH_ERRORS):
        backend.abort()


def _phase_of(index: int, bucket: Tensor, *, of: int) -> str:
    return f"broadcast of bucket {index} of {of} ({bucket.numel()} bytes)"
