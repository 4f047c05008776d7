"""Sweep: one run after another for each combination of values."""

import itertools
import os
import re
import shlex
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal

import msgspec
from hydra.errors import HydraException
from rich.table import Table

from slipstream.buffer.durable_files import write_durably
from slipstream.cluster.seat import run_kept
from slipstream.configs.base import ConfigError, Record
from slipstream.configs.load import load, parse
from slipstream.configs.run import NAME_PATTERN
from slipstream.launch.run import describe_finished, with_free_name
from slipstream.runtime.command_line import INTERRUPTED, add_row, make_console, make_table, printable
from slipstream.runtime.process import raise_on_stop_signal
from slipstream.runtime.run_folder import RunFolder, make_private

RESULTS = "sweep.json"
_METRIC = re.compile(r"(accuracy|reward|pass@\d+)_.+|(eval|train)_loss|eval_pair_accuracy")
_STOP_TIMEOUT_S = 300.0
"""Longer than a launcher needs to save a checkpoint and end its roles."""
_ERROR_BYTES = 4096


class SweptRun(Record):
    """A run of a sweep.

    Example: SweptRun("mine-seed-1", values={"seed": "1"}, state="done", results={"accuracy_greedy": 0.97})
    """

    name: str
    values: dict[str, str]
    """Swept key -> value."""
    state: Literal["waiting", "done", "failed", "stopped"] = "waiting"
    reason: str = ""
    """Error of a failed run."""
    steps: int = 0
    results: dict[str, float] = {}
    """Metrics of the final evaluation, once the run is done."""


class Spread(Record):
    """A metric over several seeds: Spread(mean=0.94, min=0.93, max=0.95)."""

    mean: float
    min: float
    max: float


class Combination(Record):
    """Results over the seeds of one combination of the other values."""

    values: dict[str, str]
    num_runs: int
    results: dict[str, Spread]


def run_sweep(overrides: list[str], *, program: str) -> None:
    """Train every combination, write `sweep.json`, and print tables. Exits with 1 at the end if a run failed.

    `program`: name in suggested commands. Raises ConfigError before the first run if any cannot start.
    """
    swept = expand(overrides)
    named = [text for text in overrides if text.startswith("name=")]
    first = load([*swept[0][1], *named])
    own_name = first if named else msgspec.structs.replace(first, name=f"{first.name}-sweep")
    base, _ = with_free_name(own_name, overrides)
    runs = [SweptRun(name, values) for name, (values, _) in zip(name_runs(base.name, swept), swept, strict=True)]
    commands = [[*own, f"name={run.name}"] for run, (_, own) in zip(runs, swept, strict=True)]
    for run in map(load, commands):
        if not (run.resume and describe_finished(run, RunFolder(run))):
            RunFolder(run).check_name()
    folder = RunFolder(base).path
    make_private(folder)
    raise_on_stop_signal()
    try:
        for index, command in enumerate(commands):
            print(f"sweep: run {index + 1} of {len(runs)}, {runs[index].name}", flush=True)
            # Until it ends, the file shows what a kill of this process would leave.
            runs[index] = msgspec.structs.replace(runs[index], state="stopped")
            _write(folder, runs)
            runs[index] = _train(runs[index], command)
    finally:
        _write(folder, runs)
        make_console().print("", *draw(runs), f"all figures  {folder / RESULTS}", sep="\n", soft_wrap=True)
        if any(run.state != "done" for run in runs):
            again = [text for text in overrides if not text.startswith(("name=", "resume="))]
            command = [*program.split(), "run", "-m", *again, f"name={base.name}", "resume=auto"]
            print(f"continue with: {shlex.join(command)}")
    if failed := [run.name for run in runs if run.state == "failed"]:
        print(f"error: {len(failed)} of {len(runs)} runs failed: {', '.join(failed)}", file=sys.stderr)
        raise SystemExit(1)


def expand(overrides: list[str]) -> list[tuple[dict[str, str], list[str]]]:
    """Swept values and the overrides, without the name, of every run. Raises ConfigError."""
    choices: dict[str, list[tuple[str, str, str]]] = {}
    for text, each in zip(overrides, parse(overrides, can_sweep=True), strict=True):
        key = each.key_or_group
        try:
            values = [str(value) for value in each.sweep_string_iterator()] if each.is_sweep_override() else []
        except HydraException as error:
            raise ConfigError(f"the values of a sweep must be listed, got `{text}`: {error}.") from None
        if values and key == "name":
            raise ConfigError("name must have one value, because the runs of a sweep are named after the swept values.")
        choices[key] = [(key, value, f"{key}={value}") for value in values] or [("", "", text)]
    if all(len(options) == 1 for options in choices.values()):
        raise ConfigError("a sweep must have a setting with several values, such as seed=1,2,3.")
    choices.pop("name", None)
    combinations = [*itertools.product(*choices.values())]
    swept = [{key: value for key, value, _ in chosen if key} for chosen in combinations]
    return list(zip(swept, ([text for _, _, text in chosen] for chosen in combinations), strict=True))


def name_runs(base: str, swept: Sequence[tuple[dict[str, str], list[str]]]) -> list[str]:
    """Name runs BASE-seed-1, or BASE-1 if that is ambiguous or too long."""
    keys = [*swept[0][0]]
    ends = [re.split(r"[./]", key)[-1] for key in keys]
    labels = ends if len({*ends}) == len(ends) else [key.replace("/", ".") for key in keys]
    names = []
    for values, _ in swept:
        shown = (re.sub(r"[^A-Za-z0-9._-]+", "_", value).strip("_") for value in values.values())
        names.append("-".join([base, *(f"{label}-{value}" for label, value in zip(labels, shown, strict=True))]))
    if len({*names}) == len(names) and all(re.match(NAME_PATTERN, name) for name in names):
        return names
    return [f"{base}-{number}" for number, _ in enumerate(swept, start=1)]


def _train(run: SweptRun, overrides: list[str]) -> SweptRun:
    """Train in another process, because a run changes its process for good."""
    code, error = _call(["slipstream", "run", *overrides])
    if code == INTERRUPTED:
        return run
    folder = RunFolder(load(overrides))
    if code or not folder.summary.is_file():
        return msgspec.structs.replace(run, state="failed", reason=error or f"exit code {code}, see {folder.logs}")
    summary = msgspec.json.decode(folder.summary.read_bytes())
    found = {key.removeprefix("eval/"): value for key, value in (summary.get("evaluation") or summary).items()}
    results = {key: value for key, value in found.items() if _METRIC.fullmatch(key) and value is not None}
    return msgspec.structs.replace(run, state="done", steps=summary["steps"], results=results)


def _call(arguments: list[str]) -> tuple[int | None, str]:
    """Run `python -m ARGUMENTS`; return its exit code and its last error."""
    reader, writer = os.pipe()
    printed = bytearray()

    def copy() -> None:
        while chunk := os.read(reader, _ERROR_BYTES):
            sys.stderr.write(chunk.decode(errors="replace"))
            sys.stderr.flush()
            printed.extend(chunk)
            del printed[:-_ERROR_BYTES]

    copying = threading.Thread(target=copy, daemon=True)
    copying.start()
    try:
        code = run_kept(arguments, grace_s=_STOP_TIMEOUT_S, errors=writer)
    finally:
        os.close(writer)
        # Every process with this end of the pipe has ended.
        copying.join(timeout=1)
    found = re.findall(r"^error: (.*)", printed.decode(errors="replace"), re.MULTILINE)
    return code, found[-1] if found else ""


def combine(runs: Sequence[SweptRun]) -> list[Combination]:
    """Mean and range over seeds, per combination of other values."""
    groups: dict[tuple[tuple[str, str], ...], list[dict[str, float]]] = {}
    for run in runs:
        if run.state == "done":
            groups.setdefault(tuple(item for item in run.values.items() if item[0] != "seed"), []).append(run.results)
    combined = []
    for values, results in groups.items():
        by_metric = {key: [each[key] for each in results if key in each] for key in results[0]}
        spreads = {key: Spread(fmean(found), min(found), max(found)) for key, found in by_metric.items()}
        combined.append(Combination(dict(values), len(results), spreads))
    return combined


def _write(folder: Path, runs: Sequence[SweptRun]) -> None:
    content = {"runs": runs, "combinations": combine(runs)}
    write_durably(folder / RESULTS, msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")


def draw(runs: Sequence[SweptRun]) -> Iterator[Table | str]:
    """Yield a table of runs, errors and, for several seeds, a table of means and ranges."""
    metrics = [*dict.fromkeys(key for run in runs for key in run.results)]
    names = [key.replace("_", " ") for key in metrics]
    table = make_table("run", "steps", *names, "state", numbers=("steps", *names))
    for run in runs:
        cells = (f"{run.results[key]:.3f}" if key in run.results else "-" for key in metrics)
        add_row(table, run.name, run.steps or "-", *cells, run.state)
    yield table
    yield from (f"{run.name}: {printable(run.reason)}" for run in runs if run.reason)
    combinations = combine(runs)
    if not combinations or "seed" not in runs[0].values:
        return
    keys = [key for key in runs[0].values if key != "seed"]
    table = make_table(*keys, "seeds", *(f"{name}: mean (range)" for name in names), numbers=("seeds",))
    for each in combinations:
        found = (each.results.get(key) for key in metrics)
        cells = (f"{one.mean:.3f} ({one.min:.3f} to {one.max:.3f})" if one else "-" for one in found)
        add_row(table, *(each.values[key] for key in keys), each.num_runs, *cells)
    yield table
