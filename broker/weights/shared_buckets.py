"""SharedBuckets: flat buckets in anonymous memory that the engine's processes on this machine can map.

The memory belongs to the creating process and is freed with it, however it ends.
"""

import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import Tensor

from slipstream.broker.errors import WeightTransferError

# --- free memory -----------------------------------------------------------------------------------------------------
_MOUNT, _OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_LIMIT_FILES = {"": ("memory.max", "memory.current"), "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes")}
"""Controller -> files of its limit and usage. The unnamed controller is cgroup v2's unified hierarchy."""
_CACHE_FIELDS = {"": ("inactive_file", "active_file"), "memory": ("total_inactive_file", "total_active_file")}
"""Controller -> parts of the usage that the kernel reclaims before it kills: the page cache, for example of a model."""


def free_memory_bytes(*, mount: Path = _MOUNT, own: Path = _OWN_CGROUPS) -> int:
    """Return the memory this process can still take: of the machine, or less if a container limits it.

    `own`: the file that lists this process's cgroups.
    """
    limited = (_left(folder, controller) for folder, controller in _cgroups(mount, own))
    return min([psutil.virtual_memory().available, *(left for left in limited if left is not None)])


def _cgroups(mount: Path, own: Path) -> Iterator[tuple[Path, str]]:
    """Yield every cgroup that limits this process, with its controller: its own and all its ancestors.

    In a container the path may be the host's, which does not exist there; the mount itself is then the container's.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", maxsplit=2)
        for controller in _LIMIT_FILES.keys() & set(controllers.split(",")):
            top = mount / controller
            folder = top / path.lstrip("/")
            yield from ((each, controller) for each in (folder, *folder.parents) if each.is_relative_to(top))


def _left(folder: Path, controller: str) -> int | None:
    """Return the bytes left in one cgroup; None if it has no limit."""
    limit, usage = _LIMIT_FILES[controller]
    try:
        allowed, used = int((folder / limit).read_text()), int((folder / usage).read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    cache = sum(int(statistics.get(name, 0)) for name in _CACHE_FIELDS[controller])
    return max(0, allowed - max(0, used - cache))


class SharedBuckets:
    """uint8 buckets of given sizes, initially zero. The constructor raises WeightTransferError if memory is short."""

    def __init__(self, sizes: Sequence[int]) -> None:
        _check_memory(sum(sizes))
        self._descriptors: list[int] = []
        self.tensors: list[Tensor] = []
        """Writable; valid until `close`, as are views of them."""
        try:
            for size in sizes:
                self._add(size)
        except OSError as error:
            self.close()
            raise _memory_error(sum(sizes), str(error)) from error

    @property
    def sizes(self) -> list[int]:
        """Size of each bucket, bytes."""
        return [tensor.numel() for tensor in self.tensors]

    @property
    def paths(self) -> list[str]:
        """Paths for `map_buckets` in another process of this user."""
        return [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in self._descriptors]

    def close(self) -> None:
        """Free the memory once no views of it remain. Idempotent."""
        while self._descriptors:
            os.close(self._descriptors.pop())
        self.tensors = []

    def _add(self, size: int) -> None:
        # No file that a crash could leave behind; other processes open it through /proc.
        descriptor = os.memfd_create("slipstream-weights", os.MFD_CLOEXEC)
        self._descriptors.append(descriptor)
        os.ftruncate(descriptor, size)
        self.tensors.append(_map(descriptor, size, is_writable=True))


def map_buckets(paths: Sequence[str], *, sizes: Sequence[int]) -> list[Tensor]:
    """Map the buckets of another process, unverified and read-only. Raises WeightTransferError."""
    try:
        return [_map_path(Path(path), size) for path, size in zip(paths, sizes, strict=True)]
    except (OSError, ValueError) as error:
        raise WeightTransferError(
            f"the engine must be able to map the {len(sizes)} fetched buckets, got {error}"
        ) from error


def _map_path(path: Path, size: int) -> Tensor:
    with path.open("rb") as file:
        return _map(file.fileno(), size, is_writable=False)


def _map(descriptor: int, size: int, *, is_writable: bool) -> Tensor:
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    # Copy-on-write for the reader: torch has no read-only tensors.
    access = mmap.ACCESS_WRITE if is_writable else mmap.ACCESS_COPY
    return torch.from_numpy(np.frombuffer(mmap.mmap(descriptor, size, access=access), dtype=np.uint8))


def _check_memory(num_bytes: int) -> None:
    # The kernel grants the memory lazily, and would kill the process only when it is written to.
    free = free_memory_bytes()
    if num_bytes > free:
        raise _memory_error(num_bytes, f"{free / 2**20:.0f} MiB available")


def _memory_error(num_bytes: int, got: str) -> WeightTransferError:
    return WeightTransferError(
        f"the weights ({num_bytes / 2**20:.0f} MiB) must fit into memory to be verified before they are loaded, "
        f"got {got}"
    )
