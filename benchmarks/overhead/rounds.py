"""Rounds: contestants measured in turn within one run, so that a noisy machine is noisy for all of them."""

import statistics
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

Contestant = Callable[[], Awaitable[float]]
"""Runs for one round; returns tokens per second."""


async def alternate(contestants: Mapping[str, Contestant], *, rounds: int) -> dict[str, list[float]]:
    """Each contestant once a round; every round begins with the next one, so that none is always first."""
    names = list(contestants)
    rates: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            rates[name].append(await contestants[name]())
    return rates


def summarise(rates: Mapping[str, list[float]], *, base: str) -> dict[str, dict[str, Any]]:
    """Per contestant: median tokens/s, and the median over rounds of its ratio to `base`, with quartiles."""
    return {
        name: {
            "tokens_per_s": statistics.median(values),
            "ratio": statistics.median(ratios),
            "ratio_quartiles": _quartiles(ratios),
            "rounds": values,
        }
        for name, values in rates.items()
        if (ratios := [value / other for value, other in zip(values, rates[base], strict=True)])
    }


def _quartiles(values: list[float]) -> list[float]:
    if len(values) < 2:
        return [values[0], values[0]]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]
