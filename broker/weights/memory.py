"""Weights handed over inside one process: the transport of the serial mode.

Fulfils the same protocols as the collective transport, with one difference that a single thread needs: the sender never
waits for members. A receiver that comes before the sender waits, up to its deadline.
"""

import threading
import time
from collections.abc import Callable

from torch import Tensor

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import OpenEpoch
from slipstream.broker.weights import buckets as flat
from slipstream.broker.weights.records import TensorSlot


class MemoryWeights:
    """What sender and receivers share: the epoch that is open, and what was last broadcast in it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.epoch: int | None = None
        self.num_members = 0
        self.num_broadcasts = 0
        self.buckets: list[Tensor] = []

    def await_that(self, reached: Callable[[], bool], *, timeout_s: float, waited_for: str) -> None:
        """Wait for a state of this record. The caller holds `changed`. Raises WeightTransferError."""
        if not self.changed.wait_for(reached, timeout_s):
            raise WeightTransferError(f"{waited_for} must come within {timeout_s:g} s, got nothing from the learner")


class MemorySender:
    """The learner's end. Fulfils WeightSender; never blocks."""

    def __init__(self, weights: MemoryWeights) -> None:
        self._weights = weights
        self._is_open = False

    @property
    def address(self) -> tuple[str, int]:
        """Nothing listens: a name for OpenEpoch."""
        return "memory", 0

    def open_epoch(self, epoch: int, *, num_members: int, timeout_s: float) -> None:
        """Open the epoch at once; members join when they come."""
        with self._weights.changed:
            self._weights.epoch, self._weights.num_members = epoch, num_members
            self._weights.num_broadcasts, self._weights.buckets = 0, []
            self._weights.changed.notify_all()
        self._is_open = True

    def broadcast(self, buckets: list[Tensor], *, timeout_s: float) -> None:
        """Hand over a copy: the caller may write over `buckets`. Raises WeightTransferError without an epoch."""
        if not self._is_open:
            raise WeightTransferError("a weight epoch must be open before weights travel: call open_epoch first")
        with self._weights.changed:
            self._weights.buckets = [bucket.clone() for bucket in buckets] if self._weights.num_members else []
            self._weights.num_broadcasts += 1
            self._weights.changed.notify_all()

    def abort(self) -> None:
        """Nothing blocks here."""

    def close(self) -> None:
        """Close the epoch and let the copy go. May be called again."""
        with self._weights.changed:
            self._weights.epoch, self._weights.buckets = None, []
            self._weights.changed.notify_all()
        self._is_open = False


class MemoryReceiver:
    """A generator's end. Fulfils WeightReceiver. Received tensors are views shared by all receivers: read only."""

    def __init__(self, weights: MemoryWeights) -> None:
        self._weights = weights
        self._epoch: int | None = None
        self._num_received = 0

    def open_epoch(self, opening: OpenEpoch, *, rank: int) -> None:
        """Join the epoch once the sender opened it. Raises WeightTransferError."""
        shared = self._weights
        with shared.changed:
            waited_for = f"weight epoch {opening.epoch}"
            shared.await_that(lambda: shared.epoch == opening.epoch, timeout_s=opening.timeout_s, waited_for=waited_for)
            if not 1 <= rank <= shared.num_members:
                raise WeightTransferError(
                    f"a rank of weight epoch {opening.epoch} must be in 1..{shared.num_members}, got {rank}"
                )
        self._epoch, self._num_received = opening.epoch, 0

    def receive(
        self, slots: list[TensorSlot], *, bucket_bytes: list[int], checksums: list[int], timeout_s: float
    ) -> list[tuple[str, Tensor]]:
        """The next broadcast's tensors, verified; waits at most `timeout_s` per bucket. Raises WeightTransferError."""
        buckets = self._next_buckets(deadline=time.monotonic() + timeout_s * max(len(bucket_bytes), 1))
        if (sizes := [bucket.numel() for bucket in buckets]) != bucket_bytes:
            raise WeightTransferError(f"buckets must have the announced sizes {bucket_bytes}, got {sizes}")
        flat.verify(buckets, expected=checksums)
        return flat.unpack(buckets, slots)

    def close(self) -> None:
        """Leave the epoch. May be called again."""
        self._epoch = None

    def _next_buckets(self, *, deadline: float) -> list[Tensor]:
        shared = self._weights
        with shared.changed:
            if self._epoch is None or self._epoch != shared.epoch:
                raise WeightTransferError(
                    f"a weight epoch must be open before weights travel: joined {self._epoch}, open is {shared.epoch}"
                )
            shared.await_that(
                lambda: shared.num_broadcasts > self._num_received or shared.epoch != self._epoch,
                timeout_s=max(deadline - time.monotonic(), 0.0),
                waited_for=f"a broadcast in weight epoch {self._epoch}",
            )
            if shared.epoch != self._epoch:
                raise WeightTransferError(f"weight epoch {self._epoch} was closed by the learner during a broadcast")
            self._num_received = shared.num_broadcasts
            return shared.buckets
