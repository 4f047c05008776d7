"""`python -m tests.chaos --seed N --kills K`: kill roles of a real run, then compare it with an uninterrupted run."""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from slipstream.runtime.command_line import fail_cleanly
from tests.chaos.harness import Harness
from tests.chaos.matrix import play_matrix
from tests.chaos.outcome import Outcome, count_samples
from tests.chaos.role import Role
from tests.chaos.stage import PACES, Stage

_START_TIMEOUT_S = 120.0
_SETTLE_TIMEOUT_S = 120.0
_MIN_STEPS = 20
_PROGRESS_EVERY = 25
_COLUMNS = ("role", "SIGKILL", "SIGTERM", "SIGSTOP", "own exits", "recoveries", "cut short", "median s", "max s")


def main(arguments: Sequence[str]) -> int:
    """Run chaos for a seed; return exit code 0 if the outcome equals that of an uninterrupted run."""
    # The process that forks all roles inherits it, because they share few cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = parse(arguments)
    if options.matrix:
        return play_matrix(only=options.only, write=options.write)
    console = Console(width=120)
    pace = PACES[options.engine]
    steps = options.steps or max(_MIN_STEPS, pace.steps_per_kill * options.kills)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    stage = Stage(folder, seed=options.seed, steps=steps, pace=pace)
    harness = Harness(stage, num_generators=options.generators, is_cold=options.cold)
    console.print(f"seed={options.seed} kills={options.kills} steps={steps} engine={options.engine} folder={folder}")
    started_at = time.monotonic()
    try:
        stage.build()
        problems = strike(harness, console, options)
        outcome, later = harness.verdict(timeout_s=_SETTLE_TIMEOUT_S)
        problems += later
    finally:
        harness.end()
    show(console, harness.roles.values(), outcome, problems, stage=stage)
    if harness.missed_acts:
        console.print(f"not reached in time: {', '.join(harness.missed_acts)}", **_PLAIN)
    seconds = time.monotonic() - started_at
    verdict = f"{len(problems)} problems" if problems else "sound"
    strikes = sum((role.strikes for role in harness.roles.values()), Counter())
    kills = strikes["kill"] + strikes["terminate"]
    console.print(f"seed={options.seed} {kills=} stops={strikes['stop']} {seconds=:.0f} verdict: {verdict}", **_PLAIN)
    if not problems and not options.keep:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if problems else 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m tests.chaos", description=__doc__)
    add = parser.add_argument
    add("--seed", type=int, default=0, help="seed of the run and of the strikes")
    add("--kills", type=int, default=100, help="processes to end (stops and continues come on top)")
    add("--minutes", type=float, default=30.0, help="time limit of the strikes")
    add("--steps", type=int, default=0, help="steps of the run; 0 = as many as fit between the kills")
    add("--generators", type=int, default=3, help="number of generators")
    add("--engine", choices=list(PACES), default="scripted", help="engine of the generators")
    add("--cold", action="store_true", help="start every role with a fresh interpreter")
    add("--keep", action="store_true", help="keep the run's folder even if the run is sound")
    add("--matrix", action="store_true", help="cause one failure after another instead of strikes")
    add("--only", default="", help="rows of the matrix that match this expression")
    add("--write", action="store_true", help="write the whole matrix to docs/reliability.md")
    return parser.parse_args(arguments)


def strike(harness: Harness, console: Console, options: argparse.Namespace) -> list[str]:
    pace = harness.stage.pace
    try:
        harness.start(timeout_s=min(_START_TIMEOUT_S, 2 * pace.max_stall_s))
        strikes: Iterable[object] = harness.strike(seed=options.seed, kills=options.kills, minutes=options.minutes)
        if pace.is_light:
            strikes = harness.act(seed=options.seed, kills=options.kills)
        for number, _ in enumerate(strikes, 1):
            if number % _PROGRESS_EVERY == 0:
                recoveries = sum(len(role.recovery.seconds) for role in harness.roles.values())
                console.print(f"{number} strikes, {recoveries} recoveries, step {harness.newest_step}")
    except TimeoutError as error:
        return [str(error)]
    return []


_PLAIN = {"markup": False, "highlight": False, "soft_wrap": True}


def show(
    console: Console, roles: Iterable[Role], outcome: Outcome | None, problems: list[str], *, stage: Stage
) -> None:
    """Print strikes and recoveries per role, the sums of the store, and every problem."""
    table = Table(*_COLUMNS)
    lines = []
    for role in roles:
        recovery = role.recovery
        seconds = recovery.seconds
        durations = (f"{median(seconds):.2f}", f"{max(seconds):.2f}") if seconds else ("-", "-")
        strikes = (role.strikes[action] for action in ("kill", "terminate", "stop"))
        numbers = (*strikes, role.unexpected_exits.total(), len(seconds), recovery.num_cut_short)
        table.add_row(role.name, *map(str, numbers), *durations)
        lines += [f"{role.name} exited {times} x: {line}" for line, times in role.unexpected_exits.most_common()]
    console.print(table)
    if outcome:
        counts, audit, trained = outcome.counts, outcome.audit, count_samples(outcome.lineage)
        expected = stage.expected(rejected=outcome.num_rejected, skipped=outcome.skipped) - Counter(outcome.rejected)
        comparison = "the same" if trained == expected else "not the same"
        lines += [
            f"{len(outcome.ledger)} steps; {counts.accepted} trajectories accepted, {counts.duplicates} duplicates, "
            f"{counts.superseded} superseded, refused: {counts.refused or 'none'}",
            f"the surviving weights were trained on {trained.total()} samples ({len(trained)} distinct), "
            f"an uninterrupted run on {expected.total()}: {comparison}",
            f"curriculum: {counts.curriculum or 'none'}",
            f"{audit}",
            f"lost={audit.lost} duplicated={audit.duplicated} skipped_prompts={audit.skipped_prompts}",
        ]
    lines += [f"problem: {problem}" for problem in problems]
    for line in lines:
        console.print(line, **_PLAIN)


if __name__ == "__main__":
    with fail_cleanly():
        sys.exit(main(sys.argv[1:]))
