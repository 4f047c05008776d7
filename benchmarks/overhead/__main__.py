"""Overhead of the machinery: rates of generator and learner, each bare, wrapped and whole."""

import argparse
import json
import os
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
_UNPACED = ["buffer.staleness.max_lag=1000000", "learner.max_steps=1000000", "learner/engine=torch"]
"""For the generator alone: pacing admits without limit, and a plain torch engine publishes its weights."""

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


_PARTS = {"generators": _generators, "learner": _learner}


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


if __name__ == "__main__":
    parser = make_parser("benchmarks.overhead", __doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one measurement (3)")
    parser.add_argument("--rounds", type=int, default=8, help="measurements of each contestant (8)")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS), help="what to measure (all)")
    parser.add_argument("overrides", nargs="*", help="settings of the run, after --")
    main(parser.parse_args())
