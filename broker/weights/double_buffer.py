"""DoubleBuffer: two buffers on a GPU between buckets in host memory and a broadcast that takes GPU memory.

Invariant: nothing is enqueued on the default stream, on which the learner trains: copies have a stream of their own,
broadcasts another. A copy starts only after the broadcast out of its buffer ended, a broadcast only after its copy.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

StartBroadcast = Callable[[int, Tensor], Callable[[], object]]
"""Starts the broadcast of bucket `index` from or into a buffer, behind the current stream; returns a function that
makes that stream wait for its end, and blocks until then."""


class DoubleBuffer:
    """While one bucket is broadcast, its neighbour is copied. Belongs to one thread.

    Versions are staged and verified in host memory, because a second whole version beside the model would cost the
    model's size once more. The buffers grow to the largest bucket and are kept.
    """

    def __init__(self, device: torch.device, *, cuda: Any = torch.cuda) -> None:
        """`cuda`: torch.cuda, or what has its streams."""
        self._device = device
        self._cuda = cuda
        self._copies = cuda.Stream(device)
        self._broadcasts = cuda.Stream(device)
        self._buffers: list[Tensor] = []

    def send(self, buckets: Sequence[Tensor], start: StartBroadcast) -> None:
        """Broadcast buckets in order; those on the GPU already as they are. Blocks."""
        self._grow([bucket for bucket in buckets if not bucket.is_cuda])
        self._upload(buckets, 0)
        for index in range(len(buckets)):
            self._broadcasts.wait_stream(self._copies)
            with self._cuda.stream(self._broadcasts):
                finish = start(index, self._buffer(buckets, index))
                # Into the other buffer, which is free: `finish` has blocked until its broadcast ended.
                self._upload(buckets, index + 1)
                finish()

    def receive(self, buckets: Sequence[Tensor], start: StartBroadcast) -> None:
        """Fill host buckets in order. Blocks."""
        self._grow(buckets)
        copied: list[Any] = []
        for index, bucket in enumerate(buckets):
            with self._cuda.stream(self._broadcasts):
                if index > 1:
                    self._broadcasts.wait_event(copied[index - 2])
                start(index, self._buffer(buckets, index))()
            self._copies.wait_stream(self._broadcasts)
            # Out of this buffer while the other one fills.
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
            # On the stream that writes them first: memory of the default stream's may still be read by its kernels.
            with self._cuda.stream(self._copies):
                self._buffers = [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(2)]

    def _buffer(self, buckets: Sequence[Tensor], index: int) -> Tensor:
        bucket = buckets[index]
        return bucket if bucket.is_cuda else self._buffers[index % 2][: bucket.numel()]
