"""What lag does to each method: the digits task trained in one process with a generator some versions behind.

    python -m benchmarks.staleness [--lags=0,8] [--methods=none,token_tis] [--seeds=0,1,2] [--steps=240] [--jobs=2]
        [--replay=0,1,3] [--out=runs/staleness] [--plot]

Every finished run is a line of `runs.jsonl` in the folder and is not run again. With --replay, runs without lag that
train again on kept batches take the place of those with lag. Seconds are processor time of generating and training.
"""

import argparse
import json
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import psutil
from rich.console import Console

from benchmarks.staleness.lagging_run import Plan, make_config, run_plan
from benchmarks.staleness.model import model_steps
from benchmarks.staleness.plans import METHODS
from benchmarks.staleness.plot import plot
from benchmarks.staleness.tables import Rows, lag_tables, replay_table
from slipstream.configs.base import ConfigError
from slipstream.configs.load import load
from slipstream.launch.preflight import prepare
from slipstream.runtime.command_line import fail_cleanly

LAGS = (0, 1, 4, 8, 16, 32)
LAG_STEPS, REPLAY_STEPS = 240, 120
REPLAYED_METHODS = ("none", "token_tis")
PICTURE = Path("docs/staleness.png")

console = Console(width=160, highlight=False)


@fail_cleanly()
def main(arguments: argparse.Namespace) -> None:
    """Run what is missing, show all there is."""
    plans = list(make_plans(arguments))
    model = prepare_model(arguments.out)
    for name in dict.fromkeys(plan.method for plan in plans):
        make_config(next(plan for plan in plans if plan.method == name), model=model)
    results = arguments.out / "runs.jsonl"
    done = {plan_of(row) for row in read(results)}
    missing = [plan for plan in plans if plan not in done]
    for number, row in enumerate(run_all(missing, model=model, jobs=arguments.jobs), start=1):
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row | machine()) + "\n")
        console.print(in_words(row), f"[{number} of {len(missing)}]", markup=False)
    show(read(results), arguments)


def make_plans(arguments: argparse.Namespace) -> Iterator[Plan]:
    """Seeds outermost, so that a table fills evenly."""
    methods = arguments.methods or (REPLAYED_METHODS if arguments.replay else tuple(METHODS))
    if unknown := [name for name in methods if name not in METHODS]:
        raise ConfigError(f"--methods must be of {', '.join(METHODS)}, got {', '.join(unknown)}.")
    lags = (0,) if arguments.replay else arguments.lags
    steps = arguments.steps or (REPLAY_STEPS if arguments.replay else LAG_STEPS)
    for seed, lag, replay, method in product(arguments.seeds, lags, arguments.replay or (0,), methods):
        yield Plan(method, lag, replay, seed, steps, arguments.groups, arguments.learning_rate)


def prepare_model(folder: Path) -> str:
    """Make data and model unless they are there; returns the model's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    run = load(["experiment=digits_cpu"])
    data = Path(run.data.train_path).parent
    own = [step for step in run.prepare if Path(step.creates).is_relative_to(data)]
    prepare(msgspec.structs.replace(run, prepare=[*own, *model_steps(folder, data=str(data))]))
    return str(folder / "warm")


def run_all(plans: list[Plan], *, model: str, jobs: int) -> Iterator[dict[str, Any]]:
    """Results as they come, `jobs` processes of one thread at a time."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
        futures = [pool.submit(run_plan, plan, model=model) for plan in plans]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def read(results: Path) -> Rows:
    """Finished runs; a last line cut short by a crash is left out."""
    lines = results.read_text(encoding="utf-8").split("\n")[:-1] if results.is_file() else []
    return [json.loads(line) for line in lines]


def plan_of(row: dict[str, Any]) -> Plan:
    """What a line of the results was run for."""
    return Plan(**{name: row[name] for name in Plan._fields})


def machine() -> dict[str, Any]:
    """What a run shared its processor with."""
    return {"cores": os.cpu_count(), "load_average": psutil.getloadavg()[0]}


def in_words(row: dict[str, Any]) -> str:
    """One line for a finished run."""
    reached = f"0.9 after {row['goal_s']:.0f} s" if row["goal_s"] is not None else "0.9 never"
    plan = f"{row['method']:14s} lag {row['lag']:2d}  replay {row['replay']}  seed {row['seed']}"
    spent = f"{row['generate_s'] + row['train_s']:.0f} s, wall {row['wall_s']:.0f} s"
    return f"{plan}  final {row['final']:.3f}  best {row['best']:.3f}  {reached}  ({spent})"


def show(rows: Rows, arguments: argparse.Namespace) -> None:
    """Tables of all finished runs with the given settings, and the picture."""
    settings = (arguments.groups, arguments.learning_rate)
    rows = [row for row in rows if (row["groups"], row["learning_rate"]) == settings]
    lagging = [row for row in rows if row["steps"] == (arguments.steps or LAG_STEPS) and not row["replay"]]
    replaying = [row for row in rows if row["steps"] == (arguments.steps or REPLAY_STEPS) and not row["lag"]]
    for table in [replay_table(replaying)] if arguments.replay else lag_tables(lagging):
        console.print(table)
    if arguments.plot:
        console.print(str(plot(lagging, replaying, PICTURE)))


def _arguments() -> argparse.Namespace:
    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(number) for number in text.split(","))

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lags", type=numbers, default=LAGS, help="versions behind")
    parser.add_argument("--methods", type=lambda text: tuple(text.split(",")), help=f"of {', '.join(METHODS)} (all)")
    parser.add_argument("--seeds", type=numbers, default=(0, 1, 2))
    parser.add_argument("--steps", type=int, help=f"fresh batches of a run ({LAG_STEPS}, or {REPLAY_STEPS})")
    parser.add_argument("--groups", type=int, default=32, help="prompts of a batch")
    parser.add_argument("--learning-rate", type=float, default=1.4e-3, help="constant; four updates take half")
    parser.add_argument("--replay", type=numbers, default=(), help="replayed batches per fresh one, instead of lags")
    parser.add_argument("--jobs", type=int, default=2, help="processes, one thread each")
    parser.add_argument("--out", type=Path, default=Path("runs/staleness"))
    parser.add_argument("--plot", action="store_true", help=f"draw {PICTURE}")
    return parser.parse_args()


if __name__ == "__main__":
    main(_arguments())
