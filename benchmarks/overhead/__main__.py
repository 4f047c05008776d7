"""Overhead of the framework: rates of generator and learner, each bare, wrapped, and whole."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import msgspec
import psutil
import torch
from rich.console import Console

from benchmarks.harness import make_parser, make_table, write_result
from slipstream.configs.load import load, to_plain
from slipstream.configs.run import RunConfig
from slipstream.generators.engines.vllm.environment import vllm_environment
from slipstream.launch.preflight import prepare
from slipstream.learner.engines.deepspeed_engine import deepspeed_environment
from slipstream.runtime.run_folder import RunFolder

_START_S = 300.0
_UNPACED = [
    "staleness.max_lag=1000000",
    "staleness.target_lag=1000000",
    "learner.max_steps=1000000",
    "learner/engine=torch",
]
"""For the generator side: no pacing limit, and a plain torch engine that publishes its weights."""
_REAL = [
    "experiment=smollm2_cpu",
    "generators.sampling.max_tokens=64",
    "generators.sampling.ignore_eos=true",
    "generators.max_concurrency=16",
    "learner.prompts_per_step=8",
    "learner.max_steps=1000000",
    "prepare=[{creates: data/sums/heldout.parquet, module: slipstream.scripts.make_digits_data, args: "
    "['--task=question', '--train-rows=54', '--heldout-rows=36', '--out=data/sums']}]",
]
"""Settings of `--model`: sums as chat messages, answers of 64 tokens."""
_PARTS = {"generators": "benchmarks.overhead.generator_side", "learner": "benchmarks.overhead.learner_side"}

console = Console()


def main(arguments: argparse.Namespace) -> None:
    """Measure the selected parts. Results are written after each, because a part takes minutes."""
    if arguments.model:
        arguments.overrides = [*_REAL, f"model.path={arguments.model}", *arguments.overrides]
    run = load(arguments.overrides)
    prepare(run)
    result: dict[str, Any] = {"run": to_plain(run), "load_averages": {}}
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        run_folder = RunFolder(msgspec.structs.replace(run, runs_dir=folder, name="versions"))
        run_folder.open()
        result["versions"] = json.loads((run_folder.path / "versions.json").read_text())
        try:
            for part in arguments.parts:
                console.print(f"measuring {part} ...", highlight=False)
                alone = [*_UNPACED, f"broker.address=ipc://{folder}/alone.sock"] if part == "generators" else []
                result[part] = _side(part, alone, arguments, environment=_environment(run))
                result["load_averages"][part] = psutil.getloadavg()
                write_result(arguments, result)
        finally:
            _print_tables({part: result[part] for part in arguments.parts if part in result})


def _environment(run: RunConfig) -> dict[str, str]:
    """Return the environment that the roles' programs set."""
    # Keep bytecode caching enabled; without it every start takes ten seconds longer.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return inherited | deepspeed_environment(torch.device("cpu")) | vllm_environment(run)


def _side(
    part: str, settings: list[str], arguments: argparse.Namespace, *, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Run one side in its own process: vLLM and DeepSpeed read different environments."""
    command = [sys.executable, "-m", _PARTS[part], f"--seconds={arguments.seconds}", f"--rounds={arguments.rounds}"]
    command += [*(["--no-padding"] if arguments.model else []), *arguments.overrides, *settings]
    limit_s = _START_S + 10 * (arguments.seconds + 10) * (arguments.rounds + 1)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False)
    if done.returncode:
        raise RuntimeError(f"{_PARTS[part]} must succeed, got exit code {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _print_tables(parts: dict[str, dict[str, Any]]) -> None:
    rates = [{"name": name} | figures for side in parts.values() for name, figures in side["rates"].items()]
    columns = {"alone": "{name}", "tokens/s": "{tokens_per_s:,.0f}", "ratio to bare": "{ratio:.3f}"}
    columns["quartiles"] = "{ratio_quartiles[0]:.3f} to {ratio_quartiles[1]:.3f}"
    columns["of plain matrix products"] = "{share_of_products:.1%}"
    console.print(make_table(rates, columns, title="Each side alone"))
    wholes = [figures["share_of_products"] for side in parts.values() for figures in [*side["rates"].values()][-1:]]
    if len(wholes) == len(_PARTS):
        share = f"{sum(wholes) / len(wholes):.1%}"
        console.print(f"generator role and learner step, on a core each: {share} of plain matrix products")
    if learner := parts.get("learner"):
        total = sum(learner["parts_ms"].values())
        steps = [{"part": part, "ms": ms, "share": ms / total} for part, ms in learner["parts_ms"].items()]
        title = f"The learner's step, {learner['tokens_per_step']} tokens"
        console.print(make_table(steps, {"part": "{part}", "ms": "{ms:.2f}", "share": "{share:.1%}"}, title=title))


if __name__ == "__main__":
    parser = make_parser("benchmarks.overhead", __doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one measurement (3)")
    parser.add_argument("--rounds", type=int, default=8, help="measurements per contestant (8)")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS), help="what to measure (all)")
    parser.add_argument("--model", help="folder of a chat model: answers of 64 tokens, and a packed bare loop")
    parser.add_argument("overrides", nargs="*", help="settings of the run, after --")
    main(parser.parse_args())
