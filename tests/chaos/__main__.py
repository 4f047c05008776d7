"""`python -m tests.chaos --seed N --kills K`: kill roles of a real run, then compare it with an uninterrupted run."""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from slipstream.runtime.command_line import fail_cleanly
from tests.chaos.harness import Harness
from tests.chaos.matrix import play_matrix
from tests.chaos.outcome import Outcome, Sample, count_samples
from tests.chaos.role import Role
from tests.chaos.stage import PACES, Stage

_START_TIMEOUT_S = 120.0
_SETTLE_TIMEOUT_S = 120.0
_MIN_STEPS = 20
_PROGRESS_EVERY = 25
"""Strikes between two lines of progress."""
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
        outcome, problems = run(stage, harness, console, options)
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
        harness.clear()
    return 1 if problems else 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of the run and of the strikes")
    parser.add_argument("--kills", type=int, default=100, help="processes to end (stops and continues come on top)")
    parser.add_argument("--minutes", type=float, default=30.0, help="time limit of the strikes")
    parser.add_argument("--steps", type=int, default=0, help="steps of the run; 0 = as many as fit between the kills")
    parser.add_argument("--generators", type=int, default=3, help="number of generators")
    parser.add_argument("--engine", choices=list(PACES), default="scripted", help="engine of the generators")
    parser.add_argument("--cold", action="store_true", help="start every role with a fresh interpreter")
    parser.add_argument("--keep", action="store_true", help="keep the run's folder even if the run is sound")
    parser.add_argument("--matrix", action="store_true", help="cause one failure after another instead of strikes")
    parser.add_argument("--only", default="", help="rows of the matrix that match this expression")
    parser.add_argument("--write", action="store_true", help="write the whole matrix to docs/reliability.md")
    return parser.parse_args(arguments)


def run(
    stage: Stage, harness: Harness, console: Console, options: argparse.Namespace
) -> tuple[Outcome | None, list[str]]:
    """Return (outcome, or None if the store could not be read; problems)."""
    problems = []
    stage.build()
    try:
        harness.start(timeout_s=min(_START_TIMEOUT_S, 2 * stage.pace.max_stall_s))
        strikes: Iterable[object] = harness.strike(seed=options.seed, kills=options.kills, minutes=options.minutes)
        if stage.pace.is_light:
            strikes = harness.act(seed=options.seed, kills=options.kills)
        for number, _ in enumerate(strikes, 1):
            if number % _PROGRESS_EVERY == 0:
                console.print(f"{number} strikes, {harness.num_recoveries} recoveries, step {harness.newest_step}")
    except TimeoutError as error:
        problems = [str(error)]
    outcome, later = harness.verdict(timeout_s=_SETTLE_TIMEOUT_S)
    return outcome, problems + later


_PLAIN = {"markup": False, "highlight": False, "soft_wrap": True}


def show(
    console: Console, roles: Iterable[Role], outcome: Outcome | None, problems: list[str], *, stage: Stage
) -> None:
    """Print strikes and recoveries per role, the sums of the store, and every problem."""
    table = Table(*_COLUMNS)
    lines = []
    for role in roles:
        recovery = role.recovery
        durations = ("-" if value is None else f"{value:.2f}" for value in (recovery.median_s, recovery.max_s))
        strikes = (role.strikes[action] for action in ("kill", "terminate", "stop"))
        numbers = (*strikes, role.unexpected_exits.total(), len(recovery.seconds), recovery.num_cut_short)
        table.add_row(role.name, *map(str, numbers), *durations)
        lines += [f"{role.name} exited {times} x: {line}" for line, times in role.unexpected_exits.most_common()]
    console.print(table)
    lines += _sums(outcome, stage.expected(rejected=outcome.num_rejected, skipped=outcome.skipped)) if outcome else []
    lines += [f"problem: {problem}" for problem in problems]
    for line in lines:
        console.print(line, **_PLAIN)


def _sums(outcome: Outcome, expected: Counter[Sample]) -> list[str]:
    counts, audit, trained = outcome.counts, outcome.audit, count_samples(outcome.lineage)
    expected = expected - Counter(outcome.rejected)
    return [
        f"{len(outcome.ledger)} steps; {counts.accepted} trajectories accepted, {counts.duplicates} duplicates, "
        f"{counts.superseded} superseded, refused: {counts.refused or 'none'}",
        f"the surviving weights were trained on {trained.total()} samples ({len(trained)} distinct), "
        f"an uninterrupted run on {expected.total()}: {'the same' if trained == expected else 'not the same'}",
        "accepted = buffered + claimed + used + retired + rejected + expired + quarantined: "
        f"{audit.accepted} = {audit.buffered} + {audit.claimed} + {audit.used} + {audit.retired} + "
        f"{audit.rejected} + {audit.expired} + {audit.quarantined}",
        f"curriculum: {counts.curriculum or 'none'}",
        f"lost={audit.lost} duplicated={audit.duplicated} skipped_prompts={audit.skipped_prompts}",
    ]


if __name__ == "__main__":
    with fail_cleanly():
        sys.exit(main(sys.argv[1:]))
