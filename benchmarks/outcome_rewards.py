"""Answers that PRIME, RLOO, and GRPO need to learn to reverse digits if only entirely correct answers are rewarded.

Each run is on-policy and in one process. The methods have the settings of recipe=prime and differ only in the
advantage. Accuracy is measured on held-out prompts at temperature 1.
"""

import argparse
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.harness import make_parser, make_table, write_result
from benchmarks.staleness.__main__ import prepare_model
from benchmarks.staleness.lagging_run import LaggingRun
from benchmarks.staleness.plans import Plan
from slipstream.configs.load import load
from slipstream.runtime.command_line import fail_cleanly

METHODS = ("prime", "rloo", "grpo")
GOALS = (25, 50, 90)
"""Accuracies, percent."""
_COLUMNS = {
    "method": "{method}",
    "seed": "{seed}",
    **{f"answers to {goal} %": f"{{to_{goal}}}" for goal in GOALS},
    "final accuracy": "{final:.3f}",
    "CPU seconds": "{seconds:.0f}",
}

console = Console(width=120, highlight=False)


@fail_cleanly()
def main(arguments: argparse.Namespace) -> None:
    """Run every method with every seed, then print a table of the runs and one of the medians."""
    model = prepare_model(arguments.folder)
    rows: list[dict[str, Any]] = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, mp_context=spawn) as pool:
        plans = product(arguments.seeds, arguments.methods)
        futures = [pool.submit(run, method, seed, model=model, arguments=arguments) for seed, method in plans]
        for future in as_completed(futures):
            rows.append(future.result())
            write_result(arguments, {"runs": rows})
            console.print({key: value for key, value in rows[-1].items() if key != "points"})
    rows.sort(key=lambda row: (METHODS.index(row["method"]), row["seed"]))
    console.print(make_table(rows, _COLUMNS))
    for method in arguments.methods:
        own = [row for row in rows if row["method"] == method]
        reached = {goal: [row[f"to_{goal}"] for row in own if row[f"to_{goal}"] is not None] for goal in GOALS}
        cells = (
            f"{goal} %: {statistics.median(found):,.0f} ({len(found)} of {len(own)})" if found else f"{goal} %: never"
            for goal, found in reached.items()
        )
        console.print(f"{method}: median answers to {', '.join(cells)}")


def run(method: str, seed: int, *, model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train one model and return the answers generated until each goal, None if it was not reached."""
    torch.set_num_threads(1)
    started_at = time.process_time()
    rate = arguments.learning_rate
    config = load(
        [
            *("experiment=digits_cpu", "recipe=prime", f"algorithm/advantage={method}"),
            *("learner/engine=torch", "learner.device=cpu", f"model.path={model}", f"seed={seed}"),
            *("generators.reward.function=exact_match", "generators.sampling.max_tokens=6"),
            *(f"learner.prompts_per_step={arguments.groups}", f"learner.max_steps={arguments.steps}"),
            *(f"learner.optimizer.learning_rate={rate}", "learner.optimizer.schedule=constant"),
            *("learner.optimizer.warmup_steps=0", "learner.tokens_per_microbatch=4096"),
            f"algorithm.process_reward.optimizer.learning_rate={rate * arguments.model_rate}",
            f"algorithm.process_reward.beta={arguments.beta}",
        ]
    )
    plan = Plan(method, lag=0, replay=0, seed=seed, steps=arguments.steps, groups=arguments.groups, learning_rate=rate)
    trained = LaggingRun(plan, config=config)
    points = list(trained.points(every_steps=arguments.every))
    reached = {goal: next((p.samples for p in points if 100 * p.accuracy >= goal), None) for goal in GOALS}
    return {
        "method": method,
        "seed": seed,
        **{f"to_{goal}": samples for goal, samples in reached.items()},
        "final": points[-1].accuracy,
        "diverged": trained.diverged,
        "seconds": time.process_time() - started_at,
        "points": [(point.samples, point.accuracy) for point in points],
    }


def _parse_arguments() -> argparse.Namespace:
    parser = make_parser("benchmarks.outcome_rewards", __doc__)
    parser.add_argument(
        "--seeds",
        type=lambda text: [int(seed) for seed in text.split(",")],
        default=[0, 1, 2, 3, 4],
        help="(0,1,2,3,4)",
    )
    parser.add_argument("--methods", type=lambda text: text.split(","), default=METHODS, help=f"({','.join(METHODS)})")
    parser.add_argument("--steps", type=int, default=300, help="batches per run (300)")
    parser.add_argument("--groups", type=int, default=32, help="prompts per batch, with eight answers each (32)")
    parser.add_argument("--every", type=int, default=5, help="steps between evaluations (5)")
    parser.add_argument("--learning-rate", type=float, default=1.4e-3, help="constant (1.4e-3)")
    parser.add_argument("--beta", type=float, default=0.05, help="reward per nat of the process reward model (0.05)")
    parser.add_argument(
        "--model-rate", type=float, default=0.1, help="its learning rate, relative to the policy's (0.1)"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes, one thread each (2)")
    parser.add_argument("--folder", type=Path, default=Path("runs/staleness"), help="of the model (runs/staleness)")
    return parser.parse_args()


if __name__ == "__main__":
    main(_parse_arguments())
