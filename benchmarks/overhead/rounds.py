"""Rounds of one side: its command line, its contestants in turn, and their rates relative to the bare one and to plain
matrix products."""

import argparse
import statistics
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from benchmarks.harness import product_rate, quartiles, rotate

Contestant = Callable[[], Awaitable[float]]
"""Runs for one round; returns tokens per second."""


def side_arguments(module: str) -> argparse.Namespace:
    """Parse the command line with which `benchmarks.overhead` starts a side."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog=f"python -m {module}",
        description="Started by benchmarks.overhead; prints one line of JSON.",
    )
    parser.add_argument("--seconds", type=float, required=True, help="length of one measurement")
    parser.add_argument("--rounds", type=int, required=True, help="measurements of each contestant")
    parser.add_argument("--no-padding", action="store_true", help="leave out the padded loop")
    parser.add_argument("overrides", nargs="*", help="settings of the run")
    return parser.parse_args()


_PRODUCTS = "plain matrix products"


async def multiply() -> float:
    """`product_rate` as a contestant."""
    return product_rate()


async def measure_in_turn(contestants: Mapping[str, Contestant], *, rounds: int) -> dict[str, list[float]]:
    """Measure each contestant, and plain matrix products, once per round."""
    contestants = {**contestants, _PRODUCTS: multiply}
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for _, name in rotate(list(contestants), rounds=rounds):
        rates[name].append(await contestants[name]())
    return rates


def summarize(rates: Mapping[str, list[float]], *, base: str, operations_per_token: float) -> dict[str, dict[str, Any]]:
    """Return for each contestant its median tokens/s, and median and quartiles over rounds of its ratio to `base`.

    `operations_per_token`: floating-point operations that a token needs, for the share of plain matrix products.
    """
    products = rates[_PRODUCTS]
    return {
        name: {
            "tokens_per_s": statistics.median(values),
            "ratio": statistics.median(ratios),
            "ratio_quartiles": quartiles(ratios),
            "share_of_products": statistics.median(
                value * operations_per_token / product for value, product in zip(values, products, strict=True)
            ),
            "rounds": values,
        }
        for name, values in rates.items()
        if name != _PRODUCTS and (ratios := [value / other for value, other in zip(values, rates[base], strict=True)])
    }
