"""Role: one victim: its process, what it suffered, and how it came back."""

import signal
from collections import Counter
from typing import Protocol

from tests.chaos.recovery import Recovery, Work
from tests.chaos.strikes import Blow, Strike

_SIGNALS: dict[Blow, signal.Signals] = {
    "kill": signal.SIGKILL,
    "terminate": signal.SIGTERM,
    "stop": signal.SIGSTOP,
}
_LAST_WORD_S = 15.0
"""From SIGTERM to SIGKILL."""
_RESTART_GAP_S = 0.25
"""Between a start and the next one, where a role ends by itself."""
_WORDS = 200
"""Characters of what a role said last that tell enough."""
_BUG = 1
"""Exit code of an exception that nobody caught: no death of another role may cause it."""


class Process(Protocol):
    """What WarmProcess, ColdProcess and StoreProcess fulfil."""

    @property
    def pid(self) -> int: ...
    @property
    def exit_code(self) -> int | None: ...
    @property
    def last_line(self) -> str: ...
    def start(self) -> None: ...
    def send(self, number: signal.Signals) -> None: ...
    def wait(self, *, timeout_s: float) -> int | None: ...


class Role:
    """Life: start -> (strike -> attend* -> recovered)* -> end. `now` is seconds, monotonic."""

    def __init__(self, name: str, process: Process, *, newborn: Work = None, may_finish: bool = False) -> None:
        """`newborn` is the work of a process that has done none; None where its work adds to its predecessor's.

        `may_finish`: exit code 0 is the end of the run.
        """
        self.name = name
        self.process = process
        self._newborn = newborn
        self._may_finish = may_finish
        self.recovery = Recovery()
        self.blows: Counter[Blow] = Counter()
        """What it suffered."""
        self.own_ends: Counter[str] = Counter()
        """Ends nobody asked for, by what it said last."""
        self.crashes: Counter[str] = Counter()
        """Those of them, and of ends after a SIGTERM, that are bugs; and SIGTERMs that were not obeyed."""
        self._is_dying = False
        self._is_noted = False
        self._kill_at: float | None = None
        self._go_on_at: float | None = None
        self._restart_at = 0.0

    @property
    def is_stopped(self) -> bool:
        """Whether it stands still until its SIGCONT."""
        return self._go_on_at is not None

    @property
    def is_alive(self) -> bool:
        """Whether there is anybody to be hit."""
        return self.process.exit_code is None

    @property
    def has_finished(self) -> bool:
        """Whether its work is done, rather than cut off."""
        return self._may_finish and self.process.exit_code == 0

    def start(self, now: float) -> None:
        """Start the process."""
        self.process.start()
        self._is_dying = self._is_noted = False
        self._kill_at = self._go_on_at = None
        self._restart_at = now + _RESTART_GAP_S

    def strike(self, strike: Strike, now: float) -> None:
        """Hit it."""
        self.blows[strike.blow] += 1
        self.process.send(_SIGNALS[strike.blow])
        if strike.blow == "stop":
            self.recovery.strike(now)
            self._go_on_at = now + strike.stopped_s
            self._kill_at = self._kill_at and self._kill_at + strike.stopped_s
            return
        self.recovery.strike(now, before=self._newborn)
        self._is_dying = True
        self._kill_at = now + _LAST_WORD_S
        if strike.blow == "terminate" and self.is_stopped:
            self._go_on(now)

    def poll(self, now: float) -> None:
        """Let it go on, end it for good, or start it again, whatever is due."""
        if self._go_on_at is not None and now >= self._go_on_at:
            self._go_on(now)
        if self.has_finished:
            return
        if self.process.exit_code is not None:
            self._come_back(now)
        elif self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self.process.send(signal.SIGKILL)
            self.crashes[f"{self.name} must end within {_LAST_WORD_S:g} s of a signal that asks it to"] += 1

    def look(self, work: Work, now: float) -> None:
        """What it has done so far, as seen from outside."""
        if not self.is_stopped and not self._is_dying and self.process.exit_code is None:
            self.recovery.look(work, now)

    def end(self) -> None:
        """Kill it and wait until it is gone."""
        if self.process.exit_code is None:
            self.process.send(signal.SIGKILL)
            self.process.wait(timeout_s=_LAST_WORD_S)

    def _go_on(self, now: float) -> None:
        self._go_on_at = None
        self.process.send(signal.SIGCONT)
        if not self._is_dying:
            self.recovery.restart(now)

    def _come_back(self, now: float) -> None:
        self._note_end()
        if now >= self._restart_at:
            self.start(now)

    def _note_end(self) -> None:
        if self._is_noted:
            return
        self._is_noted = True
        if not self._is_dying:
            self._is_dying = True
            self.own_ends[self.process.last_line[-_WORDS:]] += 1
        if self.process.exit_code == _BUG:
            self.crashes[
                f"{self.name} must not end with exit code {_BUG}, said: {self.process.last_line[-_WORDS:]}"
            ] += 1
