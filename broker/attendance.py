"""Attendance: which of the generators that are kept are waited for, and which have been away for too long for that."""

import time
from collections.abc import Set as AbstractSet

from broker.clock import Clock


class Attendance:
    """Life: note, at every look. One that is away is waited for, until its time is over."""

    def __init__(self, *, patience_s: float, clock: Clock = time.monotonic) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._away_since: dict[str, float] = {}
        self._given_up: set[str] = set()

    def note(self, kept: AbstractSet[str], *, at_work: AbstractSet[str]) -> list[str]:
        """Take in who is there; returns those that nobody waits for any more from now on, each once per absence."""
        now = self._clock()
        self._away_since = {name: self._away_since.get(name, now) for name in kept - at_work}
        given_up = {name for name, since in self._away_since.items() if now - since > self._patience_s}
        new, self._given_up = given_up - self._given_up, given_up
        return sorted(new)

    @property
    def is_complete(self) -> bool:
        """Whether all are at work that are waited for."""
        return self._away_since.keys() == self._given_up
