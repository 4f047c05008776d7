"""RoleProcess: a role as its launcher sees it: started, watched, restarted, stopped."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from slipstream.cluster.keeper import LOG_PREFIX
from slipstream.cluster.seat import LocalSeat, Seat
from slipstream.runtime.command_line import BAD_INPUT, TRY_ONCE

_MAX_RESTARTS = 5
"""Restarts in a row before a role is abandoned."""
_HEALTHY_AFTER_S = 300.0
"""Run time after which a death starts a new row of restarts."""
_RESTART_AFTER_S = 1.0
"""First back-off; each further restart in a row doubles it."""
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


class RoleProcess:
    """A role in its seat.

    Life: start -> (death -> restart after a back-off)* -> terminate -> stop.
    """

    def __init__(
        self,
        name: str,
        arguments: list[str],
        *,
        logs: Path,
        seat: Callable[[Path], Seat] = LocalSeat,
        restart: Restart = "on_death",
        restart_arguments: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        max_log_bytes: int = _MAX_LOG_BYTES,
    ) -> None:
        """`arguments` follow `python -m`; `seat` makes the place where it runs, given its log; `variables` extend its
        environment, `restart_arguments` its arguments from the first restart on."""
        self.name = name
        self._variables = dict(variables or {})
        self._arguments = list(arguments)
        self._log = logs / f"{name}.log"
        self._seat = seat(self._log)
        self._restart = restart
        self._restart_arguments = restart_arguments
        self._max_log_bytes = max_log_bytes
        self._log_starts_at = 0
        self.num_restarts = 0
        """Restarts by `poll` so far."""
        self._num_deaths_in_a_row = 0
        self._start_error = ""
        self._has_worked = False
        self._started_at = 0.0
        self._restart_at: float | None = None
        self._is_asked_to_end = False
        self._announced = ""

    @property
    def has_finished(self) -> bool:
        return self._seat.poll() == 0

    @property
    def is_running(self) -> bool:
        return self._seat.pid is not None and self._seat.poll() is None

    @property
    def pid(self) -> int | None:
        return self._seat.pid

    @property
    def place(self) -> str:
        """Its process and machine, or that it waits for one, in words."""
        return self._seat.place

    def start(self) -> None:
        """Start the process, its output appended to its log."""
        self._started_at = time.monotonic()
        self._is_asked_to_end = self._has_worked = False
        # Somebody may have made room.
        self._log.parent.mkdir(exist_ok=True)
        self._log.touch()
        self._log_starts_at = self._log.stat().st_size
        self._seat.start(self._arguments, variables=self._variables)
        self._announced = self._seat.place

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
        code = self._seat.poll()
        if code is None or (code == 0 and (self._restart != "always" or self._is_asked_to_end)):
            # The place changes once a machine is found.
            before, self._announced = self._announced, self.place
            return [f"{self.name}: {self.place}"] * (self._announced != before)
        if time.monotonic() - self._started_at > _HEALTHY_AFTER_S:
            self._num_deaths_in_a_row = 0
        if not self._may_restart(code):
            raise RoleDiedError(self._describe_death(code))
        lines = [line for line in self.log_tail().splitlines() if not line.startswith(LOG_PREFIX)]
        # A library that aborts while Python ends prints a line below the error.
        words = self._find_error() or f"last line of its log: {lines[-1].strip() if lines else ''}"
        return self._restart_later(f"died ({_describe_exit(code)}); {words}")

    def terminate(self) -> None:
        """Ask the process to end, once: a second signal would interrupt its orderly end."""
        if not self._is_asked_to_end:
            self._is_asked_to_end = True
            self._seat.terminate()

    def stop(self, *, ends_at: float) -> None:
        """Wait for the end until `ends_at` (monotonic), then kill the process and all that it started."""
        self._seat.stop(ends_at=ends_at)

    def log_tail(self, *, num_lines: int = _LOG_TAIL_LINES) -> str:
        return "\n".join(self._read_log()[-num_lines:])

    def _describe_death(self, code: int) -> str:
        """Quote the error that the process printed before it ended, else the end of its log."""
        if code > 0 and (error := self._find_error()):
            return f"{self.name}: {error} (the log is {self._log})"
        return f"{self.name} ended with {_describe_exit(code)}. The end of {self._log}:\n{self.log_tail()}"

    def _find_error(self) -> str:
        return find_error(self._read_log(since=self._log_starts_at))

    def _read_log(self, *, since: int = 0) -> list[str]:
        # Somebody may have removed it.
        with contextlib.suppress(OSError):
            return self._log.read_bytes()[since:].decode(errors="replace").splitlines()
        return []

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
        # Other codes say themselves what a restart is worth, and a signal comes from outside.
        is_of_the_start = code == TRY_ONCE or (code == _UNCAUGHT and not self._has_worked)
        error = re.sub(r"\d+", "0", self._find_error()) if is_of_the_start else ""
        before, self._start_error = self._start_error, error
        if error and error == before:
            return False
        return code != BAD_INPUT and self._num_deaths_in_a_row < _MAX_RESTARTS

    def _restart_if_due(self) -> list[str]:
        if self._restart_at is None or time.monotonic() < self._restart_at:
            return []
        self._restart_at = None
        self.num_restarts += 1
        self._num_deaths_in_a_row += 1
        if self.num_restarts == 1:
            # Once: the arguments stay, and a learner takes resume=true only once.
            self._arguments += self._restart_arguments
        try:
            self.start()
        except OSError as error:
            # The machine, or this process, has no descriptor, process or memory left.
            if self._num_deaths_in_a_row >= _MAX_RESTARTS:
                raise RoleDiedError(f"{self.name} cannot be started: {error}") from None
            return self._restart_later(f"cannot be started ({error})")
        return [f"{self.name} restarted ({self.place})"]

    def _restart_later(self, why: str) -> list[str]:
        delay_s = _RESTART_AFTER_S * 2**self._num_deaths_in_a_row
        self._restart_at = time.monotonic() + delay_s
        return [f"{self.name} {why}; restarting in {delay_s:g} s"]


def find_error(lines: Sequence[str]) -> str:
    """Return the error that a process printed as it ended: its own sentence, else that of its last traceback, else
    empty."""
    if errors := [line.removeprefix(_ERROR_PREFIX) for line in lines if line.startswith(_ERROR_PREFIX)]:
        return errors[-1]
    last = next((at for at in reversed(range(len(lines))) if _TRACEBACK in lines[at]), None)
    if last is None:
        return ""
    # Torch begins each line with the rank.
    prefix = lines[last].partition(_TRACEBACK)[0]
    below = (line.removeprefix(prefix) for line in lines[last + 1 :])
    return next((line for line in below if line and not line.startswith(" ")), "")


def _describe_exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
