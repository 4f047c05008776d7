"""Autoscaler: says when one generator more or less is wanted, and why, from how much each side has waited."""

import time
from collections.abc import Sequence
from typing import Any

from slipstream.broker.status.run_status import wait_fraction
from slipstream.buffer.trajectory import Record
from slipstream.configs.generators import AutoscaleConfig
from slipstream.runtime.clock import Clock

_FEWEST_STEPS = 5
"""Measured together, before the learner's waiting means anything."""


class Change(Record):
    """What is wanted from now on. Example: Change(wanted=3, reason="the learner waited 45 % of the last 62 s, ...")."""

    wanted: int
    """Generators."""
    reason: str
    """With the numbers it was decided by."""


class Autoscaler:
    """Measures for `settle_s`, or longer where steps are, decides, and measures anew. Belongs to one thread.

    More generators come first: while the learner waits, idle generators are idle for another reason (a small
    `max_lag`, a short queue), and fewer of them would not help it.
    """

    def __init__(self, config: AutoscaleConfig, *, clock: Clock = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Measure anew from now."""
        self._began_at = self._clock()
        self._rows: list[dict[str, Any]] = []
        self._busy: list[float] = []
        self._starving: list[bool] = []

    def look(
        self, rows: Sequence[dict[str, Any]], *, busy: float | None, is_starving: bool, at_work: int, count: int
    ) -> Change | None:
        """`rows`: metrics rows that are new since the last look; `busy`: share of their room that generators use now.

        `is_starving`: the learner waits for groups right now. `at_work`: generators that `busy` is of. `count`:
        generators wanted so far.
        """
        self._rows += rows
        self._busy += [] if busy is None else [busy]
        self._starving.append(is_starving)
        seconds = self._clock() - self._began_at
        if seconds < self._config.settle_s:
            return None
        change = self._enough(count) or self._more(seconds, count=count)
        change = change or self._fewer(seconds, at_work=at_work, count=count)
        if not 0 < len(self._rows) < _FEWEST_STEPS:
            self.begin()
        return change

    def _enough(self, count: int) -> Change | None:
        """Back to the fewest, where one was drained or given up."""
        fewest = self._config.min
        return Change(fewest, f"generators.autoscale.min is {fewest}") if count < fewest else None

    def _more(self, seconds: float, *, count: int) -> Change | None:
        waited, config = self._learner_waited(), self._config
        if count >= config.max or waited is None or waited <= config.more_above:
            return None
        return Change(
            count + 1,
            f"the learner waited {waited:.0%} of the last {seconds:.0f} s for groups, above {config.more_above:.0%}",
        )

    def _learner_waited(self) -> float | None:
        """Share of its time; None before it means anything. While no step has ended: of the looks at it."""
        if not self._rows:
            return sum(self._starving) / len(self._starving)
        if len(self._rows) < _FEWEST_STEPS:
            return None
        return wait_fraction(self._rows)

    def _fewer(self, seconds: float, *, at_work: int, count: int) -> Change | None:
        """Never while the learner waits: at `max` it would go and come back for ever."""
        waited, config = self._learner_waited(), self._config
        if count <= config.min or not self._busy or len(self._rows) < _FEWEST_STEPS:
            return None
        if waited is None or waited > config.more_above:
            return None
        busy = sum(self._busy) / len(self._busy)
        if busy >= config.fewer_below or busy * at_work > at_work - 1:
            return None
        return Change(
            count - 1,
            f"the generators ran {busy:.0%} of what they could in the last {seconds:.0f} s, below "
            f"{config.fewer_below:.0%}",
        )
