"""Processes: signals and death of the launcher on the side of a role, RoleProcess on the side of the launcher."""

import atexit
import contextlib
import ctypes
import gc
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from slipstream.runtime.command_line import BAD_INPUT, TRY_ONCE

LAUNCHER_VARIABLE = "SLIPSTREAM_LAUNCHER_PID"
"""Set by a launcher for its roles, which end when it does, however it ends."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MAX_RESTARTS = 5
"""Restarts in a row before a role is abandoned."""
_HEALTHY_AFTER_S = 300.0
"""Run time after which a death starts a new row of restarts."""
_RESTART_AFTER_S = 1.0
"""First back-off; each further restart in a row doubles it."""
_SAME_SIGNAL_S = 1.0
"""Signals within this time are one: shells and `timeout` send theirs to a process and to its group."""
_LOG_TAIL_LINES = 15
_ERROR_PREFIX = "error: "
"""Beginning of the line that `exit_with_error` prints."""
_TRACEBACK = "Traceback (most recent call last)"
_UNCAUGHT = 1
"""Exit code of Python after an exception that nobody caught."""
_MAX_LOG_BYTES = 128 * 2**20
"""Size at which a log is cut to its newest quarter."""

Restart = Literal["on_death", "always"]
"""Ends after which a role is restarted: any but success, exit code 2 (the role's own verdict, such as bad settings or a
dead end) and an error of the start that comes back the same | also success, unless it was asked to end."""


class RoleDiedError(RuntimeError):
    """A role ended that must not; the message names it and ends with its error or the end of its log."""


def has_launcher() -> bool:
    """Return whether a launcher started this role, and so owns the store that the roles share."""
    return LAUNCHER_VARIABLE in os.environ


def die_with_launcher() -> None:
    """Have the kernel end this process when the launcher dies. No effect for a role started by hand."""
    if not has_launcher():
        return
    die_with_parent(signal.SIGTERM)
    # The launcher may have died before the call above; in a container it may be process 1 itself.
    if os.getppid() == 1 and os.environ[LAUNCHER_VARIABLE] != "1":
        os.kill(os.getpid(), signal.SIGTERM)


def die_with_parent(number: signal.Signals, *, parent: int | None = None) -> None:
    """Have the kernel send this process a signal when its parent dies. No effect on systems other than Linux.

    `parent` is the process that must be alive; without it, whichever is the parent at the time of the call.
    """
    if sys.platform != "linux":
        return
    parent = parent or os.getppid()
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


class RoleProcess:
    """A role as a child process, in its own process group, so that Ctrl-C reaches it only through the launcher.

    Life: start -> (death -> restart after a back-off)* -> terminate -> stop.
    """

    def __init__(
        self,
        name: str,
        arguments: list[str],
        *,
        logs: Path,
        restart: Restart = "on_death",
        restart_arguments: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        max_log_bytes: int = _MAX_LOG_BYTES,
    ) -> None:
        """`variables` extend its environment; `restart_arguments` extend its arguments from the first restart on."""
        self.name = name
        self._variables = dict(variables or {})
        self._command = [sys.executable, "-m", *arguments]
        self._log = logs / f"{name}.log"
        self._restart = restart
        self._restart_arguments = restart_arguments
        self._max_log_bytes = max_log_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._log_starts_at = 0
        self.num_restarts = 0
        """Restarts by `poll` so far."""
        self._num_deaths_in_a_row = 0
        self._start_error = ""
        self._has_worked = False
        self._started_at = 0.0
        self._restart_at: float | None = None
        self._is_asked_to_end = False

    @property
    def has_finished(self) -> bool:
        """Whether it ended with success."""
        return self._process is not None and self._process.poll() == 0

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the process, its output appended to its log."""
        self._started_at = time.monotonic()
        self._is_asked_to_end = self._has_worked = False
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

    def record_work(self) -> None:
        """Record that the process has done work since its start: an error from now on is none of the start."""
        self._has_worked = True

    def poll(self) -> list[str]:
        """Detect a death, restart after the back-off, keep the log within its budget; return messages for the user.

        Raises RoleDiedError after a death that calls for no restart.
        """
        self._trim_log()
        if self._restart_at is not None:
            return self._restart_if_due()
        code = self._process.poll() if self._process else None
        if code is None or (code == 0 and (self._restart != "always" or self._is_asked_to_end)):
            return []
        # Before a restart, because children such as vLLM's engine hold the GPU and the ports.
        self._kill_group()
        if time.monotonic() - self._started_at > _HEALTHY_AFTER_S:
            self._num_deaths_in_a_row = 0
        if not self._may_restart(code):
            raise RoleDiedError(self._describe_death(code))
        delay_s = _RESTART_AFTER_S * 2**self._num_deaths_in_a_row
        self._restart_at = time.monotonic() + delay_s
        last = self.log_tail(num_lines=1).strip()
        return [f"{self.name} died ({_describe_exit(code)}); last line of its log: {last}; restarting in {delay_s:g} s"]

    def terminate(self) -> None:
        """Ask the process to end, once: a second signal would interrupt its orderly end."""
        if self._process and self._process.poll() is None and not self._is_asked_to_end:
            self._is_asked_to_end = True
            self._process.terminate()

    def stop(self, *, ends_at: float) -> None:
        """Wait for the end until `ends_at` (monotonic), then kill the process and the children it left."""
        if self._process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=max(0.1, ends_at - time.monotonic()))
        self._kill_group()
        # A process that hangs in the kernel (a device, a lost file system) cannot be waited for.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5.0)

    def log_tail(self, *, num_lines: int = _LOG_TAIL_LINES) -> str:
        """Return the last lines of its log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-num_lines:])

    def _describe_death(self, code: int) -> str:
        """Quote the error that the process printed before it ended, else the end of its log."""
        if code > 0 and (error := self._error()):
            return f"{self.name}: {error} (the log is {self._log})"
        return f"{self.name} ended with {_describe_exit(code)}. The end of {self._log}:\n{self.log_tail()}"

    def _error(self) -> str:
        """Error that the process printed as it ended: its own sentence, else that of its last traceback, else empty."""
        lines = self._lines_since_start()
        errors = [line.removeprefix(_ERROR_PREFIX) for line in lines if line.startswith(_ERROR_PREFIX)]
        return errors[-1] if errors else _uncaught_error(lines)

    def _lines_since_start(self) -> list[str]:
        return self._log.read_bytes()[self._log_starts_at :].decode(errors="replace").splitlines()

    def _trim_log(self) -> None:
        # A full disk, or a log that somebody removed, must not end the run.
        with contextlib.suppress(OSError):
            size = self._log.stat().st_size
            if size <= self._max_log_bytes:
                return
            # The role goes on writing to the same file, and so do we: both append, wherever its end is.
            with self._log.open("rb") as log:
                log.seek(size - self._max_log_bytes // 4)
                newest = log.read()
            os.truncate(self._log, 0)
            self._log_starts_at = max(0, self._log_starts_at - (size - self._max_log_bytes // 4))
            with self._log.open("ab") as log:
                log.write(newest)

    def _may_restart(self, code: int) -> bool:
        # Numbers aside: a process id or an amount of memory does not make it another error.
        error = re.sub(r"\d+", "0", self._error()) if self._is_of_the_start(code) else ""
        before, self._start_error = self._start_error, error
        if error and error == before:
            return False
        return code != BAD_INPUT and self._num_deaths_in_a_row < _MAX_RESTARTS

    def _is_of_the_start(self, code: int) -> bool:
        # Other codes tell what a restart is worth themselves, and a signal comes from outside.
        return code == TRY_ONCE or (code == _UNCAUGHT and not self._has_worked)

    def _restart_if_due(self) -> list[str]:
        if self._restart_at is None or time.monotonic() < self._restart_at:
            return []
        self._restart_at = None
        self.num_restarts += 1
        self._num_deaths_in_a_row += 1
        if self.num_restarts == 1:
            # Once: the arguments stay, and a learner takes resume=true only once.
            self._command += self._restart_arguments
        self.start()
        return [f"{self.name} restarted (pid {self.pid})"]

    def _kill_group(self) -> None:
        """Kill the children that a dead role may have left, the only other members of its group."""
        assert self._process is not None
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return


def _uncaught_error(lines: Sequence[str]) -> str:
    """Return the exception below the last traceback, `RuntimeError: boom`; empty without a traceback."""
    last = next((at for at in reversed(range(len(lines))) if _TRACEBACK in lines[at]), None)
    if last is None:
        return ""
    # Torch begins each line with the rank.
    prefix = lines[last].partition(_TRACEBACK)[0]
    below = (line.removeprefix(prefix) for line in lines[last + 1 :])
    return next((line for line in below if line and not line.startswith(" ")), "")


def _describe_exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
