"""Start and end of a run: the stages that its roles have recorded, and the time that each took."""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from slipstream.buffer.role_reports import LAUNCHER, LEARNER
from slipstream.configs.base import ConfigError, Record
from slipstream.observe.finding import Answer, Finding
from slipstream.runtime.run_folder import STAGES

_LONGEST = 3
_STARTED = "process started"


class Stage(Record):
    """A moment of a role's start or end. Example: Stage(1763718000.25, "generator-0", 4711, "engine built")."""

    at: float
    """Seconds since 1970, on the clock of the role's machine."""
    role: str
    pid: int
    stage: str
    """What has just ended, such as `libraries loaded`, or begun, such as `training`."""


class Part(Record):
    """A stage and the time since the one before it in its process, seconds."""

    stage: Stage
    at_s: float
    """Since the first stage."""
    took_s: float
    """0 for the first stage of a process."""


def read_stages(folder: Path) -> list[Stage]:
    """Return the stages of the newest launch in a run folder, oldest first, without damaged lines."""
    stages = []
    path = folder / STAGES
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with suppress(msgspec.DecodeError):
            stages.append(msgspec.json.decode(line, type=Stage))
    launches = [each.at for each in stages if (each.role, each.stage) == (LAUNCHER, _STARTED)]
    # Without a launcher, the roles are started by hand, in any order.
    return sorted((each for each in stages if each.at >= max(launches, default=0.0)), key=lambda each: each.at)


def parts(stages: Sequence[Stage]) -> Iterator[Part]:
    """Yield each stage with its times. Takes stages in the order of time."""
    before: dict[tuple[str, int], float] = {}
    for each in stages:
        process = each.role, each.pid
        yield Part(each, each.at - stages[0].at, each.at - before.get(process, each.at))
        before[process] = each.at


def explain_start(stages: Sequence[Stage]) -> Answer:
    """Return a run's timeline. Raises ConfigError without stages."""
    if not stages:
        raise ConfigError(f"the run folder must have {STAGES}, which roles on its machine write, but has none.")
    found = list(parts(stages))
    training = _span(found, "training", "trained")
    # The stages that span training wait for it.
    began, ended = training or (math.inf, math.inf)
    outside = [part for part in found if part.at_s <= began or part.at_s - part.took_s >= ended]
    longest = sorted(outside, key=lambda part: -part.took_s)[:_LONGEST]
    return Answer(
        headline=_headline(found, training),
        findings=[
            Finding(f"{part.stage.role}/{part.stage.stage}", f"{part.took_s:.1f} s, until {part.at_s:.1f} s")
            for part in longest
            if part.took_s > 0
        ],
        facts=[
            "   at, s   took, s  role          stage",
            *(f"{p.at_s:8.2f}  {p.took_s:8.2f}  {p.stage.role:<12}  {p.stage.stage}" for p in found),
        ],
        note="A stage includes waits for other roles. Generators on other machines are not listed.",
    )


def _span(found: Sequence[Part], first: str, last: str) -> tuple[float, float] | None:
    times = {part.stage.stage: part.at_s for part in found if part.stage.role == LEARNER}
    return (times[first], times[last]) if first in times and last in times else None


def _headline(found: Sequence[Part], training: tuple[float, float] | None) -> str:
    whole = found[-1].at_s
    if training is None:
        return f"{whole:.1f} s after the start, the newest stage is: {found[-1].stage.stage}."
    began, ended = training
    return (
        f"Training began {began:.1f} s after the start and took {ended - began:.1f} s; {whole - ended:.1f} s "
        f"followed: {whole - ended + began:.1f} s outside of training."
    )
