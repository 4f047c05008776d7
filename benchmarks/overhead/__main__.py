"""Overhead of the machinery: rates of generator and learner, each bare, wrapped and whole, then of both together."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.harness import make_parser, write_result
from slipstream.configs.load import load, to_plain
from slipstream.configs.run import RunConfig
from slipstream.generators.engines.vllm.environment import vllm_environment
from slipstream.launch.preflight import prepare
from slipstream.learner.engines.deepspeed_engine import deepspeed_environment
from slipstream.runtime.run_folder import RunFolder

_START_S = 300.0
_RUN_TIMEOUT_S = 400.0
_UNPACED = ["buffer.staleness.max_lag=1000000", "learner.max_steps=1000000", "learner/engine=torch"]
"""For the generator alone: pacing admits without limit, and a plain torch engine publishes its weights."""
_KEYS = (
    "generators/tokens_per_s",
    "learner/tokens_per_s",
    "learner/wait_s",
    "learner/train_s",
    "learner/publish_s",
    "weights/pause_s",
)


console = Console()


def main(arguments: argparse.Namespace) -> None:
    """Measure the selected parts; results are written after each, because a part takes minutes."""
    run = load(arguments.overrides)
    prepare(run)
    result: dict[str, Any] = {"run": to_plain(run), "load_averages": {}}
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        result["versions"] = _versions(run, Path(folder))
        try:
            for part in arguments.parts:
                console.print(f"measuring {part} ...", highlight=False)
                result[part] = _PARTS[part](arguments, environment=_environment(run), folder=Path(folder))
                result["load_averages"][part] = psutil.getloadavg()
                write_result(arguments, result)
        finally:
            _print_tables(result)


def _generators(arguments: argparse.Namespace, *, environment: Mapping[str, str], folder: Path) -> dict[str, Any]:
    overrides = [*arguments.overrides, *_UNPACED, f"broker.address=ipc://{folder}/alone.sock"]
    return _side("benchmarks.overhead.generator_side", overrides, arguments, environment)


def _learner(arguments: argparse.Namespace, *, environment: Mapping[str, str], folder: Path) -> dict[str, Any]:
    return _side("benchmarks.overhead.learner_side", arguments.overrides, arguments, environment)


def _together(arguments: argparse.Namespace, *, environment: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Run both sides for --steps steps; returns medians of the run's own metrics over the last half."""
    settings = [
        "name=together",
        f"runs_dir={folder}",
        f"broker.address=ipc://{folder}/broker.sock",
        f"learner.max_steps={arguments.steps}",
        "learner.stop=null",
        "evaluation.every_steps=0",
        "evaluation.final_prompts=32",
    ]
    command = [sys.executable, "-m", "slipstream", "run", *arguments.overrides, *settings]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_RUN_TIMEOUT_S, check=False)
    if done.returncode:
        logs = "\n".join(log.read_text()[-2000:] for log in sorted((folder / "together" / "logs").glob("*.log")))
        raise RuntimeError(f"the run must end well, got exit code {done.returncode}:\n{done.stdout}\n{logs}")
    rows = [json.loads(line) for line in (folder / "together" / "metrics.jsonl").read_text().splitlines()]
    # The first half is warm-up: compilation, filling of the buffer, the first lag.
    steady = rows[len(rows) // 2 :]
    tokens = sum(row["learner/tokens"] for row in steady[1:])
    # A step after which nothing was published has no figures of a weight update.
    measured = {key: [row[key] for row in steady if key in row] for key in _KEYS}
    return {key: statistics.median(values) for key, values in measured.items() if values} | {
        "steps": len(rows),
        "measured_steps": len(steady),
        "tokens_per_s": tokens / (steady[-1]["time_s"] - steady[0]["time_s"]),
    }


_PARTS = {"generators": _generators, "learner": _learner, "together": _together}


def _environment(run: RunConfig) -> dict[str, str]:
    """Return the environment that the roles' own programs set."""
    # With bytecode caching, without which every start takes ten seconds more.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return inherited | deepspeed_environment(torch.device("cpu")) | vllm_environment(run)


def _side(
    module: str, overrides: list[str], arguments: argparse.Namespace, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Run one side in its own process: vLLM and DeepSpeed read different environments."""
    command = [sys.executable, "-m", module, f"--seconds={arguments.seconds}", f"--rounds={arguments.rounds}"]
    limit_s = _START_S + 10 * arguments.seconds * (arguments.rounds + 1)
    done = subprocess.run(
        [*command, *overrides], env=environment, capture_output=True, text=True, timeout=limit_s, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{module} must end well, got exit code {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _versions(run: RunConfig, folder: Path) -> dict[str, str]:
    """Return the versions that every run folder records."""
    run_folder = RunFolder(msgspec.structs.replace(run, runs_dir=str(folder), name="versions"))
    run_folder.open()
    return json.loads((run_folder.path / "versions.json").read_text())


# --- tables ---------------------------------------------------------------------------------------------------------
def _print_tables(result: dict[str, Any]) -> None:
    if sides := [side for side in ("generators", "learner") if side in result]:
        console.print(_rates_table([result[side]["rates"] for side in sides]))
    if "learner" in result:
        console.print(_steps_table(result["learner"]))
    if "together" in result:
        console.print(_together_table(result))


def _rates_table(sides: list[dict[str, Any]]) -> Table:
    table = Table("alone", "tokens/s", "ratio to bare", "quartiles", title="Each side alone")
    for rates in sides:
        for name, figures in rates.items():
            low, high = figures["ratio_quartiles"]
            table.add_row(
                name, f"{figures['tokens_per_s']:,.0f}", f"{figures['ratio']:.3f}", f"{low:.3f} to {high:.3f}"
            )
        table.add_section()
    return table


def _steps_table(learner: dict[str, Any]) -> Table:
    parts = learner["parts_ms"]
    total = sum(parts.values())
    table = Table("part", "ms", "share", title=f"The learner's step, {learner['tokens_per_step']} tokens")
    for part, milliseconds in parts.items():
        table.add_row(part, f"{milliseconds:.2f}", f"{milliseconds / total:.1%}")
    return table


def _together_table(result: dict[str, Any]) -> Table:
    together = result["together"]
    whole = {"generators": "generator role", "learner": "learner step"}
    alone = {s: result[s]["rates"][name]["tokens_per_s"] for s, name in whole.items() if s in result}
    table = Table("together", "median", "to the side alone", title=f"Both, last {together['measured_steps']} steps")
    for key, value in together.items():
        side, _, name = key.partition("/")
        share = f"{value / alone[side]:.3f}" if name == "tokens_per_s" and side in alone else ""
        table.add_row(key, f"{value:,.4g}", share)
    return table


if __name__ == "__main__":
    parser = make_parser("benchmarks.overhead", __doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one measurement (3)")
    parser.add_argument("--rounds", type=int, default=8, help="measurements of each contestant (8)")
    parser.add_argument("--steps", type=int, default=40, help="steps of the run with both sides (40)")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS), help="what to measure (all)")
    parser.add_argument("overrides", nargs="*", help="settings of the run, after --")
    main(parser.parse_args())
