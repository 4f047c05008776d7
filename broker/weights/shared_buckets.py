"""SharedBuckets: flat buckets in anonymous memory that the engine's processes on this machine can map.

The kernel frees the memory when the creating process ends, even after a crash.
"""

import mmap
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import structlog
import torch
from torch import Tensor

from slipstream.broker.errors import WeightTransferError
from slipstream.runtime.process import GROUPS, OWN_GROUPS, group_limits

log = structlog.get_logger(__name__)


def free_memory_bytes(*, mount: Path = GROUPS, own: Path = OWN_GROUPS) -> int:
    """Memory available on the machine, or in the container if less."""
    limits = group_limits("memory", root=mount, own=own)
    return min([psutil.virtual_memory().available, *(each.left for each in limits)])


class SharedBuckets:
    """Zeroed uint8 buckets in one mapping: one descriptor each could exceed the process's limit."""

    def __init__(self, sizes: Sequence[int], *, is_pinned: bool = False) -> None:
        """Allocate the buckets. Raises WeightTransferError if memory is short.

        `is_pinned`: page-lock the memory, for asynchronous copies from and to a GPU.
        """
        # The kernel allocates lazily and would kill the process at the first write.
        free = free_memory_bytes()
        if sum(sizes) > free:
            raise _memory_error(sum(sizes), f"{free / 2**20:.0f} MiB available")
        self.sizes = list(sizes)
        """Size of each bucket, bytes; empty once closed."""
        # A memfd leaves no file behind after a crash; other processes open it through /proc.
        self._descriptor = os.memfd_create("slipstream-weights", os.MFD_CLOEXEC)
        self._free = weakref.finalize(self, os.close, self._descriptor)
        try:
            os.ftruncate(self._descriptor, _end(sizes))
            memory = _map(self._descriptor, _end(sizes), is_writable=True, is_pinned=is_pinned)
        except OSError as error:
            self.close()
            raise _memory_error(sum(sizes), str(error)) from error
        self.tensors: list[Tensor] = _split(memory, sizes)
        """Writable tensors, valid with their views until `close`."""

    @property
    def path(self) -> str:
        """Path for `map_buckets` in another process of this user."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        """Free the memory once no views of it remain. Idempotent."""
        self._free()
        self.tensors, self.sizes = [], []


class BucketMaps:
    """Buckets of other processes, kept mapped: mapping a page takes longer than copying it."""

    def __init__(self, *, is_pinned: bool = False) -> None:
        self._is_pinned = is_pinned
        self._maps: dict[str, tuple[int, list[Tensor]]] = {}

    def get(self, path: str, *, sizes: Sequence[int]) -> list[Tensor]:
        """Map the buckets at `path`, unverified; treat them as read-only. Raises WeightTransferError."""
        self._maps = {name: known for name, known in self._maps.items() if _inode(name) == known[0]}
        if not _inode(path):
            raise WeightTransferError(f"the buckets of this machine must exist at {path}, got no file that can be read")
        _, tensors = self._maps.get(path, (None, []))
        if [tensor.numel() for tensor in tensors] != list(sizes):
            tensors = map_buckets(path, sizes=sizes, is_pinned=self._is_pinned)
            self._maps[path] = _inode(path), tensors
        return tensors


def _inode(path: str) -> int:
    """Number of a file, unique while it is mapped; 0 if missing."""
    try:
        return Path(path).stat().st_ino
    except OSError:
        return 0


def map_buckets(path: str, *, sizes: Sequence[int], is_pinned: bool = False) -> list[Tensor]:
    """Map another process's buckets, unverified; treat them as read-only. Raises WeightTransferError."""
    try:
        # Page-locking copy-on-write memory would copy it, so map pinned memory writable.
        with Path(path).open("r+b" if is_pinned else "rb") as file:
            return _split(_map(file.fileno(), _end(sizes), is_writable=is_pinned, is_pinned=is_pinned), sizes)
    except (OSError, ValueError) as error:
        must = f"the engine must be able to map the {len(sizes)} buckets of its machine"
        raise WeightTransferError(f"{must}, got {error}") from error


def _end(sizes: Sequence[int]) -> int:
    return sum(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes)


def _split(memory: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    starts = [_end(sizes[:index]) for index in range(len(sizes))]
    return [memory[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def _map(descriptor: int, size: int, *, is_writable: bool, is_pinned: bool) -> Tensor:
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    # Copy-on-write for readers, because torch has no read-only tensors.
    access = mmap.ACCESS_WRITE if is_writable else mmap.ACCESS_COPY
    mapped = np.frombuffer(mmap.mmap(descriptor, size, access=access), dtype=np.uint8)
    memory = torch.from_numpy(mapped)
    if is_pinned:
        # Page-lock the memory while it is mapped. A failure only makes copies slower.
        cuda: Any = torch.cuda.cudart()
        if int(cuda.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0:
            weakref.finalize(mapped, cuda.cudaHostUnregister, memory.data_ptr())
        else:
            log.warning("weights_not_pinned", bytes=memory.numel())
    return memory


def _memory_error(num_bytes: int, got: str) -> WeightTransferError:
    must = "must fit into memory to be verified before they are loaded"
    return WeightTransferError(f"the weights ({num_bytes / 2**20:.0f} MiB) {must}, got {got}")
