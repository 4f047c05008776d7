"""The command: one tormented run from its seed to its verdict."""

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from slipstream.buffer.errors import ReplayBufferError
from tests.chaos.books import Books, find_faults
from tests.chaos.harness import Harness
from tests.chaos.pace import PACES
from tests.chaos.report import Report
from tests.chaos.stage import Stage
from tests.chaos.strikes import draw_strikes

_START_S = 120.0
_SETTLE_S = 120.0
_MIN_STEPS = 20
_SAY_EVERY = 25
"""Strikes between two lines of progress."""


def run(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0 when the books of the run are those of an uninterrupted one."""
    options = _parse(arguments)
    console = Console(width=120)
    pace = PACES[options.engine]
    steps = options.steps or max(_MIN_STEPS, pace.steps_per_kill * options.kills)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    stage = Stage(folder, seed=options.seed, steps=steps, pace=pace)
    harness = Harness(stage, num_generators=options.generators, is_cold=options.cold)
    console.print(f"seed={options.seed} kills={options.kills} steps={steps} engine={options.engine} folder={folder}")
    report = Report(console, harness.roles)
    started_at = time.monotonic()
    try:
        books, faults = _live_through(stage, harness, console, options)
    finally:
        harness.end()
    report.show(books, faults, wanted=stage.wanted, seed=options.seed, seconds=time.monotonic() - started_at)
    if not faults and not options.keep:
        harness.clear()
    return 1 if faults else 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the run and of the strikes")
    parser.add_argument("--kills", type=int, default=100, help="processes to end (stops and continues come on top)")
    parser.add_argument("--minutes", type=float, default=30.0, help="longest time for them")
    parser.add_argument("--steps", type=int, default=0, help="of the run; 0 = about as many as fit between the kills")
    parser.add_argument("--generators", type=int, default=3, help="number of generators")
    parser.add_argument("--engine", choices=list(PACES), default="scripted", help="of the generators")
    parser.add_argument("--cold", action="store_true", help="start every role with a fresh interpreter")
    parser.add_argument("--keep", action="store_true", help="keep the run's folder also when all is well")
    return parser.parse_args(arguments)


def _live_through(
    stage: Stage, harness: Harness, console: Console, options: argparse.Namespace
) -> tuple[Books | None, list[str]]:
    """The whole life of the run; what its books say, if it left any, and what is wrong with it."""
    late = []
    stage.build()
    try:
        harness.start(timeout_s=_START_S)
        _torment(harness, console, options, longest_gap_s=stage.pace.longest_gap_s)
        harness.settle(timeout_s=_SETTLE_S)
    except TimeoutError as error:
        late = [str(error)]
    try:
        books = harness.books()
    except ReplayBufferError as fault:
        return None, [*late, str(fault)]
    return books, [*late, *harness.crashes, *find_faults(books, steps=stage.steps, wanted=stage.wanted)]


def _torment(harness: Harness, console: Console, options: argparse.Namespace, *, longest_gap_s: float) -> None:
    strikes = draw_strikes(
        seed=options.seed, kills=options.kills, generators=harness.generators, longest_gap_s=longest_gap_s
    )
    for number, _ in enumerate(harness.torment(strikes, minutes=options.minutes), start=1):
        if number % _SAY_EVERY == 0:
            console.print(f"{number} strikes, {harness.num_recoveries} recoveries, step {harness.newest_step}")
