"""Detects a drop of the reward beyond its noise; lists metrics that changed with it, without claiming causes.

Compares the best window of steps before the drop with the worst window after it.
"""

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

from slipstream.buffer.records import StepEntry
from slipstream.configs.run import RunConfig
from slipstream.observe.finding import Answer, Events, Finding, number_in, shown, steps_shown
from slipstream.runtime.healthy_ranges import SIGNS, STOP_LENGTH, Range, figures_of

Row = Mapping[str, Any]

_MIN_STEPS = 20
_MIN_WIDTH, _MAX_WIDTH = 5, 50
_ERRORS = 6.0
"""Standard errors. In a thousand steps of slightly correlated noise, the largest drop is about five."""
_LEAST_CHANGE = 0.2
"""Smallest reported change, relative to the larger mean."""
_DEPARTED_STEPS = 3
"""Consecutive steps beyond the previous level that begin a change."""
_DEVIATIONS = 3.0
"""Standard deviations beyond the previous level."""
_REWARD = "learner/reward_mean"
_OF_SOURCE = re.compile(r"learner/by_source/(?P<source>.+)/(?P<name>[^/]+)")
_USUAL = ("lag/mean", "learner/idle_fraction", "learner/ess", "learner/grad_norm", "learner/entropy")
"""Metrics to list even if unchanged."""
_NAMED = 6
_EVENTS_NAMED = 10
_NOTE = (
    "These are the metrics that changed with the reward, the first to change first; the records do not tell which of "
    "them caused it."
)


class Windows(NamedTuple):
    """Windows before and after a drop, as row indices."""

    before: int
    """Start of the window with the best mean."""
    after: int
    """Start of the worst window after it."""
    width: int

    def of(self, values: Sequence[float]) -> tuple[list[float], list[float]]:
        found = (values[start : start + self.width] for start in (self.before, self.after))
        early, late = ([value for value in window if math.isfinite(value)] for window in found)
        return early, late


class Change(NamedTuple):
    """Change of a metric between two windows."""

    was: float
    now: float
    errors: float
    """Difference in standard errors."""
    begins: int | None
    """First row beyond the previous level; None without a clear beginning."""

    @property
    def is_large(self) -> bool:
        least = _LEAST_CHANGE * max(abs(self.was), abs(self.now))
        return self.errors >= _ERRORS and abs(self.now - self.was) >= least


def explain_reward(
    rows: Sequence[Row], run: RunConfig, *, entries: Sequence[StepEntry] = (), events: Events = MappingProxyType({})
) -> Answer:
    """Say whether the reward fell and what changed with it. `entries`: ledger, for changed settings."""
    rows = [row for row in rows if math.isfinite(number_in(row, _REWARD))]
    if len(rows) < _MIN_STEPS:
        have = "1 step has" if len(rows) == 1 else f"{len(rows)} steps have"
        return Answer(f"{have} a reward: a fall cannot be told from noise in fewer than {_MIN_STEPS}.")
    rewards = _column(rows, _REWARD)
    windows = largest_fall(rewards)
    change = _change(rewards, windows)
    early, late = (steps_shown(*_steps(rows, start, windows.width)) for start in (windows.before, windows.after))
    means = f"{shown(change.was)} (mean of {early}) to {shown(change.now)} ({late})"
    if change.errors < _ERRORS or change.now >= change.was:
        first, last = rewards[: windows.width], rewards[-windows.width :]
        trend = f"from {shown(statistics.fmean(first))} in the first {windows.width} steps to "
        headline = (
            f"The reward did not fall beyond its noise: it went {trend}{shown(statistics.fmean(last))} in the last."
        )
        fact = f"no {windows.width} steps have a lower mean than {windows.width} steps before them"
        if change.now < change.was:
            fact = f"its largest fall was from {means}: {change.errors:.1f} standard errors, not {_ERRORS:g}"
        return Answer(headline, facts=[fact])
    changes, mix = list(_changes(rows, windows)), list(_mix(rows, windows))
    signs = list(_signs(rows, changes, figures_of(rows[-1], run)))
    headline = f"The reward fell from {means}, by {shown(change.was - change.now)}{_since(rows, change)}."
    facts = [*mix, *_parts(rows, windows), *_heldout(rows, windows), *_happened(rows, windows, entries, events)]
    if same := [(key, change) for key, _, change in changes if key in _USUAL and not change.is_large]:
        texts = (f"{key} ({shown(change.was)} and {shown(change.now)})" for key, change in same)
        facts.append(f"much the same before and after: {', '.join(texts)}")
    note = _NOTE if signs else "" if mix else "No watched metric changed with it."
    return Answer(headline, signs, facts, note)


def largest_fall(values: Sequence[float]) -> Windows:
    """Windows with the largest drop, of at least two widths of values."""
    width = max(_MIN_WIDTH, min(_MAX_WIDTH, len(values) // 8))
    means = [statistics.fmean(values[start : start + width]) for start in range(len(values) - width + 1)]
    best, found, size = 0, Windows(0, width, width), -math.inf
    for after in range(width, len(means)):
        best = max(best, after - width, key=means.__getitem__)
        if means[best] - means[after] > size:
            size, found = means[best] - means[after], Windows(best, after, width)
    return found


def _column(rows: Sequence[Row], key: str) -> list[float]:
    return [number_in(row, key) for row in rows]


def _change(values: Sequence[float], windows: Windows) -> Change:
    early, late = windows.of(values)
    was, now = statistics.fmean(early), statistics.fmean(late)
    # A constant metric has no noise, so use a floor.
    floor = 1e-3 * max(abs(was), abs(now)) + 1e-12
    spread = [max(floor, statistics.stdev(window) if len(window) > 1 else abs(was - now)) for window in (early, late)]
    error = math.hypot(spread[0] / math.sqrt(len(early)), spread[1] / math.sqrt(len(late)))
    is_beyond = [(value - was) * (1 if now > was else -1) > _DEVIATIONS * spread[0] for value in values]
    starts = range(windows.before, windows.after + windows.width - _DEPARTED_STEPS + 1)
    begins = next((start for start in starts if all(is_beyond[start : start + _DEPARTED_STEPS])), None)
    return Change(was, now, abs(now - was) / error, begins)


def _steps(rows: Sequence[Row], start: int, width: int) -> tuple[int, int]:
    return rows[start]["step"], rows[start + width - 1]["step"]


def _since(rows: Sequence[Row], change: Change) -> str:
    return "" if change.begins is None else f", from step {rows[change.begins]['step']} on"


def _keys(rows: Sequence[Row], windows: Windows) -> list[str]:
    chosen = (row for start in (windows.before, windows.after) for row in rows[start : start + windows.width])
    return sorted({key for row in chosen for key in row})


def _changes(rows: Sequence[Row], windows: Windows) -> Iterator[tuple[str, Range, Change]]:
    for key in _keys(rows, windows):
        found = _OF_SOURCE.fullmatch(key)
        known = SIGNS.get(STOP_LENGTH if found and found["name"] == "stop_length" else key)
        if known and all(windows.of(values := _column(rows, key))):
            yield key, known, _change(values, windows)


def _signs(
    rows: Sequence[Row], changes: Sequence[tuple[str, Range, Change]], figures: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield metrics that changed harmfully, earliest first."""
    for key, known, change in sorted(changes, key=lambda each: math.inf if each[2].begins is None else each[2].begins):
        is_rise = change.now > change.was
        is_harmful = known.high is not None if is_rise else known.low is not None
        if change.is_large and is_harmful:
            is_outside = not known.of_median and not known.holds(change.now)
            text = f"{'rose' if is_rise else 'fell'} from {shown(change.was)} to {shown(change.now)}"
            text += f"{_since(rows, change)}{f'; healthy is {known}' if is_outside else ''}"
            yield Finding(key, text, known.explain(figures))


class _Source(NamedTuple):
    share: float
    reward: float


def _sources(rows: Sequence[Row]) -> dict[str, _Source]:
    counts, sums = defaultdict[str, float](float), defaultdict[str, float](float)
    for row in rows:
        for key in row:
            if (found := _OF_SOURCE.fullmatch(key)) and found["name"] == "reward_mean":
                source = found["source"]
                count, reward = number_in(row, f"learner/by_source/{source}/trajectories"), number_in(row, key)
                if math.isfinite(count * reward):
                    counts[source] += count
                    sums[source] += count * reward
    whole = sum(counts.values())
    return {source: _Source(count / whole, sums[source] / count) for source, count in counts.items() if count > 0}


def _mix(rows: Sequence[Row], windows: Windows) -> Iterator[str]:
    """Split the drop into changes of the task mix and of rewards within tasks."""
    early, late = (_sources(rows[start : start + windows.width]) for start in (windows.before, windows.after))
    if len(names := sorted(early.keys() | late.keys())) < 2:
        return
    by_mix, lines = 0.0, []
    for name in names:
        # If a window lacks a task, assume the other's reward.
        was, now = early.get(name) or _Source(0, late[name].reward), late.get(name) or _Source(0, early[name].reward)
        by_mix += (now.share - was.share) * (was.reward + now.reward) / 2
        line = f"  {name}: {was.share:.0%} to {now.share:.0%} of the answers, reward {shown(was.reward)} to "
        lines.append((abs(now.share * now.reward - was.share * was.reward), f"{line}{shown(now.reward)}"))
    was_all, now_all = (sum(each.share * each.reward for each in found.values()) for found in (early, late))
    total = now_all - was_all
    yield f"of a change of {total:+.3g}: {by_mix:+.3g} another mix of tasks, {total - by_mix:+.3g} rewards within them"
    yield from (line for _, line in sorted(lines, reverse=True)[:_NAMED])


def _parts(rows: Sequence[Row], windows: Windows) -> Iterator[str]:
    for key in _keys(rows, windows):
        found = _OF_SOURCE.fullmatch(key)
        if found and found["name"].startswith("part_") and all(windows.of(values := _column(rows, key))):
            change = _change(values, windows)
            if change.is_large and change.now < change.was:
                yield f"part of the reward that fell: {key}, {shown(change.was)} to {shown(change.now)}"


def _heldout(rows: Sequence[Row], windows: Windows) -> Iterator[str]:
    """Compare held-out rewards, of the same prompts."""
    for key in (key for key in _keys(rows, windows) if key.startswith("eval/reward_")):
        early, late = windows.of(_column(rows, key))
        if early and late:
            yield f"{key}, of the same prompts before and after: {shown(early[-1])} to {shown(late[-1])}"


def _happened(rows: Sequence[Row], windows: Windows, entries: Sequence[StepEntry], events: Events) -> Iterator[str]:
    first, last = rows[windows.before]["step"], _steps(rows, windows.after, windows.width)[1]
    for before, entry in pairwise(entry for entry in entries if first <= entry.step <= last):
        if before.config_hash != entry.config_hash:
            yield f"from step {entry.step} on the run had other settings ({before.config_hash} to {entry.config_hash})"
    found = [(step, text) for step, texts in sorted(events.items()) if first <= step <= last for text in texts]
    yield from (f"event in step {step}: {text}" for step, text in found[-_EVENTS_NAMED:])
