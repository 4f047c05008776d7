"""Seat: place where a role runs; LocalSeat: on this machine; SpreadSeat: over several machines."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from math import inf
from pathlib import Path
from typing import Protocol

from slipstream.cluster import keeper
from slipstream.runtime.clock import Clock
from slipstream.runtime.command_line import BAD_INPUT

GRACE_S = 6.0
"""Time for a role to end after its starter is gone."""
_START_TIMEOUT_S = 30.0
_KILL_TIMEOUT_S = 6.0
"""Longer than the keeper's wait for processes that hang in the kernel."""
_CLOSE_TIMEOUT_S = 1.0
_POLL_EVERY_S = 0.1
_REPORT_BYTES = 4096


class Seat(Protocol):
    """Runs one role process at a time; its output is appended to a log.

    Life: (start -> (poll | terminate)* -> stop)*.
    """

    @property
    def pid(self) -> int | None:
        """Process id on its machine; None before the start."""
        ...

    @property
    def place(self) -> str:
        """The role's process and machine, or the place that it waits for."""
        ...

    def start(self, arguments: Sequence[str], *, variables: Mapping[str, str]) -> None:
        """Start `python -m ARGUMENTS`; `variables` extend the environment. Raises OSError."""
        ...

    def poll(self) -> int | None:
        """None while the role or a descendant runs, then its exit code, or minus its signal."""
        ...

    def terminate(self) -> None:
        """Send SIGTERM; no-op after the role's end."""
        ...

    def stop(self, *, ends_at: float) -> None:
        """Wait until `ends_at` (monotonic), then kill the role and its descendants."""
        ...


class Places(Protocol):
    """Places for a run's roles on several machines."""

    @property
    def gpus(self) -> list[str]:
        """The learner's GPUs on this machine, by number or UUID."""
        ...

    def seat(self, name: str, log: Path) -> Seat: ...

    def learner_seat(self, log: Path, *, meet: Callable[[], Mapping[str, str]]) -> Seat:
        """The learner's seat; `meet` returns the ranks' rendezvous variables."""
        ...


class LocalSeat:
    """The role's keeper ends it whenever this process ends."""

    def __init__(
        self,
        log: Path | None,
        *,
        is_detached: bool = False,
        environment: Mapping[str, str] = os.environ,
        errors: int | None = None,
    ) -> None:
        """Without `log`, the role shares this process's output, except errors, if `errors` is a file.

        A detached keeper is no child of this process.
        """
        self._log = log
        self._errors = errors
        self._environment = environment
        self._attachment = "detached" if is_detached else "attached"
        self._keeper: subprocess.Popen[bytes] | None = None
        self._status = -1
        self.pid: int | None = None
        self._code: int | None = None
        self._kill_at: float | None = None

    @property
    def place(self) -> str:
        return f"pid {self.pid}"

    def start(self, arguments: Sequence[str], *, variables: Mapping[str, str]) -> None:
        self._close()
        self.pid = self._code = self._kill_at = None
        self._status, status = os.pipe()
        keeping = [sys.executable, "-I", "-S", keeper.__file__, str(status), f"{GRACE_S:g}", self._attachment]
        with ExitStack() as opened, ExitStack() as failed:
            opened.callback(os.close, status)
            failed.callback(os.close, self._status)
            output = opened.enter_context(self._log.open("ab")) if self._log else None
            self._keeper = subprocess.Popen(
                [*keeping, sys.executable, "-m", *arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT if output else self._errors,
                pass_fds=[status],
                start_new_session=True,
                env={**self._environment, **variables},
            )
            failed.pop_all()
        self._read(timeout_s=_START_TIMEOUT_S)
        if self.pid is None:
            self._close()
            raise OSError(f"the keeper of a role must start within {_START_TIMEOUT_S:g} s, but did not")

    def poll(self) -> int | None:
        if self._keeper is not None and self._code is None:
            if self._kill_at is None:
                self._read(timeout_s=0)
            else:
                # The keeper was killed, and the kernel sent SIGTERM.
                assert self.pid is not None
                is_due = time.monotonic() >= self._kill_at
                try:
                    os.killpg(self.pid, signal.SIGKILL if is_due else 0)
                except ProcessLookupError:
                    is_due = True
                if is_due:
                    self._code = -signal.SIGKILL
                    self._close()
        return self._code

    def terminate(self) -> None:
        self._request(b"t")

    def stop(self, *, ends_at: float) -> None:
        self._await_end(ends_at=max(ends_at, time.monotonic() + 0.1))
        if self._keeper is not None and self._code is None:
            self._request(b"k")
            if self._kill_at is not None:
                self._kill_at = 0.0
            # Bounded, because a process may hang in the kernel.
            self._await_end(ends_at=time.monotonic() + _KILL_TIMEOUT_S)
        self._close()

    def _await_end(self, *, ends_at: float) -> None:
        while self._keeper is not None and self.poll() is None and (left_s := ends_at - time.monotonic()) > 0:
            select.select([self._status] if self._kill_at is None else [], [], [], min(left_s, _POLL_EVERY_S))

    def _request(self, request: bytes) -> None:
        if self._keeper is not None and self._code is None:
            assert self._keeper.stdin is not None
            # The keeper may have ended since the last poll.
            with suppress(BrokenPipeError):
                os.write(self._keeper.stdin.fileno(), request)

    def _read(self, *, timeout_s: float) -> None:
        if not select.select([self._status], [], [], timeout_s)[0]:
            return
        reports = os.read(self._status, _REPORT_BYTES)
        if not reports:
            self._kill_at = time.monotonic() + GRACE_S
        for report in reports.decode().splitlines():
            word, _, number = report.partition(" ")
            if word == "started":
                self.pid = int(number)
            else:
                self._code = int(number)
                self._close()

    def _close(self) -> None:
        if self._keeper is None:
            return
        process, self._keeper = self._keeper, None
        assert process.stdin is not None
        process.stdin.close()
        os.close(self._status)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_CLOSE_TIMEOUT_S)


def run_kept(
    arguments: Sequence[str], *, timeout_s: float = inf, grace_s: float = GRACE_S, errors: int | None = None
) -> int | None:
    """Run `python -m ARGUMENTS`, which ends with this process; its output is that of a LocalSeat without a log.

    Return its exit code, or minus its signal; None after `timeout_s`. On a timeout or an interrupt, it gets SIGTERM and
    `grace_s` to end. Raises OSError.
    """
    seat, ends_at = LocalSeat(None, errors=errors), time.monotonic() + timeout_s
    seat.start(arguments, variables={})
    try:
        while (code := seat.poll()) is None and time.monotonic() < ends_at:
            time.sleep(_POLL_EVERY_S)
    finally:
        seat.terminate()
        seat.stop(ends_at=time.monotonic() + grace_s)
    return code


MACHINE_VARIABLES = ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Number of a role's machine, and rendezvous address and port on machine 0."""
_SETTLE_S = 20.0
"""Time for other parts to report their errors after one has ended."""


class SpreadSeat:
    """One role over several seats, the first on this machine. Implements Seat.

    Invariant: when `poll` has returned a code, no part is left.
    """

    def __init__(
        self, parts: Sequence[Seat], *, meet: Callable[[], Mapping[str, str]], clock: Clock = time.monotonic
    ) -> None:
        """`meet`, called at each start, returns the last two MACHINE_VARIABLES."""
        self._parts = list(parts)
        self._meet = meet
        self._clock = clock
        self._code: int | None = None
        self._settled_at: float | None = None

    @property
    def pid(self) -> int | None:
        return self._parts[0].pid

    @property
    def place(self) -> str:
        return ", and ".join(part.place for part in self._parts)

    def start(self, arguments: Sequence[str], *, variables: Mapping[str, str]) -> None:
        self._code = self._settled_at = None
        meeting = self._meet()
        for number, part in enumerate(self._parts):
            part.start(arguments, variables={**variables, **meeting, MACHINE_VARIABLES[0]: str(number)})

    def poll(self) -> int | None:
        if self._code is not None:
            return self._code
        codes = [part.poll() for part in self._parts]
        ended = [code for code in codes if code is not None]
        if ended and self._settled_at is None:
            self._settled_at = self._clock() + _SETTLE_S
        if len(ended) == len(codes) or (self._settled_at is not None and self._clock() >= self._settled_at):
            self.stop(ends_at=self._clock())
            failed = [code for code in ended if code]
            # A permanent error outweighs the others' follow-up errors.
            self._code = BAD_INPUT if BAD_INPUT in failed else failed[0] if failed else 0
        return self._code

    def terminate(self) -> None:
        for part in self._parts:
            part.terminate()

    def stop(self, *, ends_at: float) -> None:
        for part in self._parts:
            part.stop(ends_at=ends_at)
