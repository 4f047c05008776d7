"""Program between a role and whoever starts it: when one of the two ends, nothing that the role started is left.

Consumes: requests on stdin, `t` (SIGTERM for the role) or `k` (SIGKILL for all); its end is that of the starter.
Produces: on the descriptor STATUS the lines `started PID` and, once no descendant of the role is left, `ended CODE`;
whatever it does unasked, as a line in the role's log.
Invariant: every descendant of the role is a descendant of the keeper, also one in a session of its own.

It imports the standard library alone, and is run by its path: it starts in milliseconds, and stays small.

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
"""Beginning of each line of a keeper in the log of its role."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_TIMEOUT_S = 5.0
"""Longest wait for processes to die of SIGKILL: one that hangs in the kernel may not."""
_CANNOT_START = 127
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
_SIGNAL_EXIT = 128
"""Exit code after the role's death by a signal, less the signal's number, as shells report it."""


class Keeper:
    """Keeps one role. Life: start -> watch -> exit code."""

    def __init__(self, status: int, *, grace_s: float) -> None:
        os.set_inheritable(status, False)
        self._status = status
        self._grace_s = grace_s
        self._kill_at = float("inf")
        self._is_asked_to_end = False
        # Signals arrive here as bytes, so that none is missed between a look and a wait.
        self._wakeup, signals = os.pipe()
        for end in (self._wakeup, signals):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(signals, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, lambda _number, _frame: None)
        _call_prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def start(self, command: list[str]) -> None:
        """Start the role in a session of its own, in which Ctrl-C and the end of a terminal do not reach it."""
        keeper = os.getpid()
        # Until the role is another program, it would take a signal for the keeper's.
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
        """Block until the role has ended and nothing of it is left; return its exit code, or minus its signal."""
        requests = sys.stdin.fileno()
        inputs = [requests, self._wakeup]
        while (code := self._reap()) is None:
            left_s = self._kill_at - time.monotonic()
            if left_s <= 0:
                self._kill_at = float("inf")
                _say(f"the role did not end within {self._grace_s:g} s, and is killed")
                self._kill()
                continue
            # No deadline while the starter lives, which decides when a role has to end.
            ready, _, _ = select.select(inputs, [], [], None if left_s == float("inf") else left_s)
            if self._wakeup in ready and {signal.SIGTERM, signal.SIGINT} & set(os.read(self._wakeup, 512)):
                self._end(because="it was asked to end")
            if requests in ready and not self._obey(os.read(requests, 16)):
                inputs = [self._wakeup]
        self._kill()
        self._report(f"ended {code}")
        return code

    def _obey(self, requests: bytes) -> bool:
        """Carry out requests; return False at their end."""
        if not requests:
            self._end(because="its starter is gone")
        elif b"k" in requests:
            self._kill()
        else:
            self._ask_to_end()
        return bool(requests)

    def _end(self, *, because: str) -> None:
        if self._kill_at == float("inf"):
            _say(f"{because}; the role gets SIGTERM, and SIGKILL after {self._grace_s:g} s")
            self._kill_at = time.monotonic() + self._grace_s
        self._ask_to_end()

    def _ask_to_end(self) -> None:
        # Once: a role takes a second signal for a user who insists.
        if not self._is_asked_to_end:
            self._is_asked_to_end = True
            os.kill(self._role, signal.SIGTERM)

    def _reap(self) -> int | None:
        """Reap every child that has ended; return the role's exit code once it is among them."""
        code = None
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._role:
                    code = os.waitstatus_to_exitcode(ended[1])
        return code

    def _kill(self) -> None:
        """Kill all descendants, until none is left; reap all but the role."""
        ends_at = time.monotonic() + _KILL_TIMEOUT_S
        # One call for the whole group, which a process that forks without end cannot outrun.
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
        # Whoever would read it may be gone.
        with suppress(OSError):
            os.write(self._status, f"{line}\n".encode())


def _become(command: list[str], *, keeper: int) -> None:
    """Replace this process, a child of the keeper, by the role."""
    os.setsid()
    # The second line of defence: the role hears of the keeper's own death, by SIGKILL too.
    _call_prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != keeper:
        return
    # Python ignores the first two, and the role would inherit that.
    for number in (signal.SIGPIPE, signal.SIGXFSZ, *_SIGNALS):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    try:
        os.execvp(command[0], command)
    except OSError as error:
        _say(f"cannot run {command[0]}: {error.strerror}")


def _descendants(root: int) -> dict[int, str]:
    """Processes below `root` that have not ended, with their names; empty on systems other than Linux."""
    children: dict[int, list[tuple[int, str, bytes]]] = {}
    for entry in os.scandir("/proc") if sys.platform == "linux" else ():
        if entry.name.isdigit():
            # pathlib takes longer to load than all of this.
            with suppress(OSError), open(f"/proc/{entry.name}/stat", "rb") as file:  # noqa: PTH123
                # PID (NAME) STATE PPID ...; the name may hold anything.
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
    # A full disk, or a log whose reader is gone, must not end the keeper.
    with suppress(OSError):
        os.write(2, f"{LOG_PREFIX}{sentence}\n".encode())


def main(status: int, grace_s: float, attachment: str, command: list[str]) -> None:
    """Keep the role `command`; exits with its code, or 128 + the number of the signal that ended it."""
    # Ray kills the children of a worker that ends, before they can put anything in order: a keeper must be none.
    if attachment == "detached" and os.fork():
        os._exit(0)
    keeper = Keeper(status, grace_s=grace_s)
    keeper.start(command)
    code = keeper.watch()
    os._exit(code if code >= 0 else _SIGNAL_EXIT - code)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4:])
