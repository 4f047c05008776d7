"""SharedBuckets: flat buckets in host memory that the engine's processes on this machine can map, without a file.

They are memory of the process that made them and go with it, however it ends.
"""

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from broker.errors import WeightTransferFault
from broker.weights.free_memory import free_memory_bytes


class SharedBuckets:
    """uint8 buckets of given sizes, all zero at first. Raises WeightTransferFault when there is no memory for them."""

    def __init__(self, sizes: Sequence[int]) -> None:
        _check_memory(sum(sizes))
        self._descriptors: list[int] = []
        self.tensors: list[Tensor] = []
        """To be written to; good until `close`, for views of them too."""
        try:
            for size in sizes:
                self._add(size)
        except OSError as error:
            self.close()
            raise _no_room(sum(sizes), str(error)) from error

    @property
    def sizes(self) -> list[int]:
        """Bytes of each."""
        return [tensor.numel() for tensor in self.tensors]

    @property
    def paths(self) -> list[str]:
        """What another process of this user gives to `map_buckets`."""
        return [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in self._descriptors]

    def close(self) -> None:
        """Let the memory go, once nothing views it any more. May be called again."""
        while self._descriptors:
            os.close(self._descriptors.pop())
        self.tensors = []

    def _add(self, size: int) -> None:
        descriptor = os.memfd_create("slipstream-weights", os.MFD_CLOEXEC)
        self._descriptors.append(descriptor)
        os.ftruncate(descriptor, size)
        self.tensors.append(_map(descriptor, size, is_writable=True))


def map_buckets(paths: Sequence[str], *, sizes: Sequence[int]) -> list[Tensor]:
    """Views of the buckets of another process, not verified and not to be written to. Raises WeightTransferFault."""
    try:
        return [_map_path(Path(path), size) for path, size in zip(paths, sizes, strict=True)]
    except (OSError, ValueError) as error:
        raise WeightTransferFault(
            f"the engine must be able to map the {len(sizes)} buckets that were fetched for it, got {error}"
        ) from error


def _map_path(path: Path, size: int) -> Tensor:
    with path.open("rb") as file:
        return _map(file.fileno(), size, is_writable=False)


def _map(descriptor: int, size: int, *, is_writable: bool) -> Tensor:
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    # A copy on write for the reader: torch knows no tensors that cannot be written to.
    access = mmap.ACCESS_WRITE if is_writable else mmap.ACCESS_COPY
    return torch.from_numpy(np.frombuffer(mmap.mmap(descriptor, size, access=access), dtype=np.uint8))


def _check_memory(num_bytes: int) -> None:
    free = free_memory_bytes()
    if num_bytes > free:
        raise _no_room(num_bytes, f"{free / 2**20:.0f} MiB available")


def _no_room(num_bytes: int, got: str) -> WeightTransferFault:
    return WeightTransferFault(
        f"the weights ({num_bytes / 2**20:.0f} MiB) must fit into this machine's memory to be verified before they are "
        f"loaded, got {got}"
    )
