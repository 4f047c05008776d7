"""Accuracy of each off-policy correction by staleness: the digits task with a lagging generator.

Every finished run is a line of `runs.jsonl` in --out and is not repeated. With --replay, runs have no lag and train
again on stored batches. Seconds are CPU time of generation and training.
"""

import argparse
import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from benchmarks.harness import machine
from benchmarks.staleness.lagging_run import run_plan
from benchmarks.staleness.model import model_steps
from benchmarks.staleness.plans import LAG_STEPS, LAGS, METHODS, REPLAY_STEPS, Plan, make_config, make_plans
from benchmarks.staleness.report import Rows, lag_tables, plot, replay_table
from slipstream.configs.load import load
from slipstream.launch.preflight import prepare
from slipstream.runtime.command_line import fail_cleanly, make_parser

PICTURE = Path("docs/staleness.png")

console = Console(width=160, highlight=False)


@fail_cleanly()
def main(arguments: argparse.Namespace) -> None:
    """Run the missing plans, then report on all finished ones."""
    plans = list(make_plans(arguments))
    model = prepare_model(arguments.out)
    # Check every method's config now instead of after an hour.
    for name in dict.fromkeys(plan.method for plan in plans):
        make_config(next(plan for plan in plans if plan.method == name), model=model)
    results = arguments.out / "runs.jsonl"
    done = {Plan(**{name: row[name] for name in Plan._fields}) for row in read(results)}
    missing = [plan for plan in plans if plan not in done]
    for number, row in enumerate(run_all(missing, model=model, jobs=arguments.jobs), start=1):
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row | machine()) + "\n")
        console.print(describe(row), f"[{number} of {len(missing)}]", markup=False)
    show(read(results), arguments)


def prepare_model(folder: Path) -> str:
    """Create data and model unless they exist; return the model's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    run = load(["experiment=digits_cpu"])
    data = Path(run.data.train_files[0].path).parent
    own = [step for step in run.prepare if Path(step.creates).is_relative_to(data)]
    prepare(msgspec.structs.replace(run, prepare=[*own, *model_steps(folder, data=str(data))]))
    return str(folder / "warm")


def run_all(plans: list[Plan], *, model: str, jobs: int) -> Iterator[dict[str, Any]]:
    """Yield results as they finish, from `jobs` single-threaded processes."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
        futures = [pool.submit(run_plan, plan, model=model) for plan in plans]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def read(results: Path) -> Rows:
    """Read the finished runs, ignoring a last line that a crash cut short."""
    lines = results.read_text(encoding="utf-8").split("\n")[:-1] if results.is_file() else []
    return [json.loads(line) for line in lines]


def describe(row: dict[str, Any]) -> str:
    """Describe a finished run in one line."""
    reached = f"0.9 after {row['goal_s']:.0f} s" if row["goal_s"] is not None else "0.9 never"
    plan = f"{row['method']:14s} lag {row['lag']:2d}  replay {row['replay']}  seed {row['seed']}"
    spent = f"{row['generate_s'] + row['train_s']:.0f} s, wall {row['wall_s']:.0f} s"
    return f"{plan}  final {row['final']:.3f}  best {row['best']:.3f}  {reached}  ({spent})"


def show(rows: Rows, arguments: argparse.Namespace) -> None:
    """Print the tables of all finished runs with the given settings, and draw the plot."""
    settings = (arguments.groups, arguments.learning_rate)
    rows = [row for row in rows if (row["groups"], row["learning_rate"]) == settings]
    lagging = [row for row in rows if row["steps"] == (arguments.steps or LAG_STEPS) and not row["replay"]]
    replaying = [row for row in rows if row["steps"] == (arguments.steps or REPLAY_STEPS) and not row["lag"]]
    for table in [replay_table(replaying)] if arguments.replay else lag_tables(lagging):
        console.print(table)
    if arguments.plot:
        console.print(str(plot(lagging, PICTURE)))


def _parse_arguments() -> argparse.Namespace:
    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(number) for number in text.split(","))

    parser = make_parser("benchmarks.staleness", __doc__)
    parser.add_argument("--lags", type=numbers, default=LAGS, help="versions behind (0,4,8,16)")
    parser.add_argument("--methods", type=lambda text: tuple(text.split(",")), help=f"of {', '.join(METHODS)} (all)")
    parser.add_argument("--seeds", type=numbers, default=(0, 1, 2, 3, 4), help="seeds of each run (0,1,2,3,4)")
    parser.add_argument("--steps", type=int, help=f"fresh batches per run ({LAG_STEPS}, or {REPLAY_STEPS})")
    parser.add_argument("--groups", type=int, default=32, help="prompts per batch (32)")
    parser.add_argument(
        "--learning-rate", type=float, default=1.4e-3, help="constant; halved for four updates (1.4e-3)"
    )
    parser.add_argument("--replay", type=numbers, default=(), help="replayed batches per fresh one, instead of lags")
    parser.add_argument("--jobs", type=int, default=2, help="processes, one thread each (2)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/staleness"), help="folder of the results (runs/staleness)"
    )
    parser.add_argument("--plot", action="store_true", help=f"draw {PICTURE} of the runs with lag")
    return parser.parse_args()


if __name__ == "__main__":
    main(_parse_arguments())
