"""MetricAlerts: says loudly when a metric leaves its healthy range, once, and again when it has come back."""

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from slipstream.learner.metrics.step_metrics import RANGES, Range

_CALM_STEPS = 3
_MEDIAN_STEPS, _FEWEST_STEPS = 50, 10

log = structlog.get_logger(__name__)


class MetricAlerts:
    """Life: look, once a step. `tell` gets one text for all metrics that have become unhealthy in a step; the log has a
    line for each, and one when it has come back."""

    def __init__(self, tell: Callable[[str], None], *, ranges: Mapping[str, Range] = RANGES) -> None:
        self._tell = tell
        self._watched = {key: _Watched(healthy) for key, healthy in ranges.items()}

    def look(self, row: Mapping[str, Any]) -> None:
        """Take in the metrics of a step; a metric that the row lacks stays what it was."""
        is_stale = row.get("lag/max", 0) > 0
        complaints = [
            self._look(key, watched, float(row[key]))
            for key, watched in self._watched.items()
            if key in row and (is_stale or not watched.healthy.only_stale)
        ]
        if told := "; ".join(filter(None, complaints)):
            self._tell(told)

    def _look(self, key: str, watched: "_Watched", value: float) -> str:
        """What is to be told, if anything."""
        was_told = watched.is_told
        watched.note(value)
        healthy = watched.healthy
        if watched.is_told and not was_told:
            log.warning("unhealthy", metric=key, value=value, healthy=str(healthy), advice=healthy.advice)
            return f"{key} is {value:.3g}, healthy is {healthy}: {healthy.advice}"
        if was_told and not watched.is_told:
            log.info("healthy_again", metric=key, value=value, healthy=str(healthy))
        return ""


class _Watched:
    """One metric: how long it has been outside its range, or inside after that."""

    def __init__(self, healthy: Range) -> None:
        self.healthy = healthy
        self.is_told = False
        self._streak = 0
        self._recent: deque[float] = deque(maxlen=_MEDIAN_STEPS)

    def note(self, value: float) -> None:
        """Switches to told after `patience` steps outside in a row, and back after a few inside: a metric that wavers
        about the end of its range makes no stream of events."""
        differs = self._is_inside(value) == self.is_told
        self._streak = self._streak + 1 if differs else 0
        if self._streak >= (_CALM_STEPS if self.is_told else self.healthy.patience):
            self.is_told, self._streak = not self.is_told, 0

    def _is_inside(self, value: float) -> bool:
        if not self.healthy.of_median:
            return self.healthy.holds(value)
        usual = statistics.median(self._recent) if len(self._recent) >= _FEWEST_STEPS else 0.0
        self._recent.append(value)
        return not usual or self.healthy.holds(value / usual)
