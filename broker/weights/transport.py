"""Protocols of the two ends of a weight transport."""

from typing import Protocol

from torch import Tensor

from slipstream.broker.messages import DeviceName, GroupBackend, OpenEpoch, TensorSlot


class WeightSender(Protocol):
    """The learner's end; rank 0 of every epoch."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the rendezvous store, for OpenEpoch."""
        ...

    @property
    def device(self) -> DeviceName:
        """Device of the sender, by which the backend of an epoch is chosen."""
        ...

    def open_epoch(self, epoch: int, *, num_members: int, timeout_s: float, backend: GroupBackend) -> None:
        """Build the group as rank 0. Blocks until all members have joined. Raises WeightTransferError."""
        ...

    def broadcast(self, buckets: list[Tensor], *, timeout_s: float) -> None:
        """Send uint8 buckets in order, each within `timeout_s`.

        Raises WeightTransferError; the group is closed then.
        """
        ...

    def abort(self) -> None:
        """Abort the operation that another thread is blocked in, which raises WeightTransferError there."""
        ...

    def close(self) -> None: ...


class WeightReceiver(Protocol):
    """A generator's end, in the process that holds the model (for vLLM, its worker process)."""

    def open_epoch(self, opening: OpenEpoch, *, rank: int) -> None:
        """Join the group. Blocks until all members have joined. Raises WeightTransferError."""
        ...

    def receive(
        self, slots: list[TensorSlot], *, bucket_bytes: list[int], checksums: list[int], timeout_s: float
    ) -> list[tuple[str, Tensor]]:
        """Receive all buckets, verify their checksums and return named tensors. Raises WeightTransferError.

        The tensors are views, valid until the next `receive`. They are verified before they are returned, so that an
        error leaves the engine with the version it had.
        """
        ...

    def close(self) -> None: ...
