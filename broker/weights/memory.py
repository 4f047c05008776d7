"""Weight transport within one process, for the serial mode.

Fulfils the protocols of the collective transport with one difference that a single thread requires: the sender never
waits for members. A receiver that comes before the sender waits up to its deadline.
"""

import threading
import time
from collections.abc import Callable

from torch import Tensor

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import DeviceName, GroupBackend, OpenEpoch, TensorSlot
from slipstream.broker.weights import buckets as flat


class MemoryWeights:
    """State shared by sender and receivers: the open epoch and its latest broadcast."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.epoch: int | None = None
        self.num_members = 0
        self.num_broadcasts = 0
        self.buckets: list[Tensor] = []

    def wait_until(self, reached: Callable[[], bool], *, timeout_s: float, awaited: str) -> None:
        """Wait for a condition on this state. The caller holds `changed`. Raises WeightTransferError."""
        if not self.changed.wait_for(reached, timeout_s):
            raise WeightTransferError(f"{awaited} must arrive within {timeout_s:g} s, got nothing from the learner")


class MemorySender:
    """The learner's end. Fulfils WeightSender; never blocks."""

    def __init__(self, weights: MemoryWeights) -> None:
        self._weights = weights
        self._is_open = False

    @property
    def address(self) -> tuple[str, int]:
        """Placeholder for OpenEpoch: nothing listens."""
        return "memory", 0

    @property
    def device(self) -> DeviceName:
        return "cpu"

    def open_epoch(self, epoch: int, *, num_members: int, timeout_s: float, backend: GroupBackend = "gloo") -> None:
        """Open the epoch at once; members join later. There is no group, so `backend` means nothing."""
        with self._weights.changed:
            self._weights.epoch, self._weights.num_members = epoch, num_members
            self._weights.num_broadcasts, self._weights.buckets = 0, []
            self._weights.changed.notify_all()
        self._is_open = True

    def broadcast(self, buckets: list[Tensor], *, timeout_s: float) -> None:
        """Publish a copy, so that the caller may overwrite `buckets`. Raises WeightTransferError without an epoch."""
        if not self._is_open:
            raise WeightTransferError("a weight epoch must be open before a broadcast: call open_epoch first")
        with self._weights.changed:
            self._weights.buckets = [bucket.clone() for bucket in buckets] if self._weights.num_members else []
            self._weights.num_broadcasts += 1
            self._weights.changed.notify_all()

    def abort(self) -> None:
        """Do nothing: no operation blocks."""

    def close(self) -> None:
        """Close the epoch and free the copy. Idempotent."""
        with self._weights.changed:
            self._weights.epoch, self._weights.buckets = None, []
            self._weights.changed.notify_all()
        self._is_open = False


class MemoryReceiver:
    """A generator's end. Fulfils WeightReceiver. Received tensors are views shared by all receivers: read-only."""

    def __init__(self, weights: MemoryWeights) -> None:
        self._weights = weights
        self._epoch: int | None = None
        self._num_received = 0

    def open_epoch(self, opening: OpenEpoch, *, rank: int) -> None:
        """Join the epoch once the sender has opened it. Raises WeightTransferError."""
        shared = self._weights
        with shared.changed:
            awaited = f"weight epoch {opening.epoch}"
            shared.wait_until(lambda: shared.epoch == opening.epoch, timeout_s=opening.timeout_s, awaited=awaited)
            if not 1 <= rank <= shared.num_members:
                raise WeightTransferError(
                    f"a rank of weight epoch {opening.epoch} must be in 1..{shared.num_members}, got {rank}"
                )
        self._epoch, self._num_received = opening.epoch, 0

    def receive(
        self, slots: list[TensorSlot], *, bucket_bytes: list[int], checksums: list[int], timeout_s: float
    ) -> list[tuple[str, Tensor]]:
        """Return the verified tensors of the next broadcast; waits at most `timeout_s` per bucket.

        Raises WeightTransferError.
        """
        buckets = self._next_buckets(deadline=time.monotonic() + timeout_s * max(len(bucket_bytes), 1))
        if (sizes := [bucket.numel() for bucket in buckets]) != bucket_bytes:
            raise WeightTransferError(f"buckets must have the announced sizes {bucket_bytes}, got {sizes}")
        flat.verify(buckets, expected=checksums)
        return flat.unpack(buckets, slots)

    def close(self) -> None:
        self._epoch = None

    def _next_buckets(self, *, deadline: float) -> list[Tensor]:
        shared = self._weights
        with shared.changed:
            if self._epoch is None or self._epoch != shared.epoch:
                raise WeightTransferError(
                    f"a weight epoch must be open before a broadcast: joined is {self._epoch}, open is {shared.epoch}"
                )
            shared.wait_until(
                lambda: shared.num_broadcasts > self._num_received or shared.epoch != self._epoch,
                timeout_s=max(deadline - time.monotonic(), 0.0),
                awaited=f"a broadcast in weight epoch {self._epoch}",
            )
            if shared.epoch != self._epoch:
                raise WeightTransferError(f"weight epoch {self._epoch} was closed by the learner during a broadcast")
            self._num_received = shared.num_broadcasts
            return shared.buckets
