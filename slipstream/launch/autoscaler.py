"""Autoscaler: decides, from the waits of learner and generators, when to run one generator more or less."""

import time
from collections.abc import Sequence
from typing import Any

from slipstream.broker.status.run_status import wait_fraction
from slipstream.buffer.trajectory import Record
from slipstream.configs.generators import AutoscaleConfig
from slipstream.runtime.clock import Clock

_MIN_STEPS = 5
"""Steps in a window before the learner's waits are meaningful."""


class Change(Record):
    """A decision of the autoscaler.

    Example: Change(target=3, reason="the learner waited 45% of the last 62 s for groups, above 30%")
    """

    target: int
    """Number of generators from now on."""
    reason: str
    """Measurements that led to it."""


class Autoscaler:
    """Measures for a window of `settle_s`, or longer when steps are slow, decides, and starts the next window.

    Scaling up has priority: while the learner waits, idle generators have another reason to be idle (a small
    `max_lag`, a short queue), and fewer of them would not help it. Belongs to one thread.
    """

    def __init__(self, config: AutoscaleConfig, *, clock: Clock = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self.start_window()

    def start_window(self) -> None:
        """Discard the measurements so far."""
        self._started_at = self._clock()
        self._rows: list[dict[str, Any]] = []
        self._busy: list[float] = []
        self._starving: list[bool] = []

    def observe(
        self, rows: Sequence[dict[str, Any]], *, busy: float | None, is_starving: bool, num_ready: int, target: int
    ) -> Change | None:
        """Add one observation; return a change when the window is over and calls for one.

        `rows`: metrics rows since the last observation; `busy`: share of their capacity that the `num_ready` generators
        with weights use now; `is_starving`: the learner waits for groups now; `target`: number of generators so far.
        """
        self._rows += rows
        self._busy += [] if busy is None else [busy]
        self._starving.append(is_starving)
        seconds = self._clock() - self._started_at
        if seconds < self._config.settle_s:
            return None
        change = (
            self._return_to_min(target)
            or self._scale_up(seconds, target=target)
            or self._scale_down(seconds, num_ready=num_ready, target=target)
        )
        # A window with too few steps is extended rather than thrown away, or slow steps would never be measured.
        if not 0 < len(self._rows) < _MIN_STEPS:
            self.start_window()
        return change

    def _return_to_min(self, target: int) -> Change | None:
        """Replace generators that were drained or abandoned below the minimum."""
        least = self._config.min
        return Change(least, f"generators.autoscale.min is {least}") if target < least else None

    def _scale_up(self, seconds: float, *, target: int) -> Change | None:
        waited, config = self._learner_wait_fraction(), self._config
        if target >= config.max or waited is None or waited <= config.more_above:
            return None
        return Change(
            target + 1,
            f"the learner waited {waited:.0%} of the last {seconds:.0f} s for groups, above {config.more_above:.0%}",
        )

    def _scale_down(self, seconds: float, *, num_ready: int, target: int) -> Change | None:
        waited, config = self._learner_wait_fraction(), self._config
        if target <= config.min or not self._busy or len(self._rows) < _MIN_STEPS:
            return None
        # Never while the learner waits: at `max` a generator would leave and return in turn.
        if waited is None or waited > config.more_above:
            return None
        busy = sum(self._busy) / len(self._busy)
        # The others must be able to take over its work.
        if busy >= config.fewer_below or busy * num_ready > num_ready - 1:
            return None
        return Change(
            target - 1,
            f"the generators used {busy:.0%} of their capacity in the last {seconds:.0f} s, below "
            f"{config.fewer_below:.0%}",
        )

    def _learner_wait_fraction(self) -> float | None:
        """Share of its time that the learner waited for groups; None while there are too few steps.

        Before the first step ends, the share of observations in which it waited stands in.
        """
        if not self._rows:
            return sum(self._starving) / len(self._starving)
        return wait_fraction(self._rows) if len(self._rows) >= _MIN_STEPS else None
