"""RoleProcess: starts, watches, restarts, and stops one role."""

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
"""Consecutive restarts before a role is abandoned."""
_HEALTHY_AFTER_S = 300.0
"""Uptime that resets the count of consecutive restarts."""
_RESTART_AFTER_S = 1.0
"""First backoff; doubles with each consecutive restart."""
_LOG_TAIL_LINES = 15
_ERROR_PREFIX = "error: "
_TRACEBACK = "Traceback (most recent call last)"
_UNCAUGHT = 1
_MAX_LOG_BYTES = 128 * 2**20
"""Size at which a log is trimmed to its newest quarter."""

Restart = Literal["on_death", "always"]
"""After any exit but success, exit code 2 (bad input), and a repeated start error | also after success, unless asked to
end."""


class RoleDiedError(RuntimeError):
    """Quotes the role's error or the end of its log."""


class RoleProcess:
    """A role in its seat. Life: start -> (death -> backoff -> restart)* -> terminate -> stop."""

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
        """`arguments` follow `python -m`, with `restart_arguments` after a restart; `seat` makes a seat from the log;
        `variables`: added environment."""
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
        self._num_deaths_in_a_row = 0
        self._start_error = ""
        self._has_worked = False
        self._started_at = 0.0
        self._restart_at: float | None = None
        self._is_asked_to_end = False
        self._announced = ""

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self._seat.poll()

    @property
    def has_finished(self) -> bool:
        return self.exit_code == 0

    @property
    def is_running(self) -> bool:
        return self._seat.pid is not None and self._seat.poll() is None

    @property
    def pid(self) -> int | None:
        return self._seat.pid

    @property
    def place(self) -> str:
        return self._seat.place

    def start(self) -> None:
        self._started_at = time.monotonic()
        self._is_asked_to_end = self._has_worked = False
        # A user may have deleted the folder.
        self._log.parent.mkdir(exist_ok=True)
        self._log.touch()
        self._log_starts_at = self._log.stat().st_size
        self._seat.start(self._arguments, variables=self._variables)
        self._announced = self._seat.place

    def record_work(self) -> None:
        """Later errors are not start errors."""
        self._has_worked = True

    def poll(self) -> list[str]:
        """Restart a dead role after the backoff, trim the log; return user messages.

        Raises RoleDiedError if it must not be restarted.
        """
        self._trim_log()
        if self._restart_at is not None:
            return self._restart_now() if time.monotonic() >= self._restart_at else []
        code = self._seat.poll()
        if code is None or (code == 0 and (self._restart != "always" or self._is_asked_to_end)):
            before, self._announced = self._announced, self.place
            return [f"{self.name}: {self.place}"] * (self._announced != before)
        if time.monotonic() - self._started_at > _HEALTHY_AFTER_S:
            self._num_deaths_in_a_row = 0
        # Only these two are start errors: other exit codes define their own restarts, and signals come from outside.
        # Mask numbers, such as a pid, to compare errors.
        is_of_the_start = code == TRY_ONCE or (code == _UNCAUGHT and not self._has_worked)
        error = re.sub(r"\d+", "0", self._find_error()) if is_of_the_start else ""
        recurs, self._start_error = error != "" and error == self._start_error, error
        if recurs or code == BAD_INPUT or self._num_deaths_in_a_row >= _MAX_RESTARTS:
            if code > 0 and (error := self._find_error()):
                raise RoleDiedError(f"{self.name}: {error} (the log is {self._log})")
            tail = f"The end of {self._log}:\n{self.log_tail()}"
            raise RoleDiedError(f"{self.name} ended with {describe_exit(code)}. {tail}")
        lines = [line for line in self.log_tail().splitlines() if not line.startswith(LOG_PREFIX)]
        # Search for the error: a library may print the last line when it aborts at exit.
        words = self._find_error() or f"last line of its log: {lines[-1].strip() if lines else ''}"
        return self._restart_later(f"died ({describe_exit(code)}); {words}")

    def terminate(self) -> None:
        """Ask the process to end, once: a second signal would interrupt its cleanup."""
        if not self._is_asked_to_end:
            self._is_asked_to_end = True
            self._seat.terminate()

    def stop(self, *, ends_at: float) -> None:
        self._seat.stop(ends_at=ends_at)

    def log_tail(self, *, num_lines: int = _LOG_TAIL_LINES) -> str:
        return "\n".join(self._read_log()[-num_lines:])

    def _find_error(self) -> str:
        return find_error(self._read_log(since=self._log_starts_at))

    def _read_log(self, *, since: int = 0) -> list[str]:
        # A user may have deleted it.
        with contextlib.suppress(OSError):
            return self._log.read_bytes()[since:].decode(errors="replace").splitlines()
        return []

    def _trim_log(self) -> None:
        # A full disk or a deleted log must not end the run.
        with contextlib.suppress(OSError):
            if (size := self._log.stat().st_size) <= self._max_log_bytes:
                return
            num_dropped = size - self._max_log_bytes // 4
            # All writers append, so truncation is safe.
            with self._log.open("rb") as log:
                log.seek(num_dropped)
                newest = log.read()
            os.truncate(self._log, 0)
            self._log_starts_at = max(0, self._log_starts_at - num_dropped)
            with self._log.open("ab") as log:
                log.write(newest)

    def _restart_now(self) -> list[str]:
        self._restart_at = None
        self.num_restarts += 1
        self._num_deaths_in_a_row += 1
        if self.num_restarts == 1:
            # Once, because a duplicate resume=true is an error.
            self._arguments += self._restart_arguments
        try:
            self.start()
        except OSError as error:
            # Out of descriptors, process slots, or memory.
            if self._num_deaths_in_a_row >= _MAX_RESTARTS:
                raise RoleDiedError(f"{self.name} cannot be started: {error}") from None
            return self._restart_later(f"cannot be started ({error})")
        return [f"{self.name} restarted ({self.place})"]

    def _restart_later(self, why: str) -> list[str]:
        delay_s = _RESTART_AFTER_S * 2**self._num_deaths_in_a_row
        self._restart_at = time.monotonic() + delay_s
        return [f"{self.name} {why}; restarting in {delay_s:g} s"]


def find_error(lines: Sequence[str]) -> str:
    """Last printed error, or the last traceback's; empty without one."""
    if errors := [line.removeprefix(_ERROR_PREFIX) for line in lines if line.startswith(_ERROR_PREFIX)]:
        return errors[-1]
    last = next((at for at in reversed(range(len(lines))) if _TRACEBACK in lines[at]), None)
    if last is None:
        return ""
    # torchrun prefixes each line with the rank.
    prefix = lines[last].partition(_TRACEBACK)[0]
    below = (line.removeprefix(prefix) for line in lines[last + 1 :])
    return next((line for line in below if line and not line.startswith(" ")), "")


def describe_exit(code: int) -> str:
    """Example: describe_exit(-9) -> "signal SIGKILL"."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
