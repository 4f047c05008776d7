"""Processes: what a role does with signals and with its launcher, and how a launcher holds a role."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from slipstream.runtime.command_line import BAD_INPUT, TRY_AGAIN

LAUNCHER_VARIABLE = "SLIPSTREAM_LAUNCHER_PID"
"""Set by a launcher for its roles: they end when it does, however it ends."""

_PR_SET_PDEATHSIG = 1
_MAX_RESTARTS = 5
"""In a row."""
_WELL_AFTER_S = 300.0
"""A process that ran so long before it died counts as well until then."""
_RESTART_AFTER_S = 1.0
_SAME_SIGNAL_S = 1.0
"""Shells and `timeout` send the same one to a process and to its group."""
_LOG_TAIL_LINES = 15
_SENTENCE = "error: "
"""How slipstream/runtime/command_line.py begins what a program says when it ends for a fault that the user can mend."""


Restart = Literal["killed", "always", "kept"]
"""Which ends a role is restarted after: death by a signal or when it says so (exit code 75) | any death but a refusal
of its settings (exit code 2) | also a good end that it was not told to come to."""


class RoleDiedError(RuntimeError):
    """A role ended that should not have; the message names it and ends with its log."""


def has_launcher() -> bool:
    """Whether a launcher started this role (and so owns what the roles share)."""
    return LAUNCHER_VARIABLE in os.environ


def die_with_launcher() -> None:
    """Have the kernel end this process when the launcher dies. Does nothing for a role started by hand."""
    if not has_launcher():
        return
    die_with_parent(signal.SIGTERM)
    # The launcher may have died before the line above; in a container it may be process 1 itself.
    if os.getppid() == 1 and os.environ[LAUNCHER_VARIABLE] != "1":
        os.kill(os.getpid(), signal.SIGTERM)


def die_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process that signal when its parent dies. Does nothing but on Linux."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def on_stop_signal(stop: Callable[[], None]) -> threading.Event:
    """Call `stop` at the first SIGTERM or SIGINT; returns the event that is set then.

    One that comes more than a second later ends the process at once.
    """
    stopping = threading.Event()
    first_at = 0.0

    def handle(number: int, _frame: object) -> None:
        nonlocal first_at
        if not stopping.is_set():
            first_at = time.monotonic()
            stopping.set()
            stop()
        elif time.monotonic() - first_at > _SAME_SIGNAL_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    return stopping


def raise_on_stop_signal() -> None:
    """Turn SIGTERM into KeyboardInterrupt, for a process whose loop is plain synchronous code.

    SIGINT too: Python leaves it ignored in what a script has started in the background.
    """

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)


class RoleProcess:
    """A role as a child process in a process group of its own, so that Ctrl-C reaches it through the launcher alone.

    Life: start -> (death -> restart after a back-off)* -> terminate -> stop.
    """

    def __init__(
        self,
        name: str,
        arguments: list[str],
        *,
        logs: Path,
        restart: Restart = "always",
        restart_arguments: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`variables` are added to the environment it inherits, `restart_arguments` to its arguments from then on."""
        self.name = name
        self._variables = dict(variables or {})
        self._command = [sys.executable, "-m", *arguments]
        self._log = logs / f"{name}.log"
        self._restart = restart
        self._restart_arguments = restart_arguments
        self._process: subprocess.Popen[bytes] | None = None
        self._log_starts_at = 0
        self.num_restarts = 0
        """By `poll`, since the first start."""
        self._num_deaths_in_a_row = 0
        self._started_at = 0.0
        self._restart_at: float | None = None
        self._is_told_to_end = False

    @property
    def has_finished(self) -> bool:
        """Whether it ended by itself, well."""
        return self._process is not None and self._process.poll() == 0

    @property
    def is_running(self) -> bool:
        """Whether its process is there."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Of the running process."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start it; its output is appended to its log."""
        self._started_at = time.monotonic()
        self._is_told_to_end = False
        with self._log.open("ab") as log:
            self._log_starts_at = log.tell()
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | self._variables,
            )

    def poll(self) -> list[str]:
        """Look after it: notice a death, restart when the back-off is over. Returns sentences for the user.

        Raises RoleDiedError when it cannot go on without it.
        """
        if self._restart_at is not None:
            return self._restart_if_due()
        code = self._process.poll() if self._process else None
        if code is None or (code == 0 and (self._restart != "kept" or self._is_told_to_end)):
            return []
        self._kill_group()
        if time.monotonic() - self._started_at > _WELL_AFTER_S:
            self._num_deaths_in_a_row = 0
        if not self._may_restart(code):
            raise RoleDiedError(self._last_words(code))
        delay_s = _RESTART_AFTER_S * 2**self._num_deaths_in_a_row
        self._restart_at = time.monotonic() + delay_s
        last = self.log_tail(num_lines=1).strip()
        return [f"{self.name} died ({_exit_word(code)}); last line of its log: {last}; restarting in {delay_s:g} s"]

    def terminate(self) -> None:
        """Ask it to end; once, because asked again it would drop what it is still putting in order."""
        if self._process and self._process.poll() is None and not self._is_told_to_end:
            self._is_told_to_end = True
            self._process.terminate()

    def stop(self, *, ends_at: float) -> None:
        """Wait for its end until `ends_at` (monotonic), then kill it, and whatever it left, without asking."""
        if self._process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=max(0.1, ends_at - time.monotonic()))
        self._kill_group()
        # One that the kernel cannot end now (a device, a file system that is gone) is left to it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5.0)

    def log_tail(self, *, num_lines: int = _LOG_TAIL_LINES) -> str:
        """The end of its log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-num_lines:])

    def _last_words(self, code: int) -> str:
        """Its own sentence where it has found one, else the end of its log."""
        said = [line for line in self._lines_since_start() if line.startswith(_SENTENCE)]
        if said and code > 0:
            return f"{self.name}: {said[-1].removeprefix(_SENTENCE)} (the log is {self._log})"
        return f"{self.name} ended with {_exit_word(code)}. The end of {self._log}:\n{self.log_tail()}"

    def _lines_since_start(self) -> list[str]:
        return self._log.read_bytes()[self._log_starts_at :].decode(errors="replace").splitlines()

    def _may_restart(self, code: int) -> bool:
        is_worth_it = code < 0 or code == TRY_AGAIN if self._restart == "killed" else code != BAD_INPUT
        return is_worth_it and self._num_deaths_in_a_row < _MAX_RESTARTS

    def _restart_if_due(self) -> list[str]:
        if self._restart_at is None or time.monotonic() < self._restart_at:
            return []
        self._restart_at = None
        self.num_restarts += 1
        self._num_deaths_in_a_row += 1
        if self.num_restarts == 1:
            self._command += self._restart_arguments
        self.start()
        return [f"{self.name} restarted (pid {self.pid})"]

    def _kill_group(self) -> None:
        """End the children a dead role may have left: its group has no other members."""
        assert self._process is not None
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return


def _exit_word(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
