"""DoubleBuffer: moves the buckets of a broadcast between host memory and a GPU, while other buckets are broadcast."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

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
            # On the stream that writes them first: kernels on the default stream may still read memory allocated there.
            with self._cuda.stream(self._copies):
                self._buffers = [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(2)]

    def _buffer(self, buckets: Sequence[Tensor], index: int) -> Tensor:
        bucket = buckets[index]
        return bucket if bucket.is_cuda else self._buffers[index % 2][: bucket.numel()]
