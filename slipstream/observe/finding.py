"""Answer: findings in the records of a run, with figures."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slipstream.configs.base import Record

Events = Mapping[int, Sequence[str]]
"""Step -> sentences about events during the step."""


class Finding(Record):
    """One finding.

    Example: Finding("lag/mean", figures="rose from 1 to 5.8, from step 44 on", advice="the answers come from ...")
    """

    key: str
    """Metric, or role and phase: `learner/compute`."""
    figures: str
    advice: str = ""
    """Meaning and remedy, with the run's settings."""


class Answer(Record):
    """Answer to a question about a run."""

    headline: str
    findings: list[Finding] = []
    """Findings, the most important first."""
    facts: list[str] = []
    """Additional measurements, one line each."""
    note: str = ""
    """Limitation of the answer."""

    def lines(self) -> Iterator[str]:
        yield self.headline
        for number, finding in enumerate(self.findings, start=1):
            yield f"{number}. {finding.key}: {finding.figures}"
            yield from ([f"   {finding.advice}"] if finding.advice else [])
        yield from self.facts
        yield from ([self.note] if self.note else [])


def number_in(row: Mapping[str, Any], key: str) -> float:
    """Return a metric of an unvalidated row; NaN if absent."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else math.nan


def shown(value: float) -> str:
    """Format a value with three significant digits."""
    return f"{value:.3g}"


def steps_shown(first: int, last: int) -> str:
    """Format a range of steps."""
    return f"step {first}" if first == last else f"steps {first} to {last}"
