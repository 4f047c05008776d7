"""Collective transport: broadcasts over NCCL (GPUs) or Gloo (CPUs), in one process group per membership epoch.

The groups are built directly over a store that the learner keeps for the whole run, under a prefix per epoch.
torch's default group, which DeepSpeed and vLLM each create for themselves, is neither needed nor touched, and a group
can be closed and rebuilt as members join and leave.

Building has three phases, all under the epoch's deadline:
    gather   every member registers; rank 0 then publishes a verdict: proceed, or which members are missing
    connect  the process group is built
    probe    one byte is broadcast, which shows that the group works (NCCL connects only here)
Any later failure closes the group on every rank: a rank that fails closes its connections, which ends the operations of
the ranks that wait for it.

On GPUs a process survives the death of a peer only if TORCH_NCCL_ASYNC_ERROR_HANDLING=0 was set when it started:
otherwise NCCL's watchdog reacts to an error by ending the process.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Event
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import OpenEpoch, TensorSlot
from slipstream.broker.weights import buckets as flat
from slipstream.broker.weights import rendezvous
from slipstream.broker.weights.rendezvous import SENDER_RANK, EpochRank, seconds_left

_PIECE_BYTES = 1024 * 1024
"""Size of one Gloo operation; equal on all ranks. Gloo notices a dead peer at once except while it writes to it, so a
piece must fit the kernel's socket buffer: otherwise all other ranks would wait for the deadline."""
_CONNECT_S = {"cpu": 10.0, "cuda": 30.0}
"""Bound for the connect phase by device, below the epoch's deadline: all members are ready then, and one that dies
holds up all others and their engines. NCCL takes longer because it detects the topology first."""
_LOOPBACK = "127.0.0.1"
_GRACE_S = 1.0
"""Extra seconds for an operation that has reached its timeout to raise."""
TORCH_ERRORS = (RuntimeError, ValueError, OSError)
"""Errors that torch and sockets raise: DistError and Gloo's errors are RuntimeErrors."""


class CollectiveSender:
    """The learner's end: rank 0, and owner of the rendezvous store. Fulfils WeightSender; belongs to one thread."""

    def __init__(
        self, host: str = _LOOPBACK, *, device: str | torch.device, port: int = 0, folder: Path | None = None
    ) -> None:
        """Broadcast from `host`, an IPv4 address or name of this machine. Raises WeightTransferError.

        `folder`: where members meet by file, which a folder of its owner's keeps from strangers; None: at a TCPStore on
        `host` at `port`, 0 for any.
        """
        self._device = torch.device(device)
        self._host = host
        self._store: dist.Store | None
        if folder:
            self._address = rendezvous.create_file(folder), 0
            self._store = rendezvous.open_file(self._address[0])
        else:
            listening = rendezvous.listen(host, port=port)
            self._address, self._store = (host, listening.port), listening
        self._group: _Group | None = None
        self._num_members: int | None = None
        self._is_aborted = Event()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the rendezvous store, or `file://` and its path; the same for the whole run."""
        return self._address

    def open_epoch(self, epoch: int, *, num_members: int, timeout_s: float) -> None:
        """Close the previous group and build this one. Blocks until all members have joined, at most `timeout_s`.

        Without members there is no group and `broadcast` does nothing. Raises WeightTransferError, naming the missing
        ranks.
        """
        self._is_aborted.clear()
        self._close_group()
        if self._store is None:
            raise WeightTransferError(f"weight epoch {epoch} must be opened before close(): this sender is closed")
        if num_members > 0:
            own = EpochRank(epoch, SENDER_RANK, num_members + 1)
            self._group = _Group(
                self._store,
                own,
                own_host=self._host,
                device=self._device,
                timeout_s=timeout_s,
                is_aborted=self._is_aborted,
            )
        self._num_members = num_members

    def broadcast(self, buckets: list[Tensor], *, timeout_s: float) -> None:
        """Send uint8 buckets in order, each within `timeout_s`.

        Raises WeightTransferError; the group is closed then.
        """
        if self._num_members == 0:
            return  # a version without receivers is still committed
        group = _require_open(self._group)
        self._is_aborted.clear()
        try:
            group.send(buckets, timeout_s=timeout_s)
        except WeightTransferError:
            # The ranks are at different operations now: only a new epoch brings them together again.
            self._close_group()
            raise

    def abort(self) -> None:
        """Abort what another thread is blocked in: the wait for members, or a broadcast."""
        self._is_aborted.set()
        if group := self._group:
            group.abort()

    def close(self) -> None:
        """Close the group and stop the store. Idempotent."""
        self._close_group()
        self._store = None
        if rendezvous.is_file(self._address[0]):
            rendezvous.delete_file(self._address[0])

    def _close_group(self) -> None:
        self._num_members = None
        if self._group is not None:
            self._group.close()
            self._group = None


class CollectiveReceiver:
    """A generator's end: rank 1 or more. Fulfils WeightReceiver; belongs to one thread.

    Received tensors are views into staging buckets in host memory, which the next `receive` overwrites.
    """

    def __init__(self, *, device: str | torch.device) -> None:
        self._device = torch.device(device)
        self._group: _Group | None = None
        self._staging: list[Tensor] = []

    def open_epoch(self, opening: OpenEpoch, *, rank: int) -> None:
        """Leave the previous group and join this one. Blocks until all have joined. Raises WeightTransferError."""
        self._close_group()
        # Gloo sends host memory, which lets a generator share the learner's GPU.
        wire_device = torch.device("cpu") if opening.backend == "gloo" else self._device
        own = EpochRank(opening.epoch, rank, len(opening.members) + 1)
        deadline = time.monotonic() + opening.timeout_s
        with _phase(own, f"reach the learner's rendezvous store at {opening.host}:{opening.port}"):
            store, own_host = _meet(opening, deadline)
        self._group = _Group(store, own, own_host=own_host, device=wire_device, timeout_s=seconds_left(deadline))

    def receive(
        self, slots: list[TensorSlot], *, bucket_bytes: list[int], checksums: list[int], timeout_s: float
    ) -> list[tuple[str, Tensor]]:
        """Receive and verify all buckets, return named views; `timeout_s` bounds each bucket.

        Raises WeightTransferError. The group stays open if only a checksum or the layout was wrong, else it is closed.
        """
        group = _require_open(self._group)
        self._staging = flat.allocate(bucket_bytes, reuse=self._staging, is_pinned=self._device.type == "cuda")
        try:
            group.receive(self._staging, timeout_s=timeout_s)
        except WeightTransferError:
            self._close_group()
            raise
        # Before the engine sees any of it: a version that was half loaded could not be undone.
        flat.verify(self._staging, expected=checksums)
        return flat.unpack(self._staging, slots)

    def close(self) -> None:
        """Close the group and free the staging memory. Idempotent."""
        self._close_group()
        self._staging = []

    def _close_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


def _meet(opening: OpenEpoch, deadline: float) -> tuple[dist.Store, str]:
    """Open the learner's rendezvous store; returns it with this machine's address. Raises RuntimeError, OSError."""
    if rendezvous.is_file(opening.host):
        return rendezvous.open_file(opening.host), _LOOPBACK
    own_host = rendezvous.own_address(opening.host, opening.port, timeout_s=opening.timeout_s)
    return rendezvous.connect(opening.host, opening.port, timeout_s=seconds_left(deadline)), own_host


StartBroadcast = Callable[[int, Tensor], Callable[[], None]]
"""Starts the broadcast of bucket `index` from or into a buffer; returns a function that blocks until it has ended."""


class DoubleBuffer:
    """Two buffers on a GPU for buckets in host memory: while one bucket is broadcast, its neighbour is copied.

    A process group of GPUs sends GPU memory, while versions are staged and verified in host memory, because a second
    whole version beside the model would cost the model's size once more. The buffers grow to the largest bucket and are
    kept. Belongs to one thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[Tensor] = []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, buckets: Sequence[Tensor], start: StartBroadcast) -> None:
        """Broadcast host buckets in order. Blocks."""
        self._grow(buckets)
        self._upload(buckets, 0)
        for index in range(len(buckets)):
            self._finish_copies()
            finish = start(index, self._buffer(buckets, index))
            # Into the other buffer, which is free: its broadcast ended before this one started.
            self._upload(buckets, index + 1)
            finish()

    def receive(self, buckets: Sequence[Tensor], start: StartBroadcast) -> None:
        """Fill host buckets in order. Blocks."""
        self._grow(buckets)
        for index, bucket in enumerate(buckets):
            # While this buffer fills, the other one is copied out, which must be complete before the next broadcast.
            start(index, self._buffer(buckets, index))()
            self._finish_copies()
            with self._copying():
                bucket.copy_(self._buffer(buckets, index), non_blocking=True)
        self._finish_copies()

    def _upload(self, buckets: Sequence[Tensor], index: int) -> None:
        if index < len(buckets):
            with self._copying():
                self._buffer(buckets, index).copy_(buckets[index], non_blocking=True)

    def _grow(self, buckets: Sequence[Tensor]) -> None:
        largest = max((bucket.numel() for bucket in buckets), default=0)
        if not self._buffers or self._buffers[0].numel() < largest:
            self._buffers = [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(2)]

    def _buffer(self, buckets: Sequence[Tensor], index: int) -> Tensor:
        return self._buffers[index % 2][: buckets[index].numel()]

    def _copying(self) -> AbstractContextManager[object]:
        # On a stream of its own, so that copies overlap with the broadcast; a CPU has no streams.
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _finish_copies(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


class _Backend(Protocol):
    """Common interface of ProcessGroupGloo and ProcessGroupNCCL; the latter exists only in CUDA builds of torch."""

    def broadcast(self, tensor: Tensor, root: int, *, timeout: timedelta) -> dist.Work: ...

    def abort(self) -> None: ...


class _Group:
    """One rank's end of an epoch's process group. The constructor blocks until all ranks have joined."""

    def __init__(
        self,
        store: dist.Store,
        own: EpochRank,
        *,
        own_host: str,
        device: torch.device,
        timeout_s: float,
        is_aborted: Event | None = None,
    ) -> None:
        self._own = own
        self._double_buffer = DoubleBuffer(device) if device.type == "cuda" else None
        deadline = time.monotonic() + timeout_s
        # A prefix per epoch: late writes of an earlier epoch cannot be taken for this one's.
        prefixed = dist.PrefixStore(f"weights/epoch-{own.epoch}", store)
        with _phase(own, "gather"):
            rendezvous.gather(prefixed, own, deadline=deadline, is_aborted=is_aborted)
        deadline = min(deadline, time.monotonic() + _CONNECT_S[device.type])
        with _phase(own, "connect"):
            self._backend: _Backend | None = _build(
                prefixed, own, own_host=own_host, device=device, timeout_s=seconds_left(deadline)
            )
        try:
            with _phase(own, "probe"):
                self._begin_operation(
                    torch.zeros(1, dtype=torch.uint8, device=device), timeout_s=seconds_left(deadline)
                )()
        except WeightTransferError:
            self.close()
            raise

    def send(self, buckets: Sequence[Tensor], *, timeout_s: float) -> None:
        """Send host buckets to all other ranks, in order, each within `timeout_s`. Raises WeightTransferError."""
        if self._double_buffer:
            self._double_buffer.send(buckets, partial(self._start_bucket, of=len(buckets), timeout_s=timeout_s))
        else:
            self._broadcast_in_pieces(buckets, timeout_s=timeout_s)

    def receive(self, buckets: Sequence[Tensor], *, timeout_s: float) -> None:
        """Receive into host buckets of the same sizes. Raises WeightTransferError."""
        if self._double_buffer:
            self._double_buffer.receive(buckets, partial(self._start_bucket, of=len(buckets), timeout_s=timeout_s))
        else:
            self._broadcast_in_pieces(buckets, timeout_s=timeout_s)

    def abort(self) -> None:
        """Abort the running operation, as far as the backend supports it."""
        if backend := self._backend:
            with suppress(*TORCH_ERRORS):
                backend.abort()

    def close(self) -> None:
        """Close all connections, which ends the operations of the other ranks. No own operation may be running."""
        self.abort()
        # Gloo closes its connections with the last reference to the backend. Cleared here rather than with this object,
        # which a traceback may keep alive.
        self._backend = None

    def _broadcast_in_pieces(self, buckets: Sequence[Tensor], *, timeout_s: float) -> None:
        for index, bucket in enumerate(buckets):
            deadline = time.monotonic() + timeout_s
            with _phase(self._own, _phase_of(index, bucket, of=len(buckets))):
                for piece in bucket.split(_PIECE_BYTES):
                    self._begin_operation(piece, timeout_s=seconds_left(deadline))()

    def _start_bucket(self, index: int, bucket: Tensor, *, of: int, timeout_s: float) -> Callable[[], None]:
        phase = _phase_of(index, bucket, of=of)
        with _phase(self._own, phase):
            finish = self._begin_operation(bucket, timeout_s=timeout_s)

        def finish_in_phase() -> None:
            with _phase(self._own, phase):
                finish()

        return finish_in_phase

    def _begin_operation(self, bucket: Tensor, *, timeout_s: float) -> Callable[[], object]:
        """Begin one operation; returns a function that blocks until it has ended and raises its error."""
        if bucket.numel() == 0:
            return lambda: None
        # The operation's own timeout ends it and makes `wait` raise. Gloo has no way to cancel it earlier, and dropping
        # the group while an operation runs would block on it with the GIL held.
        assert self._backend is not None, "a closed group must not be used"
        work = self._backend.broadcast(bucket, SENDER_RANK, timeout=timedelta(seconds=timeout_s))
        return partial(work.wait, timedelta(seconds=timeout_s + _GRACE_S))


def _build(store: dist.Store, own: EpochRank, *, own_host: str, device: torch.device, timeout_s: float) -> _Backend:
    store.set_timeout(timedelta(seconds=timeout_s))
    if device.type == "cuda":
        return _build_nccl(store, own)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_host)]
    return dist.ProcessGroupGloo(store, own.rank, own.num_ranks, options)


def _build_nccl(store: dist.Store, own: EpochRank) -> _Backend:
    options = dist.ProcessGroupNCCL.Options()
    # Above all other timeouts, because NCCL's watchdog ends the process when its own one expires.
    options._timeout = timedelta(days=1)
    options.group_name = f"weights-epoch-{own.epoch}"
    return dist.ProcessGroupNCCL(store, own.rank, own.num_ranks, options)


def _require_open(group: _Group | None) -> _Group:
    if group is None:
        raise WeightTransferError("a weight epoch must be open before a broadcast: call open_epoch first")
    return group


def _phase_of(index: int, bucket: Tensor, *, of: int) -> str:
    return f"broadcast of bucket {index} of {of} ({bucket.numel()} bytes)"


@contextmanager
def _phase(own: EpochRank, phase: str) -> Iterator[None]:
    try:
        yield
    except TORCH_ERRORS as error:
        raise WeightTransferError(
            f"weight epoch {own.epoch}, rank {own.rank} of {own.num_ranks}: {phase} failed: {error}"
        ) from error
