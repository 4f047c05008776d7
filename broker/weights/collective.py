"""Weights by broadcast: NCCL between GPUs, Gloo between CPUs, one process group per membership epoch.

The groups are built directly over a TCPStore that the learner keeps for the whole run, under a prefix per epoch.
torch's default group, which DeepSpeed and vLLM each make for themselves, is neither needed nor touched, and a group can
be torn down and built anew as members come and go.

Building goes in three phases, all under the epoch's deadline:
    gather   every member says that it is here; rank 0 then gives the word, or names who is missing
    connect  the process group is built
    probe    one byte is broadcast: the group works (NCCL connects only now)
Whatever fails afterwards takes the group down on every rank: a rank that gives up closes its connections, and the ranks
that wait for it see that.

On GPUs a process survives the death of a peer only if it started with TORCH_NCCL_ASYNC_ERROR_HANDLING=0 in its
environment: otherwise NCCL's watchdog answers an error by ending the process it is in.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from threading import Event
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import OpenEpoch
from slipstream.broker.weights import buckets as flat
from slipstream.broker.weights import rendezvous
from slipstream.broker.weights.records import TensorSlot
from slipstream.broker.weights.rendezvous import SENDER_RANK, Seat, seconds_left

_PIECE_BYTES = 1024 * 1024
"""Gloo sees at once that a peer is gone, except while it is writing to it: what it writes must fit the kernel's buffer,
or all others wait for the deadline. The same on all ranks."""
_CONNECT_S = {"cpu": 10.0, "cuda": 30.0}
"""For connecting those that are all here, by device: one that dies meanwhile holds up the others, engines included.
NCCL finds out how the machines are wired first.
"""
_GRACE_S = 1.0
"""For an operation that has reached its limit to say so."""
FAILURES = (RuntimeError, ValueError, OSError)
"""What torch and sockets raise: DistError and Gloo's errors are RuntimeErrors."""


class CollectiveSender:
    """The learner's end: rank 0, and owner of the rendezvous store. Fulfils WeightSender; belongs to one thread."""

    def __init__(self, host: str, *, device: str | torch.device, port: int = 0) -> None:
        """Listen on `host` (IPv4 address or name of this machine) at `port`, 0 for any. Raises WeightTransferError."""
        self._device = torch.device(device)
        self._host = host
        self._store: dist.TCPStore | None = rendezvous.listen(host, port=port)
        self._port = self._store.port
        self._group: _Group | None = None
        self._num_members: int | None = None
        self._is_aborted = Event()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the rendezvous store; the same for the whole run."""
        return self._host, self._port

    def open_epoch(self, epoch: int, *, num_members: int, timeout_s: float) -> None:
        """Tear the previous group down, build this one. Blocks until all are in, at most `timeout_s`.

        Without members there is no group and `broadcast` does nothing. Raises WeightTransferError, naming the missing.
        """
        self._is_aborted.clear()
        self._leave()
        if self._store is None:
            raise WeightTransferError(f"weight epoch {epoch} must be opened before close(): this sender is closed")
        if num_members > 0:
            seat = Seat(epoch, SENDER_RANK, num_members + 1)
            self._group = _Group(
                self._store,
                seat,
                own_host=self._host,
                device=self._device,
                timeout_s=timeout_s,
                is_aborted=self._is_aborted,
            )
        self._num_members = num_members

    def broadcast(self, buckets: list[Tensor], *, timeout_s: float) -> None:
        """Send uint8 buckets in order, each within `timeout_s`. Raises WeightTransferError; the group is then gone."""
        if self._num_members == 0:
            return
        group = _opened(self._group)
        self._is_aborted.clear()
        try:
            group.send(buckets, timeout_s=timeout_s)
        except WeightTransferError:
            self._leave()
            raise

    def abort(self) -> None:
        """Break off what another thread is blocked in: the waiting for members, or a broadcast."""
        self._is_aborted.set()
        if group := self._group:
            group.abort()

    def close(self) -> None:
        """Tear the group down and stop the store. May be called again."""
        self._leave()
        self._store = None

    def _leave(self) -> None:
        self._num_members = None
        if self._group is not None:
            self._group.close()
            self._group = None


class CollectiveReceiver:
    """A generator's end: rank 1 or more. Fulfils WeightReceiver; belongs to one thread.

    Received tensors are views into staging buckets in host memory, which the next `receive` writes over: load them
    before that.
    """

    def __init__(self, *, device: str | torch.device) -> None:
        self._device = torch.device(device)
        self._group: _Group | None = None
        self._staging: list[Tensor] = []

    def open_epoch(self, opening: OpenEpoch, *, rank: int) -> None:
        """Leave the previous group, join this one. Blocks until all are in, or time is up and WeightTransferError."""
        self._leave()
        wire_device = torch.device("cpu") if opening.backend == "gloo" else self._device
        seat = Seat(opening.epoch, rank, len(opening.members) + 1)
        deadline = time.monotonic() + opening.timeout_s
        with _phase(seat, f"reach the learner's rendezvous store at {opening.host}:{opening.port}"):
            own_host = rendezvous.own_address(opening.host, opening.port, timeout_s=opening.timeout_s)
            store = rendezvous.connect(opening.host, opening.port, timeout_s=seconds_left(deadline))
        self._group = _Group(store, seat, own_host=own_host, device=wire_device, timeout_s=seconds_left(deadline))

    def receive(
        self, slots: list[TensorSlot], *, bucket_bytes: list[int], checksums: list[int], timeout_s: float
    ) -> list[tuple[str, Tensor]]:
        """Receive all buckets, verify, return named views; `timeout_s` bounds each bucket.

        Raises WeightTransferError. When only checksums or layout were wrong the group stays; else it is gone.
        """
        group = _opened(self._group)
        self._staging = flat.allocate(bucket_bytes, reuse=self._staging, is_pinned=self._device.type == "cuda")
        try:
            group.receive(self._staging, timeout_s=timeout_s)
        except WeightTransferError:
            self._leave()
            raise
        flat.verify(self._staging, expected=checksums)
        return flat.unpack(self._staging, slots)

    def close(self) -> None:
        """Tear the group down and let the staging memory go. May be called again."""
        self._leave()
        self._staging = []

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


Start = Callable[[int, Tensor], Callable[[], None]]
"""Begins the broadcast of bucket `index` from or into a buffer; what it returns blocks until that has ended."""


class DoubleBuffer:
    """Belongs to one thread. Its memory grows to twice the largest bucket and stays."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[Tensor] = []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, buckets: Sequence[Tensor], start: Start) -> None:
        """Broadcast host buckets in order. Blocks."""
        self._fit(buckets)
        self._upload(buckets, 0)
        for index in range(len(buckets)):
            self._finish_copies()
            finish = start(index, self._lane(buckets, index))
            # Into the other lane: the broadcast before this one, which used it, has ended.
            self._upload(buckets, index + 1)
            finish()

    def receive(self, buckets: Sequence[Tensor], start: Start) -> None:
        """Fill host buckets in order. Blocks."""
        self._fit(buckets)
        for index, bucket in enumerate(buckets):
            # While this lane fills, the other one is emptied; it must be empty before the next broadcast.
            start(index, self._lane(buckets, index))()
            self._finish_copies()
            with self._copying():
                bucket.copy_(self._lane(buckets, index), non_blocking=True)
        self._finish_copies()

    def _upload(self, buckets: Sequence[Tensor], index: int) -> None:
        if index < len(buckets):
            with self._copying():
                self._lane(buckets, index).copy_(buckets[index], non_blocking=True)

    def _fit(self, buckets: Sequence[Tensor]) -> None:
        largest = max((bucket.numel() for bucket in buckets), default=0)
        if not self._buffers or self._buffers[0].numel() < largest:
            self._buffers = [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(2)]

    def _lane(self, buckets: Sequence[Tensor], index: int) -> Tensor:
        return self._buffers[index % 2][: buckets[index].numel()]

    def _copying(self) -> AbstractContextManager[object]:
        """On a stream of its own, where there are streams."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _finish_copies(self) -> None:
        """Block until what was copied is there."""
        if self._stream is not None:
            self._stream.synchronize()


class _Backend(Protocol):
    """What is used of ProcessGroupGloo and ProcessGroupNCCL; the latter exists only in CUDA builds of torch."""

    def broadcast(self, tensor: Tensor, root: int, *, timeout: timedelta) -> dist.Work: ...

    def abort(self) -> None: ...


class _Group:
    """One epoch's process group as one rank sees it. Building it blocks until all ranks are in."""

    def __init__(
        self,
        store: dist.Store,
        seat: Seat,
        *,
        own_host: str,
        device: torch.device,
        timeout_s: float,
        is_aborted: Event | None = None,
    ) -> None:
        self._seat = seat
        self._lanes = DoubleBuffer(device) if device.type == "cuda" else None
        deadline = time.monotonic() + timeout_s
        prefixed = dist.PrefixStore(f"weights/epoch-{seat.epoch}", store)
        with _phase(seat, "gather"):
            rendezvous.gather(prefixed, seat, deadline=deadline, is_aborted=is_aborted)
        deadline = min(deadline, time.monotonic() + _CONNECT_S[device.type])
        with _phase(seat, "connect"):
            self._backend: _Backend | None = _build(
                prefixed, seat, own_host=own_host, device=device, timeout_s=seconds_left(deadline)
            )
        try:
            with _phase(seat, "probe"):
                self._begin(torch.zeros(1, dtype=torch.uint8, device=device), timeout_s=seconds_left(deadline))()
        except WeightTransferError:
            self.close()
            raise

    def send(self, buckets: Sequence[Tensor], *, timeout_s: float) -> None:
        """Host buckets from rank 0 to the others, in order, each within `timeout_s`. Raises WeightTransferError."""
        if self._lanes:
            self._lanes.send(buckets, partial(self._start, of=len(buckets), timeout_s=timeout_s))
        else:
            self._broadcast_in_pieces(buckets, timeout_s=timeout_s)

    def receive(self, buckets: Sequence[Tensor], *, timeout_s: float) -> None:
        """The other end of `send`, into host buckets of the same sizes. Raises WeightTransferError."""
        if self._lanes:
            self._lanes.receive(buckets, partial(self._start, of=len(buckets), timeout_s=timeout_s))
        else:
            self._broadcast_in_pieces(buckets, timeout_s=timeout_s)

    def abort(self) -> None:
        """Break off the operation under way, as far as the backend can."""
        if backend := self._backend:
            with suppress(*FAILURES):
                backend.abort()

    def close(self) -> None:
        """Close all connections at once, which ends the operations of all other ranks. No operation of its own may run.

        Gloo closes them when the last reference to the backend goes; one to this object may live on in the traceback
        of whatever failed.
        """
        self.abort()
        self._backend = None

    def _broadcast_in_pieces(self, buckets: Sequence[Tensor], *, timeout_s: float) -> None:
        for index, bucket in enumerate(buckets):
            deadline = time.monotonic() + timeout_s
            with _phase(self._seat, _phase_of(index, bucket, of=len(buckets))):
                for piece in bucket.split(_PIECE_BYTES):
                    self._begin(piece, timeout_s=seconds_left(deadline))()

    def _start(self, index: int, bucket: Tensor, *, of: int, timeout_s: float) -> Callable[[], None]:
        phase = _phase_of(index, bucket, of=of)
        with _phase(self._seat, phase):
            finish = self._begin(bucket, timeout_s=timeout_s)

        def finish_in_phase() -> None:
            with _phase(self._seat, phase):
                finish()

        return finish_in_phase

    def _begin(self, bucket: Tensor, *, timeout_s: float) -> Callable[[], object]:
        """Begin one operation; what it returns blocks until that has ended, and raises what went wrong."""
        if bucket.numel() == 0:
            return lambda: None
        # The operation's own limit is what ends it, and `wait` raises then. Gloo cannot be made to give up before; and
        # while an operation runs, letting go of its group would wait for it with Python's lock held.
        assert self._backend is not None, "a group that was closed has no operations"
        work = self._backend.broadcast(bucket, SENDER_RANK, timeout=timedelta(seconds=timeout_s))
        return partial(work.wait, timedelta(seconds=timeout_s + _GRACE_S))


def _build(store: dist.Store, seat: Seat, *, own_host: str, device: torch.device, timeout_s: float) -> _Backend:
    store.set_timeout(timedelta(seconds=timeout_s))
    if device.type == "cuda":
        return _build_nccl(store, seat)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_host)]
    return dist.ProcessGroupGloo(store, seat.rank, seat.num_ranks, options)


def _build_nccl(store: dist.Store, seat: Seat) -> _Backend:
    options = dist.ProcessGroupNCCL.Options()
    # Above every deadline of ours, because NCCL's watchdog answers its own timeout by ending the process.
    options._timeout = timedelta(days=1)
    options.group_name = f"weights-epoch-{seat.epoch}"
    return dist.ProcessGroupNCCL(store, seat.rank, seat.num_ranks, options)


def _opened(group: _Group | None) -> _Group:
    if group is None:
        raise WeightTransferError("a weight epoch must be open before weights travel: call open_epoch first")
    return group


def _phase_of(index: int, bucket: Tensor, *, of: int) -> str:
    return f"broadcast of bucket {index} of {of} ({bucket.numel()} bytes)"


@contextmanager
def _phase(seat: Seat, phase: str) -> Iterator[None]:
    try:
        yield
    except FAILURES as error:
        raise WeightTransferError(
            f"weight epoch {seat.epoch}, rank {seat.rank} of {seat.num_ranks}: {phase} failed: {error}"
        ) from error
