"""Framework of the benchmark programs: command line, fair order of measurements, tables, results as JSON."""

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table

from slipstream.runtime import command_line


def make_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Build the parser of `python -m MODULE`, with --out."""
    parser = command_line.make_parser(module, description)
    parser.add_argument("--out", type=Path, help="write all figures to this JSON file")
    return parser


def rotate(names: Sequence[str], *, rounds: int) -> Iterator[tuple[int, str]]:
    """Yield (round, name), every name once per round."""
    # Measure all contestants within one run, so that other load on the machine affects all of them. Each round starts
    # with the next one, so that none always runs with a cold or a warm cache.
    for number in range(rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            yield number, name


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each figure."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def product_rate(*, width: int = 1024, seconds: float = 1.0) -> float:
    """Floating-point operations per second of float32 matrix products that fit the cache, on torch's threads."""
    import torch

    left, right = torch.randn(2, width, width)
    out, count, began_at = torch.empty_like(left), 0, time.perf_counter()
    while (spent_s := time.perf_counter() - began_at) < seconds:
        torch.mm(left, right, out=out)
        count += 1
    return count * 2 * width**3 / spent_s


def peak_mib() -> float:
    """Return the peak resident memory of this process, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the lower and the upper quartile."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def make_table(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str], *, title: str | None = None) -> Table:
    """Build a table of rows. `columns`: heading -> cell format, such as `{seconds:.2f}`."""
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(cell.format(**row) for cell in columns.values()))
    return table


def machine() -> dict[str, Any]:
    """Describe the machine and its load, needed to judge any figure."""
    return {
        "cores": os.cpu_count(),
        "at": datetime.now(UTC).isoformat("T", "seconds"),
        "load_average": psutil.getloadavg(),
    }


def write_result(arguments: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Write machine, settings, and figures to --out, if given."""
    if arguments.out is None:
        return
    settings = {name: value for name, value in vars(arguments).items() if name != "out"}
    result = {"machine": machine(), "settings": settings} | figures
    arguments.out.write_text(json.dumps(result, indent=2, default=str) + "\n")
