"""How much memory a process can still take: what its machine has left, or less where its container may have no more."""

from collections.abc import Iterator
from pathlib import Path

import psutil

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
