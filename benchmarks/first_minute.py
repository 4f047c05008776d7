"""The first minute of a new user, by seed: time to the first step, to a rising curve, and to the end; accuracies.

Each seed runs the default experiment in an empty folder, including creation of data and model. With --clone it runs
`make run` in a new clone of this checkout, including the installation. With --here it runs in this folder, with the
existing data and models.
"""

import argparse
import json
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness import make_parser, write_result

_NAME = "first"
_FIRST_STEP = re.compile(r"step +1/")
_MEAN_OF = 5
"""Steps over which rewards are averaged, because rewards of single steps vary."""
_RISEN_BY = 0.05
_COLUMNS = {
    "wall_s": "whole, s",
    "cpu_s": "processor, s",
    "first_step_s": "to step 1, s",
    "rising_s": "curve rises, s",
    "train_seconds": "training, s",
    "steps": "steps",
    "accuracy_before": "before, sampled",
    "accuracy_before_greedy": "greedy",
    "accuracy_sampled": "after, sampled",
    "accuracy_greedy": "greedy",
}
"""Key of a figure -> column heading."""

console = Console(width=160, highlight=False)


def main(arguments: argparse.Namespace) -> None:
    """Run the seeds one after the other, then print the table."""
    rows: list[dict[str, Any]] = []
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory(prefix="first-minute-") as folder:
            rows.append({"seed": seed} | measure(Path(folder), arguments, seed=seed))
        console.print(json.dumps(rows[-1]), markup=False)
        write_result(arguments, {"rows": rows})
    print_table(rows)


def measure(folder: Path, arguments: argparse.Namespace, *, seed: int) -> dict[str, Any]:
    """Run one seed; return its figures, or its exit code and the end of its output if it failed."""
    overrides = [f"seed={seed}", f"name={_NAME}", f"runs_dir={folder}/runs", *arguments.overrides]
    command, place = [sys.executable, "-m", "slipstream", "run", *overrides], folder / "work"
    if arguments.clone:
        subprocess.run(["git", "clone", "--quiet", ".", str(place)], check=True)
        command = ["make", "run", f"ARGS={' '.join(overrides)}"]
    elif arguments.here:
        place = Path.cwd()
    place.mkdir(exist_ok=True)
    used_s, started_at = _processor_s(), time.monotonic()
    first_step_s, printed = None, []
    with subprocess.Popen(
        command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            printed.append(line)
            if first_step_s is None and _FIRST_STEP.match(line):
                first_step_s = time.monotonic() - started_at
    figures = {"wall_s": time.monotonic() - started_at, "cpu_s": _processor_s() - used_s, "first_step_s": first_step_s}
    if run.returncode:
        return figures | {"exit_code": run.returncode, "printed": "".join(printed[-20:])}
    lines = (folder / "runs" / _NAME / "metrics.jsonl").read_text().splitlines()
    rise_s = seconds_to_rise([json.loads(line) for line in lines])
    rising_s = first_step_s + rise_s if first_step_s is not None and rise_s is not None else None
    return figures | {"rising_s": rising_s} | json.loads((folder / "runs" / _NAME / "summary.json").read_text())


def seconds_to_rise(rows: list[dict[str, Any]]) -> float | None:
    """Return the seconds from the first step until the mean reward has visibly risen; None if it never does."""
    rewards = [row["learner/reward_mean"] for row in rows]
    start = statistics.fmean(rewards[:_MEAN_OF])
    for end in range(2 * _MEAN_OF, len(rows) + 1):
        if statistics.fmean(rewards[end - _MEAN_OF : end]) >= start + _RISEN_BY:
            return rows[end - 1]["time_s"] - rows[0]["time_s"]
    return None


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print a line per seed, then the median and the range."""
    table = Table("seed", *_COLUMNS.values(), title="the default experiment")
    for row in rows:
        if "exit_code" in row:
            table.add_row(str(row["seed"]), f"failed: exit code {row['exit_code']}")
        else:
            table.add_row(str(row["seed"]), *(_cell(row[key]) for key in _COLUMNS))
    ended = [row for row in rows if "exit_code" not in row]
    for label, choose in (("median", statistics.median), ("least", min), ("most", max)):
        columns = [[row[key] for row in ended if row[key] is not None] for key in _COLUMNS]
        table.add_row(label, *(_cell(choose(column) if column else None) for column in columns))
    console.print(table)


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if value <= 1 else f"{value:.0f}"


def _processor_s() -> float:
    """Return the CPU seconds of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _seeds(text: str) -> list[int]:
    first, is_range, last = text.partition("..")
    return list(range(int(first), int(last) + 1)) if is_range else [int(number) for number in text.split(",")]


if __name__ == "__main__":
    parser = make_parser("benchmarks.first_minute", __doc__)
    parser.add_argument("--seeds", type=_seeds, default=list(range(10)), help="0..9 or 0,3,5 (0..9)")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--clone", action="store_true", help="`make run` in a new clone, with its installation")
    place.add_argument("--here", action="store_true", help="in this folder, with its data and models")
    parser.add_argument("overrides", nargs="*", help="settings of the run, after --")
    main(parser.parse_args())
