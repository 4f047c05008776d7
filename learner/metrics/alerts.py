"""MetricAlerts: reports a metric once when it leaves its healthy range, and again when it has returned."""

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from slipstream.configs.run import RunConfig
from slipstream.learner.metrics.ranges import RANGES, Range, explain_value, figures_of

_STEPS_TO_RECOVER = 3
_MEDIAN_STEPS, _MIN_MEDIAN_STEPS = 50, 10

log = structlog.get_logger(__name__)


class MetricAlerts:
    """Life: check, once per step. The log has a line for each metric that leaves its range or returns; `on_alert` gets
    one text for all metrics that leave their range in a step."""

    def __init__(
        self,
        on_alert: Callable[[str], None],
        *,
        run: RunConfig | None = None,
        ranges: Mapping[str, Range] = RANGES,
    ) -> None:
        """`run`: the one whose figures the texts quote."""
        self._on_alert = on_alert
        self._run = run
        self._watched = {key: Watched(healthy) for key, healthy in ranges.items()}

    def check(self, row: Mapping[str, Any]) -> None:
        """Take in the metrics of a step; a metric that the row lacks keeps its state."""
        figures = figures_of(row, self._run) if self._run else None
        found: dict[str, list[str]] = {}
        for key, watched in changed(self._watched, row):
            healthy, value = watched.healthy, float(row[key])
            if watched.is_unhealthy:
                text = explain_value(value, healthy, figures)
                log.warning("unhealthy", metric=key, value=value, healthy=str(healthy), advice=text)
                found.setdefault(text, []).append(f"{key} is {value:.3g}, healthy is {healthy}")
            else:
                log.info("healthy_again", metric=key, value=value, healthy=str(healthy))
        # Metrics that mean the same are named together: an event has room for few sentences.
        if found:
            self._on_alert("; ".join(f"{', '.join(values)}: {text}" for text, values in found.items()))


class Watched:
    """State of one metric: unhealthy or not, and for how many steps it has contradicted that."""

    def __init__(self, healthy: Range) -> None:
        self.healthy = healthy
        self.is_unhealthy = False
        self._streak = 0
        self._recent: deque[float] = deque(maxlen=_MEDIAN_STEPS)

    def update(self, value: float) -> bool:
        """Take in the value of a step; return whether the metric has left its range, or returned."""
        # Hysteresis: a metric that wavers around a bound of its range must not produce a stream of events.
        contradicts = self._is_inside(value) == self.is_unhealthy
        self._streak = self._streak + 1 if contradicts else 0
        if self._streak < (_STEPS_TO_RECOVER if self.is_unhealthy else self.healthy.patience):
            return False
        self.is_unhealthy, self._streak = not self.is_unhealthy, 0
        return True

    def _is_inside(self, value: float) -> bool:
        if not self.healthy.of_median:
            return self.healthy.holds(value)
        median = statistics.median(self._recent) if len(self._recent) >= _MIN_MEDIAN_STEPS else 0.0
        self._recent.append(value)
        return not median or self.healthy.holds(value / median)


def changed(watched: Mapping[str, Watched], row: Mapping[str, Any]) -> list[tuple[str, Watched]]:
    """Take in the metrics of a step; return those that have left their range or returned."""
    is_stale = row.get("lag/max", 0) > 0
    found = {key: each for key, each in watched.items() if key in row and (is_stale or not each.healthy.only_stale)}
    return [(key, each) for key, each in found.items() if each.update(float(row[key]))]
