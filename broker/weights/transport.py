"""Protocols for the two ends of a weight transport, and a single-threaded in-memory transport for the serial mode."""

from typing import Protocol

from torch import Tensor

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import DeviceName, GroupBackend, OpenEpoch, Update
from slipstream.broker.weights import buckets as flat


class WeightSender(Protocol):
    """The learner's end; rank 0 of every epoch."""

    address: tuple[str, int]
    """Host and port of the rendezvous store; for a file, `file://` with its path, and 0."""
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
    """A generator's end, in the process that holds the model (for vLLM, the worker process)."""

    def open_epoch(self, opening: OpenEpoch, *, rank: int) -> None:
        """Join the group, blocking until all members have. Raises WeightTransferError."""

    def receive(self, update: Update) -> list[tuple[str, Tensor]]:
        """Receive all buckets, verify their checksums and return named tensors. Raises WeightTransferError.

        The tensors are views, valid until the next `receive`. An error leaves the engine at its current version.
        """

    def close(self) -> None: ...


class MemoryWeights:
    """State shared by both ends: the open epoch and its newest broadcast."""

    def __init__(self) -> None:
        self.epoch: int | None = None
        self.num_members = 0
        self.buckets: list[Tensor] = []


class MemorySender:
    """The learner's end. Implements WeightSender; never blocks."""

    address = "memory", 0
    device: DeviceName = "cpu"

    def __init__(self, weights: MemoryWeights) -> None:
        self._weights = weights

    def open_epoch(self, epoch: int, *, num_members: int, timeout_s: float, backend: GroupBackend = "gloo") -> None:
        self._weights.epoch, self._weights.num_members, self._weights.buckets = epoch, num_members, []

    def broadcast(self, buckets: list[Tensor], *, timeout_s: float) -> None:
        """Publish a copy; the caller may overwrite `buckets`. Raises WeightTransferError without an epoch."""
        if self._weights.epoch is None:
            raise WeightTransferError("a weight epoch must be open before a broadcast: call open_epoch first")
        self._weights.buckets = [bucket.clone() for bucket in buckets]

    def abort(self) -> None:
        """Do nothing: no operation blocks."""

    def close(self) -> None:
        self._weights.epoch, self._weights.buckets = None, []


class MemoryReceiver:
    """A generator's end. Implements WeightReceiver; never blocks, so engines call it on their event loop's thread.

    Received tensors are views shared by all receivers; treat them as read-only.
    """

    def __init__(self, weights: MemoryWeights) -> None:
        self._weights = weights
        self._epoch: int | None = None

    def open_epoch(self, opening: OpenEpoch, *, rank: int) -> None:
        if opening.epoch != self._weights.epoch or not 1 <= rank <= self._weights.num_members:
            raise WeightTransferError(
                f"weight epoch {self._weights.epoch} takes ranks 1 to {self._weights.num_members}, got rank {rank} of "
                f"epoch {opening.epoch}"
            )
        self._epoch = opening.epoch

    def receive(self, update: Update) -> list[tuple[str, Tensor]]:
        if self._epoch is None or self._epoch != self._weights.epoch:
            raise WeightTransferError(
                f"a weight epoch must be open before a broadcast, got {self._weights.epoch} while in {self._epoch}"
            )
        buckets = self._weights.buckets
        if (sizes := [bucket.numel() for bucket in buckets]) != update.bucket_bytes:
            raise WeightTransferError(f"buckets must have the announced sizes {update.bucket_bytes}, got {sizes}")
        return flat.unpack_verified(buckets, update)

    def close(self) -> None:
        self._epoch = None
