"""DoubleBuffer: two buffers on a GPU through which buckets in host memory travel, so that copying overlaps with sending.

A process group of GPUs sends what lies on its GPU, while versions are staged and verified in host memory: a whole one
beside the model would cost the model's size once more. While one bucket is broadcast, its neighbour is copied.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

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
