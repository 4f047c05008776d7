"""The two ends of a weight transport, as protocols."""

from typing import Protocol

from torch import Tensor

from slipstream.broker.messages import OpenEpoch
from slipstream.broker.weights.records import TensorSlot


class WeightSender(Protocol):
    """The learner's end."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the rendezvous store, for OpenEpoch."""
        ...

    def open_epoch(self, epoch: int, *, num_members: int, timeout_s: float) -> None:
        """Build the group, as rank 0. Blocks until all are in. Raises WeightTransferError."""
        ...

    def broadcast(self, buckets: list[Tensor], *, timeout_s: float) -> None:
        """Send uint8 buckets in order, each within `timeout_s`. Raises WeightTransferError; the group is then gone."""
        ...

    def abort(self) -> None:
        """Break off what another thread is blocked in; it raises WeightTransferError there. Nothing when it is not."""
        ...

    def close(self) -> None:
        """Tear the group down."""
        ...


class WeightReceiver(Protocol):
    """A generator's end; lives where the model lives (for vLLM, in its worker process)."""

    def open_epoch(self, opening: OpenEpoch, *, rank: int) -> None:
        """Build the group. Blocks until all are in. Raises WeightTransferError."""
        ...

    def receive(
        self, slots: list[TensorSlot], *, bucket_bytes: list[int], checksums: list[int], timeout_s: float
    ) -> list[tuple[str, Tensor]]:
        """Receive all buckets, verify their checksums, return named tensors (views). Raises WeightTransferError.

        The views are good until the next `receive`. Nothing is loaded when this raises: the engine still holds the
        version it had.
        """
        ...

    def close(self) -> None:
        """Tear the group down."""
        ...
