"""ProcessGroup: one rank of an epoch's process group, over NCCL or Gloo. Ranks meet in a store of the learner.

Building has three phases, all before the epoch's deadline:

    gather   every rank registers in the rendezvous store; rank 0 then publishes a verdict: proceed, or who is missing
    connect  the process group is built
    probe    one byte is broadcast (NCCL connects only here)

Any later failure closes the group on every rank: a failed rank closes its connections, which ends the operations of the
ranks that wait for it. NCCL over NVLink notices a dead peer only at the bucket's timeout.

On GPUs, a process survives the death of a peer only if it was started with `NCCL_ENVIRONMENT` of
`slipstream.runtime.process`. No operation may reach NCCL's own timeout: its watchdog would then block closing for a
minute, and its monitor would end the process. So NCCL gets a day, and this module enforces deadlines.
"""

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from threading import Event, Thread, Timer
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import DeviceName, GroupBackend

TORCH_ERRORS = (RuntimeError, ValueError, OSError)
"""DistError and Gloo's errors are RuntimeErrors."""
SENDER_RANK = 0
STORE_TIMEOUT_S = 10.0
"""Default timeout of the learner's store operations."""
PROCEED = b"proceed"
_POLL_INTERVAL_S = 0.002


class EpochRank(NamedTuple):
    """A rank of a membership epoch. Example: EpochRank(epoch=3, rank=1, num_ranks=4)."""

    epoch: int
    rank: int
    num_ranks: int


def listen(host: str, *, ports: Iterable[int]) -> dist.TCPStore:
    """Open the store at the first free port (0 for any). Raises WeightTransferError."""
    failure = ""
    for port in ports:
        try:
            # torch itself would listen on every interface.
            listener = socket.create_server((host, port), backlog=128)
            break
        except OSError as error:
            failure = failure or f"{host}:{port}: {error}"
    else:
        must = "be an address of this machine with a free port"
        raise WeightTransferError(f"the host of a rendezvous must {must}, got {failure}")
    return dist.TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_TIMEOUT_S),
        master_listen_fd=listener.detach(),  # the store now owns and closes it
    )


def connect(host: str, port: int, *, timeout_s: float) -> dist.TCPStore:
    """Open a client of the learner's store. Raises RuntimeError."""
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def own_address(host: str, port: int, *, timeout_s: float) -> str:
    """Local address of a connection to the learner; this machine's name need not resolve. Raises OSError.

    Fails early, whereas torch's client would retry and dump its stack.
    """
    with socket.create_connection((host, port), timeout=timeout_s) as probe:
        return probe.getsockname()[0]


def gather(store: dist.Store, own: EpochRank, *, deadline: float, is_aborted: Event | None = None) -> None:
    """Wait until all ranks have registered. Raises RuntimeError naming the ranks missing at `deadline` (monotonic).

    Rank 0 also stops waiting when `is_aborted` is set.
    """
    if own.rank != SENDER_RANK:
        store.set(f"ready/{own.rank}", b"1")
        try:
            store.wait(["verdict"], timedelta(seconds=seconds_left(deadline)))
        except RuntimeError as error:
            raise RuntimeError("rank 0 (the learner) did not publish its verdict in time") from error
        if (verdict := store.get("verdict")) != PROCEED:
            raise RuntimeError(verdict.decode())
        return
    missing = []
    for rank in range(SENDER_RANK + 1, own.num_ranks):
        # Not `wait`, because torch writes two lines to stderr for every timeout.
        while not store.check([f"ready/{rank}"]):
            if time.monotonic() >= deadline or (is_aborted and is_aborted.is_set()):
                missing.append(str(rank))
                break
            time.sleep(_POLL_INTERVAL_S)
    problem = f"rank {', '.join(missing)} did not arrive in time" if missing else ""
    store.set("verdict", problem.encode() or PROCEED)
    if problem:
        raise RuntimeError(problem)


def seconds_left(deadline: float) -> float:
    """Return the seconds until the deadline, at least 0.001: torch treats 0 as no timeout."""
    return max(deadline - time.monotonic(), 0.001)


@contextmanager
def naming_phase(own: EpochRank, phase: str) -> Iterator[None]:
    """Convert torch's errors to WeightTransferErrors that name epoch, rank and phase."""
    try:
        yield
    except TORCH_ERRORS as error:
        where = f"weight epoch {own.epoch}, rank {own.rank} of {own.num_ranks}"
        raise WeightTransferError(f"{where}: {phase} failed: {error}") from error


StartBroadcast = Callable[[int, Tensor], Callable[[], object]]
"""Starts the broadcast of bucket `index` from or into a buffer, after the current stream's work. The returned function
makes that stream wait for the broadcast and blocks until it ends."""


class DoubleBuffer:
    """Two GPU buffers: one bucket is copied from or to host memory while another is broadcast. Belongs to one thread.

    Versions are verified in host memory, to save GPU memory. The buffers grow to the largest bucket.

    Invariant: nothing is enqueued on the default stream, which the learner trains on. A copy starts only after the
    previous broadcast from its buffer, and a broadcast only after its copy.
    """

    def __init__(self, device: torch.device, *, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        self._copies = cuda.Stream(device)
        self._broadcasts = cuda.Stream(device)
        self._buffers: list[Tensor] = []

    def send(self, buckets: Sequence[Tensor], start: StartBroadcast) -> None:
        """Broadcast buckets in order, those on the GPU without a copy. Blocks."""
        self._grow([bucket for bucket in buckets if not bucket.is_cuda])
        self._upload(buckets, 0)
        for index in range(len(buckets)):
            self._broadcasts.wait_stream(self._copies)
            with self._cuda.stream(self._broadcasts):
                finish = start(index, self._buffer(buckets, index))
                # The previous `finish` blocked until the other buffer was free.
                self._upload(buckets, index + 1)
                finish()

    def receive(self, buckets: Sequence[Tensor], start: StartBroadcast) -> None:
        self._grow(buckets)
        copied: list[Any] = []
        for index, bucket in enumerate(buckets):
            with self._cuda.stream(self._broadcasts):
                if index > 1:
                    self._broadcasts.wait_event(copied[index - 2])
                start(index, self._buffer(buckets, index))()
            self._copies.wait_stream(self._broadcasts)
            # While the other buffer fills.
            with self._cuda.stream(self._copies):
                bucket.copy_(self._buffer(buckets, index), non_blocking=True)
            copied.append(self._copies.record_event())
        self._copies.synchronize()

    def _upload(self, buckets: Sequence[Tensor], index: int) -> None:
        if index < len(buckets) and not buckets[index].is_cuda:
            with self._cuda.stream(self._copies):
                self._buffer(buckets, index).copy_(buckets[index], non_blocking=True)

    def _grow(self, buckets: Sequence[Tensor]) -> None:
        largest = max((bucket.numel() for bucket in buckets), default=0)
        if largest > (self._buffers[0].numel() if self._buffers else 0):
            # Not on the default stream: its kernels may still read memory that was allocated there.
            with self._cuda.stream(self._copies):
                self._buffers = [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(2)]

    def _buffer(self, buckets: Sequence[Tensor], index: int) -> Tensor:
        bucket = buckets[index]
        return bucket if bucket.is_cuda else self._buffers[index % 2][: bucket.numel()]


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
