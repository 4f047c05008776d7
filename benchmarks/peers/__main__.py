"""Slipstream and TRL's GRPOTrainer, alternating: time to a goal, trained tokens per second, seconds per step.

    python -m benchmarks.peers --tasks default "long tail" --rounds 3 --out peers.json

TRL has its own environment (--trl), created on first use. Both sides get the same checkpoint, prompts, reward, batch,
learning rate, and cores; TRL uses as many threads as cores. Neither side evaluates: the goal is a fraction of correct
answers among those trained on. TRL's AsyncGRPOTrainer sends weights only over NCCL, and therefore needs GPUs.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table
from safetensors import safe_open

from benchmarks.harness import make_parser, product_rate, rotate, write_result
from benchmarks.peers.tasks import LONG_TAIL_MODEL, TASKS, Task, save_long_tail_model
from slipstream.configs.load import load
from slipstream.launch.preflight import prepare

_TRL = ("trl==1.16.0", "accelerate", "datasets")
_TIMEOUT_S = 1500.0
_TRL_SIDE = Path(__file__).with_name("trl_side.py")
_ENGINES = {
    "vllm": [],
    # Twice the engine's batch, so that the next batch waits while one is decoded.
    "hf": ["generators/engine=hf", "generators.max_concurrency=512"],
    "vllm, max_lag=0": ["staleness.max_lag=0"],
}

console = Console(highlight=False)


def main(arguments: argparse.Namespace) -> None:
    """Measure each task with every contestant in turn; results are written after each task."""
    for experiment in {TASKS[name].experiment for name in arguments.tasks}:
        prepare(load([f"experiment={experiment}"]))
    if not Path(LONG_TAIL_MODEL).exists():
        save_long_tail_model(Path(LONG_TAIL_MODEL))
    python = make_environment(arguments.trl)
    results: dict[str, Any] = {}
    torch.set_num_threads(_num_cores())
    peak = product_rate() / 1e9
    console.print(f"a plain float32 matrix multiplication: {peak:.0f} GFLOP/s")
    for name in arguments.tasks:
        task, contestants = TASKS[name], [*arguments.engines, "TRL"]
        found: dict[str, list[dict[str, float]]] = {each: [] for each in contestants}
        for number, contestant in rotate(contestants, rounds=arguments.rounds):
            with tempfile.TemporaryDirectory(prefix="peers-") as folder:
                if contestant == "TRL":
                    rows = _run_trl(task, python, Path(folder), seed=number)
                else:
                    rows = _run_ours(task, _ENGINES[contestant], Path(folder), seed=number)
            found[contestant].append(figures(rows, task, parameters=num_parameters(Path(task.model)), peak_gflops=peak))
            console.print(f"{name}: {contestant}: {found[contestant][-1]}")
        results[name] = found
        write_result(arguments, {"results": results})
    _print(results)


def make_environment(folder: Path) -> Path:
    """Create a virtual environment with TRL unless it exists; return its Python."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=_TIMEOUT_S)
        import transformers

        # The same torch and transformers as ours.
        own = [f"torch=={torch.__version__.partition('+')[0]}", f"transformers=={transformers.__version__}"]
        for packages in (own[:1], [*own, *_TRL]):
            subprocess.run([str(python), "-m", "pip", "install", "-q", *packages], check=True, timeout=_TIMEOUT_S)
    return python


def figures(rows: list[dict[str, float]], task: Task, *, parameters: int, peak_gflops: float) -> dict[str, float]:
    """Condense a run's rows: seconds per step, its parts, and tokens per second over the second half; time to the goal.

    `peak_share`: useful floating point operations as a share of a matrix multiplication's speed. Useful are 2 per
    parameter for each token generated and 6 for each trained, and the prompts once per group, without padding.
    """
    steady = rows[len(rows) // 2 :]
    seconds = steady[-1]["time_s"] - steady[0]["time_s"]
    # The mean of three steps, because the fraction of correct answers of one step (256 answers) varies by two points.
    means = [statistics.mean(row["accuracy"] for row in rows[at - 2 : at + 1]) for at in range(2, len(rows))]
    reached = [row for row, mean in zip(rows[2:], means, strict=True) if mean >= task.goal]
    steps, tokens = len(steady) - 1, sum(row["tokens"] for row in steady[1:])
    useful = 8 * parameters * (tokens + steps * task.groups * task.prompt_tokens)
    parts = [key for key in rows[0] if key.endswith("_s") and key != "time_s"]
    return {
        "seconds_per_step": seconds / steps,
        **{part: statistics.mean(row[part] for row in steady[1:]) for part in parts},
        "tokens_per_s": tokens / seconds,
        "peak_share": 1e-9 * useful / seconds / peak_gflops,
        **({"seconds_to_goal": reached[0]["time_s"], "steps_to_goal": reached[0]["step"]} if reached else {}),
    }


def num_parameters(model: Path) -> int:
    """Count the parameters of a model in safetensors format; tied ones count once."""
    total = 0
    for path in model.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return total


def _num_cores() -> int:
    return psutil.cpu_count(logical=False) or os.cpu_count() or 1


def _run_trl(task: Task, python: Path, folder: Path, *, seed: int) -> list[dict[str, float]]:
    threads = _num_cores()
    given, result = folder / "task.json", folder / "result.json"
    given.write_text(json.dumps(task.peer(threads=threads, folder=folder / "out", seed=seed)))
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    environment["TRL_EXPERIMENTAL_SILENCE"] = "1"
    environment.pop("PYTHONPATH", None)
    _call([str(python), str(_TRL_SIDE), str(given), str(result)], environment)
    return json.loads(result.read_text())


def _run_ours(task: Task, engine: list[str], folder: Path, *, seed: int) -> list[dict[str, float]]:
    settings = [*engine, *task.settings(), "name=peer", f"runs_dir={folder}", f"seed={seed}"]
    settings.append(f"broker.address=ipc://{folder}/broker.sock")
    environment = {**os.environ, "OMP_NUM_THREADS": str(task.learner_threads)}
    _call([sys.executable, "-m", "slipstream", "run", *settings], environment)
    rows = [json.loads(line) for line in (folder / "peer" / "metrics.jsonl").read_text().splitlines()]
    correct = f"learner/by_source/{task.source}/correct_fraction"
    keys = {"step": "step", "time_s": "time_s", "learner/tokens": "tokens", correct: "accuracy"}
    keys |= {f"learner/{part}": part for part in ("wait_s", "train_s", "publish_s")}
    return [{ours: row.get(key, 0.0) for key, ours in keys.items()} for row in rows]


def _call(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    # 1 is the exit code of a run that was to learn and did not.
    if done.returncode not in (0, 1) or "Traceback" in done.stderr:
        raise RuntimeError(f"{command[0]} must succeed, got exit code {done.returncode}:\n{done.stdout}{done.stderr}")


def _print(results: dict[str, Any]) -> None:
    table = Table(
        "task", "trainer", "s/step", "tokens/s", "share of matmul", "s to the goal", "steps to it", "TRL's time"
    )
    for name, found in results.items():
        key = "seconds_to_goal" if any("seconds_to_goal" in run for run in found["TRL"]) else "seconds_per_step"
        base = _median(found["TRL"], key)
        for contestant, runs in found.items():
            own = _median(runs, key)
            table.add_row(
                name,
                contestant,
                f"{_median(runs, 'seconds_per_step'):.3f}",
                f"{_median(runs, 'tokens_per_s'):,.0f}",
                f"{_median(runs, 'peak_share'):.0%}",
                f"{_median(runs, 'seconds_to_goal'):.1f}" if key == "seconds_to_goal" else "",
                f"{_median(runs, 'steps_to_goal'):.0f}" if key == "seconds_to_goal" else "",
                f"{base / own:.2f} x",
            )
    console.print(table)


def _median(runs: list[dict[str, float]], key: str) -> float:
    found = [run[key] for run in runs if key in run]
    return statistics.median(found) if found else float("nan")


if __name__ == "__main__":
    parser = make_parser("benchmarks.peers", __doc__)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), help="tasks (all)")
    parser.add_argument("--engines", nargs="+", choices=list(_ENGINES), default=["vllm", "hf"], help="ours (vllm hf)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (3)")
    parser.add_argument("--trl", type=Path, default=Path(".venv-trl"), help="TRL's environment (.venv-trl)")
    main(parser.parse_args())
