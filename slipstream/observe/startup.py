"""Start and end of a run: recorded stages of its roles, and their times."""

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from slipstream.buffer.role_reports import LAUNCHER, LEARNER
from slipstream.configs.base import ConfigError, Record
from slipstream.observe.finding import Answer, Finding
from slipstream.runtime.run_folder import STAGES

_LONGEST = 3


class Stage(Record):
    """A moment of a role's start or end. Example: Stage(1763718000.25, "generator-0", 4711, "engine built")."""

    at: float
    """Seconds since 1970, on the clock of the role's machine."""
    role: str
    pid: int
    stage: str
    """End of a stage, such as `libraries loaded`, or a beginning, such as `training`."""


def read_stages(folder: Path) -> list[Stage]:
    """Stages of the newest launch in a run folder, oldest first, without damaged lines."""
    stages, path = [], folder / STAGES
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with suppress(msgspec.DecodeError):
            stages.append(msgspec.json.decode(line, type=Stage))
    # Without a launcher, the roles are started by hand, in any order.
    launched_at = max((s.at for s in stages if (s.role, s.stage) == (LAUNCHER, "process started")), default=0.0)
    return sorted((each for each in stages if each.at >= launched_at), key=lambda each: each.at)


def explain_start(stages: Sequence[Stage]) -> Answer:
    """Return a run's timeline. Raises ConfigError without stages."""
    if not stages:
        raise ConfigError(f"the run folder must have {STAGES}, which roles on its machine write, but has none.")
    first, last = stages[0].at, stages[-1].at
    times = {each.stage: each.at for each in stages if each.role == LEARNER}
    began, ended = times.get("training", math.inf), times.get("trained", math.inf)
    headline = f"{last - first:.1f} s after the start, the newest stage is: {stages[-1].stage}."
    if ended < math.inf:
        headline = (
            f"Training began {began - first:.1f} s after the start and took {ended - began:.1f} s; {last - ended:.1f} "
            f"s followed: {last - ended + began - first:.1f} s outside of training."
        )
    facts, outside = ["   at, s   took, s  role          stage"], []
    before: dict[tuple[str, int], float] = {}
    for each in stages:
        since = before.get((each.role, each.pid), each.at)
        before[each.role, each.pid] = each.at
        facts.append(f"{each.at - first:8.2f}  {each.at - since:8.2f}  {each.role:<12}  {each.stage}")
        # The stages that span training wait for it.
        if since < each.at and (each.at <= began or since >= ended):
            figures = f"{each.at - since:.1f} s, until {each.at - first:.1f} s"
            outside.append((since - each.at, Finding(f"{each.role}/{each.stage}", figures)))
    longest = [finding for _, finding in sorted(outside, key=lambda pair: pair[0])[:_LONGEST]]
    note = "A stage includes waits for other roles. Generators on other machines are not listed."
    return Answer(headline, longest, facts, note)
