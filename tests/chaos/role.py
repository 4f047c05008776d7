"""Strikes drawn from one seed, and the roles that they hit."""

import copy
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal

from slipstream.configs.base import Record
from tests.chaos.processes import Process

Action = Literal["kill", "terminate", "stop"]
"""SIGKILL | SIGTERM | SIGSTOP, with a SIGCONT later."""
Progress = tuple[int, ...] | None
"""Counters that grow while a role works; None = unknown."""

_SIGNALS: dict[Action, signal.Signals] = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "stop": signal.SIGSTOP}
_ROLE_WEIGHTS = {"broker": 2, "learner": 2, "store": 2, "generator": 4}
_ACTION_WEIGHTS: dict[Action, int] = {"kill": 16, "terminate": 2, "stop": 3}
_MAX_STOP_S = 5.0
"""Longer than `broker.peer_timeout_s`, so that some stopped roles continue after they were evicted."""
_SHARE_AFTER_RECOVERY = 0.3
"""Fraction of strikes that wait until all roles work again; the others hit a recovering run."""
_TERMINATE_TIMEOUT_S = 15.0
_RESTART_GAP_S = 0.25
"""Shortest time between two starts of a role that exits by itself."""
_MAX_LINE_LENGTH = 200
_UNCAUGHT_EXCEPTION = 1
"""Exit code of an uncaught exception, which the death of another role must never cause."""


class Strike(Record):
    """One signal for one role.

    Example: Strike(role="broker", action="kill", is_after_recovery=False, gap_s=0.71, stopped_s=0.0).
    """

    role: str
    action: Action
    is_after_recovery: bool
    gap_s: float
    """Seconds since the recovery, else since the previous strike."""
    stopped_s: float
    """Seconds from SIGSTOP to SIGCONT; 0 for the other actions."""
    down_s: float = 0.0
    """Shortest time from the end of the process to its restart, seconds."""


def draw_strikes(*, seed: int, kills: int, generators: list[str], max_gap_s: float) -> Iterator[Strike]:
    """Draw strikes until `kills` of them have ended a process; strikes that only stop a process are extra."""
    chance = random.Random(seed)
    while kills > 0:
        (kind,) = chance.choices(list(_ROLE_WEIGHTS), list(_ROLE_WEIGHTS.values()))
        (action,) = chance.choices(list(_ACTION_WEIGHTS), list(_ACTION_WEIGHTS.values()))
        kills -= action != "stop"
        yield Strike(
            role=chance.choice(generators) if kind == "generator" else kind,
            action=action,
            is_after_recovery=chance.random() < _SHARE_AFTER_RECOVERY,
            gap_s=chance.uniform(0, max_gap_s),
            stopped_s=chance.uniform(0, _MAX_STOP_S) if action == "stop" else 0.0,
        )


class Recovery:
    """Stopwatch of one role, from a strike until its progress grows again.

    Life: (strike -> observe* -> recovered)*; another strike restarts the watch.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.num_cut_short = 0
        self._struck_at: float | None = None
        self._before: Progress = None

    @property
    def is_pending(self) -> bool:
        return self._struck_at is not None

    def strike(self, now: float, *, before: Progress = None) -> None:
        """Start the watch at `now`, seconds. Progress must exceed `before`; None: the next progress observed."""
        self.num_cut_short += self.is_pending
        self._struck_at = now
        self._before = before

    def restart(self, now: float) -> None:
        """Count from `now` instead: the time until then was part of the strike."""
        self._struck_at = now

    def observe(self, progress: Progress, now: float) -> None:
        """Stop the watch if `progress` has grown; a rollback may lower it first."""
        if self._struck_at is None or progress is None:
            return
        if self._before is None or progress < self._before:
            self._before = progress
        elif progress > self._before:
            self.seconds.append(now - self._struck_at)
            self._struck_at = None


class Role:
    """A role's process, the strikes against it, and its recoveries. `now` is monotonic, in seconds.

    Life: start -> (strike -> poll* -> recovered)* -> end.
    """

    def __init__(
        self,
        name: str,
        process: Process,
        *,
        initial: Progress = None,
        may_finish: bool = False,
        note: Callable[[str, str], object] = lambda event, role: None,
    ) -> None:
        """`initial`: progress of a new process; None if it continues its predecessor's.

        `may_finish`: exit code 0 ends the run. `note(event, role)` receives down, up, stop, and continue.
        """
        self._note = note
        self.name = name
        self.process = process
        self._initial = initial
        self._may_finish = may_finish
        self.recovery = Recovery()
        self.strikes: Counter[Action] = Counter()
        self.unexpected_exits: Counter[str] = Counter()
        """Exits without a strike, by the last line of the log."""
        self.crashes: Counter[str] = Counter()
        """Exits that only a bug can cause, even after SIGTERM, and ignored SIGTERMs."""
        self._is_ending = False
        self._is_exit_recorded = False
        self._kill_at: float | None = None
        self._continue_at: float | None = None
        self._restart_at = 0.0

    @property
    def is_stopped(self) -> bool:
        return self._continue_at is not None

    @property
    def is_alive(self) -> bool:
        return self.process.exit_code is None

    @property
    def has_finished(self) -> bool:
        return self._may_finish and self.process.exit_code == 0

    def start(self, now: float) -> None:
        self.process.start()
        self._note("up", self.name)
        self._is_ending = self._is_exit_recorded = False
        self._kill_at = self._continue_at = None
        self._restart_at = now + _RESTART_GAP_S

    def strike(self, strike: Strike, now: float) -> None:
        self.strikes[strike.action] += 1
        self._note("stop" if strike.action == "stop" else "down", self.name)
        self.process.send(_SIGNALS[strike.action])
        if strike.action == "stop":
            self.recovery.strike(now)
            self._continue_at = now + strike.stopped_s
            # A stopped process cannot react to an earlier SIGTERM.
            self._kill_at = self._kill_at and self._kill_at + strike.stopped_s
            return
        self.recovery.strike(now, before=self._initial)
        self._is_ending = True
        self._restart_at = max(self._restart_at, now + strike.down_s)
        self._kill_at = now + _TERMINATE_TIMEOUT_S
        if strike.action == "terminate" and self.is_stopped:
            self._continue(now)

    def poll(self, now: float) -> None:
        """Continue, kill, or restart the process, if due."""
        if self._continue_at is not None and now >= self._continue_at:
            self._continue(now)
        if self.has_finished:
            return
        if self.process.exit_code is not None:
            self._record_exit()
            if now >= self._restart_at:
                self.start(now)
        elif self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self.process.send(signal.SIGKILL)
            self.crashes[f"{self.name} must end within {_TERMINATE_TIMEOUT_S:g} s of a SIGTERM"] += 1

    def observe(self, progress: Progress, now: float) -> None:
        if not self.is_stopped and not self._is_ending and self.is_alive:
            self.recovery.observe(progress, now)

    def expect_death(self, now: float) -> None:
        self.strikes["kill"] += 1
        self._note("down", self.name)
        self.recovery.strike(now, before=self._initial)
        self._is_ending = True

    def replace(self, now: float) -> Process:
        """Start another process and return the old one, which is no longer watched."""
        former = copy.copy(self.process)
        self._note("down", self.name)
        self.start(now)
        return former

    def end(self) -> None:
        if self.is_alive:
            self.process.send(signal.SIGKILL)
            self.process.wait(timeout_s=_TERMINATE_TIMEOUT_S)

    def _continue(self, now: float) -> None:
        self._continue_at = None
        self._note("continue", self.name)
        self.process.send(signal.SIGCONT)
        if not self._is_ending:
            self.recovery.restart(now)

    def _record_exit(self) -> None:
        if self._is_exit_recorded:
            return
        self._is_exit_recorded = True
        last_line = self.process.last_line[-_MAX_LINE_LENGTH:]
        if not self._is_ending:
            self._is_ending = True
            self._note("down", self.name)
            self.unexpected_exits[last_line] += 1
        if self.process.exit_code == _UNCAUGHT_EXCEPTION:
            self.crashes[f"{self.name} must not end with exit code {_UNCAUGHT_EXCEPTION}, last line: {last_line}"] += 1
