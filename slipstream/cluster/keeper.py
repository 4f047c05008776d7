"""Keeper: program between a role and its starter. When one ends, so do all processes of the role.

Consumes: on stdin `t` (SIGTERM to the role), `k` (SIGKILL to all), or EOF (the starter is gone).
Produces: on descriptor STATUS the lines `started PID` and, once no descendant is left, `ended CODE`; a line in the
role's log for every action.
Invariant: every descendant of the role is a descendant of the keeper, even in another session.

Imports only the standard library and runs by path, to start in milliseconds.

python -I -S keeper.py STATUS GRACE_SECONDS attached|detached COMMAND...
"""

import ctypes
import os
import select
import signal
import sys
import time
from contextlib import suppress

LOG_PREFIX = "keeper: "
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_TIMEOUT_S = 5.0
"""Limit after SIGKILL, which does not end a process that hangs in the kernel."""
_CANNOT_START = 127
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
_SIGNAL_EXIT = 128
"""Added to a signal number, as in shells."""


class Keeper:
    """Keeps one role. Life: start -> watch -> exit code."""

    def __init__(self, status: int, *, grace_s: float) -> None:
        os.set_inheritable(status, False)
        self._status = status
        self._grace_s = grace_s
        self._kill_at = float("inf")
        self._is_asked_to_end = False
        # Self-pipe: no signal is missed between a check and a wait.
        self._wakeup, signals = os.pipe()
        for end in (self._wakeup, signals):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(signals, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, lambda _number, _frame: None)
        _call_prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def start(self, command: list[str]) -> None:
        """Start the role in a new session, out of reach of Ctrl-C and a closing terminal."""
        keeper = os.getpid()
        # Until exec, the child has the keeper's signal handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        self._role = os.fork()
        if self._role == 0:
            try:
                _become(command, keeper=keeper)
            finally:
                os._exit(_CANNOT_START)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        self._report(f"started {self._role}")

    def watch(self) -> int:
        """Block until the role and its descendants have ended; return its code, or minus the signal."""
        requests = sys.stdin.fileno()
        inputs = [requests, self._wakeup]
        while (code := self._reap()) is None:
            left_s = self._kill_at - time.monotonic()
            if left_s <= 0:
                self._kill_at = float("inf")
                _say(f"the role did not end within {self._grace_s:g} s and is killed")
                self._kill()
                continue
            # No deadline: a live starter decides when the role ends.
            ready, _, _ = select.select(inputs, [], [], None if left_s == float("inf") else left_s)
            if self._wakeup in ready and {signal.SIGTERM, signal.SIGINT} & set(os.read(self._wakeup, 512)):
                self._end(because="it was asked to end")
            if requests in ready:
                asked = os.read(requests, 16)
                if not asked:
                    self._end(because="its starter is gone")
                    inputs = [self._wakeup]
                elif b"k" in asked:
                    self._kill()
                else:
                    self._ask_to_end()
        self._kill()
        self._report(f"ended {code}")
        return code

    def _end(self, *, because: str) -> None:
        if self._kill_at == float("inf"):
            _say(f"{because}; the role gets SIGTERM, and SIGKILL after {self._grace_s:g} s")
            self._kill_at = time.monotonic() + self._grace_s
        self._ask_to_end()

    def _ask_to_end(self) -> None:
        # Once, because a role exits immediately on a second signal.
        if not self._is_asked_to_end:
            self._is_asked_to_end = True
            os.kill(self._role, signal.SIGTERM)

    def _reap(self) -> int | None:
        code = None
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._role:
                    code = os.waitstatus_to_exitcode(ended[1])
        return code

    def _kill(self) -> None:
        ends_at = time.monotonic() + _KILL_TIMEOUT_S
        # A fork bomb cannot outrun one call for the whole group.
        with suppress(OSError):
            os.killpg(self._role, signal.SIGKILL)
        killed: dict[int, str] = {}
        while (left := _descendants(os.getpid())) and time.monotonic() < ends_at:
            for pid in left:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            killed |= left
            time.sleep(0.002)
        killed.pop(self._role, None)
        if killed:
            _say(f"killed what the role left: {_list(killed)}")
        if left:
            _say(f"SIGKILL did not end {_list(left)}: they hang in the kernel")

    def _report(self, line: str) -> None:
        # The reader may be gone.
        with suppress(OSError):
            os.write(self._status, f"{line}\n".encode())


def _become(command: list[str], *, keeper: int) -> None:
    os.setsid()
    # The kernel signals the role if the keeper dies, even by SIGKILL.
    _call_prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != keeper:
        return
    # Python ignores SIGPIPE and SIGXFSZ; the role must not inherit this.
    for number in (signal.SIGPIPE, signal.SIGXFSZ, *_SIGNALS):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    try:
        os.execvp(command[0], command)
    except OSError as error:
        _say(f"cannot run {command[0]}: {error.strerror}")


def _descendants(root: int) -> dict[int, str]:
    """Pid -> name of live processes below `root`; empty on systems other than Linux."""
    children: dict[int, list[tuple[int, str, bytes]]] = {}
    for entry in os.scandir("/proc") if sys.platform == "linux" else ():
        if entry.name.isdigit():
            # Importing pathlib would take longer than this scan.
            with suppress(OSError), open(f"/proc/{entry.name}/stat", "rb") as file:  # noqa: PTH123
                # PID (NAME) STATE PPID ...; the name may contain any character.
                head, _, tail = file.read().rpartition(b")")
                state, parent, *_ = tail.split(maxsplit=2)
                name = head.partition(b"(")[2].decode(errors="replace")
                children.setdefault(int(parent), []).append((int(entry.name), name, state))
    found: dict[int, str] = {}
    parents = [root]
    while parents:
        below = children.get(parents.pop(), [])
        parents += [pid for pid, _, _ in below]
        found |= {pid: name for pid, name, state in below if state not in (b"Z", b"X")}
    return found


def _call_prctl(option: int, value: int) -> None:
    # The standard library has no prctl. The settings survive exec, but not fork.
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value)


def _list(processes: dict[int, str]) -> str:
    return ", ".join(f"{name} ({pid})" for pid, name in processes.items())


def _say(sentence: str) -> None:
    # A full disk or a closed pipe must not end the keeper.
    with suppress(OSError):
        os.write(2, f"{LOG_PREFIX}{sentence}\n".encode())


def main(status: int, grace_s: float, attachment: str, command: list[str]) -> None:
    """Keep the role `command`; exit with its code, or 128 + its signal."""
    # Ray kills the children of an ending worker before they can clean up.
    if attachment == "detached" and os.fork():
        os._exit(0)
    keeper = Keeper(status, grace_s=grace_s)
    keeper.start(command)
    code = keeper.watch()
    os._exit(code if code >= 0 else _SIGNAL_EXIT - code)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4:])
