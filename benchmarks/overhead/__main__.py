"""What the machinery costs: the rate of each side bare, wrapped and whole, and of both together, in one run.

python -m benchmarks.overhead [--seconds N] [--rounds N] [--steps N] [--out FILE.json]
    [--parts generators learner together] [-- override ...]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.overhead.together import run_together
from slipstream.configs.load import load, to_plain
from slipstream.configs.run import RunConfig
from slipstream.generators.engines.vllm.environment import vllm_environment
from slipstream.launch.preflight import prepare
from slipstream.learner.engines.deepspeed_engine import deepspeed_environment
from slipstream.runtime.run_folder import RunFolder

_START_S = 300.0
_WIDE_OPEN = ["buffer.staleness.max_lag=1000000", "learner.max_steps=1000000", "learner/engine=torch"]
"""For the generator alone: pacing admits without limit, and who publishes its weights need not be DeepSpeed."""

console = Console()


def main(arguments: argparse.Namespace) -> None:
    """Measure, show, write."""
    run = load(arguments.overrides)
    prepare(run)
    result: dict[str, Any] = {
        "machine": {"cores": os.cpu_count(), "at": datetime.now(UTC).isoformat("T", "seconds"), "load_average": {}},
        "settings": {"seconds": arguments.seconds, "rounds": arguments.rounds, "run": to_plain(run)},
    }
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        result["versions"] = _versions(run, Path(folder))
        for part in arguments.parts:
            console.print(f"measuring {part} ...", highlight=False)
            result[part] = _PARTS[part](arguments, environment=_environment(run), folder=Path(folder))
            result["machine"]["load_average"][part] = psutil.getloadavg()
            if arguments.out:
                arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    _show(result)


def _generators(arguments: argparse.Namespace, *, environment: Mapping[str, str], folder: Path) -> dict[str, Any]:
    overrides = [*arguments.overrides, *_WIDE_OPEN, f"broker.address=ipc://{folder}/alone.sock"]
    return _side("benchmarks.overhead.generator_side", overrides, arguments, environment)


def _learner(arguments: argparse.Namespace, *, environment: Mapping[str, str], folder: Path) -> dict[str, Any]:
    return _side("benchmarks.overhead.learner_side", arguments.overrides, arguments, environment)


def _together(arguments: argparse.Namespace, *, environment: Mapping[str, str], folder: Path) -> dict[str, Any]:
    return run_together(folder, overrides=arguments.overrides, steps=arguments.steps, environment=environment)


_PARTS = {"generators": _generators, "learner": _learner, "together": _together}


def _environment(run: RunConfig) -> dict[str, str]:
    """What the roles' own programs set; and bytecode is kept, or every start would take ten seconds more."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return inherited | deepspeed_environment(torch.device("cpu")) | vllm_environment(run)


def _side(
    module: str, overrides: list[str], arguments: argparse.Namespace, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Run one side in a process of its own, because vLLM and DeepSpeed read different environments."""
    command = [sys.executable, "-m", module, f"--seconds={arguments.seconds}", f"--rounds={arguments.rounds}"]
    limit_s = _START_S + 10 * arguments.seconds * (arguments.rounds + 1)
    done = subprocess.run(
        [*command, *overrides], env=environment, capture_output=True, text=True, timeout=limit_s, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{module} must end well, got exit code {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _versions(run: RunConfig, folder: Path) -> dict[str, str]:
    """As every run folder keeps them."""
    record = RunFolder(msgspec.structs.replace(run, runs_dir=str(folder), name="versions"))
    record.open()
    return json.loads((record.path / "versions.json").read_text())


# --- the table -----------------------------------------------------------------------------------------------------
def _show(result: dict[str, Any]) -> None:
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


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one measurement (3)")
    parser.add_argument("--rounds", type=int, default=8, help="measurements of each contestant (8)")
    parser.add_argument("--steps", type=int, default=40, help="steps of the run with both sides (40)")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS), help="what to measure (all)")
    parser.add_argument("--out", type=Path, help="write all figures here")
    parser.add_argument("overrides", nargs="*", help="settings of the run, as for run_async.py")
    return parser.parse_args()


if __name__ == "__main__":
    main(_arguments())
