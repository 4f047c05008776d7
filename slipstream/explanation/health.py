"""Health: the metrics of a run that are outside of their healthy range, as the learner's alerts judge them."""

from typing import Any

from slipstream.buffer.trajectory import Record
from slipstream.configs.run import RunConfig
from slipstream.learner.metrics.alerts import Watched, changed
from slipstream.learner.metrics.ranges import RANGES, explain_value, figures_of


class HealthWarning(Record):
    """A metric outside of its range.

    Example: HealthWarning("learner/ess", value=0.21, since_step=40, healthy=">= 0.3", advice="the answers come ...")
    """

    metric: str
    value: float
    """Newest value."""
    since_step: int
    """Step in which it was found to be outside; it may have left its range some steps before."""
    healthy: str
    advice: str
    """Meaning for learning and remedy."""


class Health:
    """Follows the rows of a run, in order."""

    def __init__(self, run: RunConfig | None = None) -> None:
        """`run`: the one whose figures the advice quotes."""
        self._run = run
        self._watched = {key: Watched(healthy) for key, healthy in RANGES.items()}
        self._since: dict[str, int] = {}
        self._newest: dict[str, float] = {}

    def add(self, row: dict[str, Any]) -> None:
        # A file may hold anything.
        numbers = {key: value for key, value in row.items() if isinstance(value, int | float)}
        for key, watched in changed(self._watched, numbers):
            if watched.is_unhealthy:
                self._since[key] = row["step"]
            else:
                self._since.pop(key, None)
        self._newest |= numbers

    @property
    def warnings(self) -> list[HealthWarning]:
        """Metrics outside of their range now, the newest first."""
        figures = figures_of(self._newest, self._run) if self._run else None
        newest_first = sorted(self._since.items(), key=lambda item: -item[1])
        return [
            HealthWarning(
                key, self._newest[key], step, str(RANGES[key]), explain_value(self._newest[key], RANGES[key], figures)
            )
            for key, step in newest_first
        ]
