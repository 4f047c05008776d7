"""Protocols for the two ends of a weight transport, and an in-memory transport for the serial mode."""

from threading import Event
from typing import NamedTuple, Protocol

from torch import Tensor

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import DeviceName, GroupBackend, OpenEpoch, Update
from slipstream.broker.weights import buckets as flat


class HostBuckets(NamedTuple):
    """A verified version in host memory. Example: HostBuckets([tensor], "/proc/17/fd/9")."""

    tensors: list[Tensor]
    """uint8, one per bucket; valid until the next version is received."""
    path: str = ""
    """Shared memory with the same buckets, for other processes of this user; empty: none."""


class WeightSender(Protocol):
    """The learner's end; rank 0 of every epoch."""

    address: tuple[str, int]
    """Host and port of the rendezvous store."""
    device: DeviceName
    """Device of the sender, for the choice of an epoch's backend."""

    def open_epoch(self, epoch: int, *, num_members: int, timeout_s: float, backend: GroupBackend) -> None:
        """Build the group as rank 0, blocking until all members have joined. Raises WeightTransferError."""

    def broadcast(self, buckets: list[Tensor], *, timeout_s: float) -> None:
        """Send uint8 buckets in order, each within `timeout_s`. Raises WeightTransferError and closes the group."""

    def abort(self) -> None:
        """Abort another thread's blocked operation, which raises WeightTransferError."""

    def close(self) -> None: ...


class WeightReceiver(Protocol):
    """A generator's end. Belongs to one thread, except `device`."""

    @property
    def device(self) -> DeviceName:
        """Device that receives broadcasts."""

    def open_epoch(self, opening: OpenEpoch, *, rank: int) -> None:
        """Join the group, blocking until all members have. Raises WeightTransferError."""

    def receive(self, update: Update, *, cancelled: Event) -> HostBuckets:
        """Receive all buckets and verify their checksums. Raises WeightTransferError, soon after `cancelled`."""

    def close(self) -> None: ...


class MemorySender:
    """The learner's end. Implements WeightSender; never blocks."""

    address = "memory", 0
    device: DeviceName = "cpu"

    def __init__(self) -> None:
        self.epoch: int | None = None
        self.num_members = 0
        self.buckets: list[Tensor] = []
        """Newest broadcast of the epoch."""

    def open_epoch(self, epoch: int, *, num_members: int, timeout_s: float, backend: GroupBackend = "gloo") -> None:
        self.epoch, self.num_members, self.buckets = epoch, num_members, []

    def broadcast(self, buckets: list[Tensor], *, timeout_s: float) -> None:
        """Publish a copy; the caller may overwrite `buckets`. Raises WeightTransferError without an epoch."""
        if self.epoch is None:
            raise WeightTransferError("a weight epoch must be open before a broadcast: call open_epoch first")
        self.buckets = [bucket.clone() for bucket in buckets]

    def abort(self) -> None:
        """Do nothing: no operation blocks."""

    def close(self) -> None:
        self.epoch, self.buckets = None, []


class MemoryReceiver:
    """A generator's end. Implements WeightReceiver; runs on the event loop's thread, since it never blocks.

    All receivers share the sender's buckets; treat them as read-only.
    """

    device: DeviceName = "cpu"

    def __init__(self, sender: MemorySender) -> None:
        self._sender = sender
        self._epoch: int | None = None

    def open_epoch(self, opening: OpenEpoch, *, rank: int) -> None:
        epoch, num_members = self._sender.epoch, self._sender.num_members
        if opening.epoch != epoch or not 1 <= rank <= num_members:
            takes = f"weight epoch {epoch} takes ranks 1 to {num_members}"
            raise WeightTransferError(f"{takes}, got rank {rank} of epoch {opening.epoch}")
        self._epoch = opening.epoch

    def receive(self, update: Update, *, cancelled: Event) -> HostBuckets:
        if self._epoch is None or self._epoch != self._sender.epoch:
            got = f"got {self._sender.epoch} while in {self._epoch}"
            raise WeightTransferError(f"a weight epoch must be open before a broadcast, {got}")
        buckets = self._sender.buckets
        if (sizes := [bucket.numel() for bucket in buckets]) != update.bucket_bytes:
            raise WeightTransferError(f"buckets must have the announced sizes {update.bucket_bytes}, got {sizes}")
        flat.verify(buckets, expected=update.checksums)
        return HostBuckets(buckets)

    def close(self) -> None:
        self._epoch = None
