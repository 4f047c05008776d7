"""SharedBuckets: flat buckets in host memory that the engine's processes on this machine can map, without a file.

They are memory of the process that made them and go with it, however it ends.
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

# @@ How much memory a process can still take: what its machine has left, or less where its container may have no more.
_MOUNT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_FILES = {"": ("memory.max", "memory.current"), "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes")}
"""Controller -> limit and usage. The unnamed one is the unified hierarchy of cgroup v2."""
_CACHE = {"": ("inactive_file", "active_file"), "memory": ("total_inactive_file", "total_active_file")}
"""Parts of usage that the kernel lets go of before it kills: pages of files, of a model that was read, say."""


def free_memory_bytes(*, mount: Path = _MOUNT, own: Path = _OWN) -> int:
    """Before the kernel would have to kill; `own` is the file that names this process's cgroups."""
    limited = (_left(folder, controller) for folder, controller in _cgroups(mount, own))
    return min([psutil.virtual_memory().available, *(left for left in limited if left is not None)])


def _cgroups(mount: Path, own: Path) -> Iterator[tuple[Path, str]]:
    """Each cgroup that limits this process, with its controller: its own, and all above it.

    Inside a container its path may be that of the host, which is not there; the container's own is then the mount.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", maxsplit=2)
        for controller in _FILES.keys() & set(controllers.split(",")):
            top = mount / controller
            folder = top / path.lstrip("/")
            yield from ((each, controller) for each in (folder, *folder.parents) if each.is_relative_to(top))


def _left(folder: Path, controller: str) -> int | None:
    """None where nothing is limited, or told."""
    limit, usage = _FILES[controller]
    try:
        allowed, used = int((folder / limit).read_text()), int((folder / usage).read_text())
        told = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    cache = sum(int(told.get(name, 0)) for name in _CACHE[controller])
    return max(0, allowed - max(0, used - cache))


class SharedBuckets:
    """uint8 buckets of given sizes, all zero at first. Raises WeightTransferError when there is no memory for them."""

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
    """Views of the buckets of another process, not verified and not to be written to. Raises WeightTransferError."""
    try:
        return [_map_path(Path(path), size) for path, size in zip(paths, sizes, strict=True)]
    except (OSError, ValueError) as error:
        raise WeightTransferError(
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


def _no_room(num_bytes: int, got: str) -> WeightTransferError:
    return WeightTransferError(
        f"the weights ({num_bytes / 2**20:.0f} MiB) must fit into this machine's memory to be verified before they are "
        f"loaded, got {got}"
    )
