"""StepTimes: where the wall time of a step went, role by role, from the time accounts that the roles report."""

from collections.abc import Mapping
from typing import Any

import msgspec

from slipstream.broker.status.role_status import Roles, number_of
from slipstream.buffer.trajectory import Record

PHASES = {
    "learner": {
        "waiting": "waiting for trajectories",
        "batch": "preparing batches",
        "compute": "forward and backward",
        "optimizer": "optimizer",
        "publishing": "publishing",
        "committing": "committing",
        "evaluating": "evaluating",
        "checkpoint": "checkpoints",
        "rest": "rest",
    },
    "generator": {
        "working": "engine at work",
        "prompts": "waiting for prompts",
        "updating": "updating weights",
        "store": "blocked by the store",
        "rest": "rest",
    },
    "broker": {"routing": "routing", "storing": "storing", "waiting": "idle"},
    "store": {"busy": "busy"},
}
"""Role -> phase of its TimeAccount -> words. A phase that is not here, such as a start, counts for nothing."""
_LEAST_SHARE = 0.005
_ALIKE = 0.1
"""Difference of the shares in which both sides wait, up to which neither is called the slower one."""

Counter = tuple[str, str, str]
"""Role, name of its process, gauge: ("generator", "generator-0", "time/working")."""


class RoleTimes(Record):
    """All processes of a role together.

    Example: RoleTimes(role="generator", count=2, shares={"working": 0.7, "prompts": 0.3}, cpu_s=0.49)
    """

    role: str
    count: int
    """Number of processes that reported."""
    shares: dict[str, float]
    """Phase -> share of the wall time of these processes; all of them sum to 1, but for the store."""
    cpu_s: float
    """Processor seconds for each step, of all of them and their children."""


class StepTimes(Record):
    """Wall time of the mean step. Example: StepTimes(steps=80, step_s=0.46, roles=[RoleTimes(...), ...])."""

    steps: int
    step_s: float
    """Seconds from one step to the next: the learner's phases sum to it."""
    roles: list[RoleTimes]
    """Those that reported, the learner first."""

    def share(self, role: str, phase: str) -> float:
        """Return a share; 0 for a role that did not report."""
        return self.shares(role).get(phase, 0.0)

    def shares(self, role: str) -> dict[str, float]:
        """Return the shares of a role by phase; none if it did not report."""
        return next((each.shares for each in self.roles if each.role == role), {})


def time_counters(roles: Roles) -> dict[Counter, float]:
    """Return what the roles report of their time; the broker reports the store's."""
    found: dict[Counter, float] = {}
    for name, gauges in roles.items():
        kind = str(gauges.get("role", ""))
        keys = ["cpu_s", *(f"time/{phase}" for phase in PHASES.get(kind, ()))]
        found |= {(kind, name, key): value for key in keys if (value := number_of(gauges, key)) is not None}
        if kind == "broker" and (seconds := number_of(gauges, "store_cpu_s")) is not None:
            # Of several brokers that report the one store, a dead one's report is the oldest.
            found["store", "store", "cpu_s"] = max(seconds, found.get(("store", "store", "cpu_s"), 0.0))
    return {counter: value for counter, value in found.items() if counter[0] in PHASES}


def make_step_times(grown: Mapping[Counter, float], *, steps: int) -> StepTimes:
    """Divide what the counters have grown by over the steps of that time."""
    roles, num_steps = [], max(1, steps)
    wall_s = sum(value for (kind, _, key), value in grown.items() if kind == "learner" and key != "cpu_s")
    for kind, phases in PHASES.items():
        own = {counter: value for counter, value in grown.items() if counter[0] == kind}
        sums = {phase: sum(own[each] for each in own if each[2] == f"time/{phase}") for phase in phases}
        cpu_s = sum(value for (_, _, key), value in own.items() if key == "cpu_s")
        total = wall_s if kind == "store" else sum(sums.values())
        if kind == "store":
            sums = {"busy": cpu_s}
        if own and total:
            shares = {phase: round(value / total, 4) for phase, value in sums.items()}
            roles.append(RoleTimes(kind, len({name for _, name, _ in own}), shares, cpu_s / num_steps))
    return StepTimes(steps, wall_s / num_steps, roles)


def describe_times(times: dict[str, Any] | None) -> list[str]:
    """Format StepTimes, as a row of metrics or the summary holds them, as the lines of a table; empty without any."""
    if not times:
        return []
    found = msgspec.convert(times, StepTimes)
    lines = [f"where the wall time went: {found.steps} steps of {found.step_s:.3g} s"]
    lines.append(f"{'':12}{'processor':>11}   share of its wall time")
    for each in found.roles:
        name = each.role if each.count == 1 else f"{each.count} {each.role}s"
        shown = sorted(((share, phase) for phase, share in each.shares.items() if share >= _LEAST_SHARE), reverse=True)
        text = ", ".join(f"{share:.0%} {PHASES[each.role][phase]}" for share, phase in shown)
        lines.append(f"{name:12}{f'{each.cpu_s:.3f} s':>11}   {text or 'idle'}")
    return [*lines, _slower_side(found)]


def _slower_side(times: StepTimes) -> str:
    learner, generators = times.share("learner", "waiting"), times.share("generator", "prompts")
    if not times.shares("generator"):
        return f"the learner waits {learner:.0%} of its time for trajectories; no generator has reported its time"
    both = f"the learner waits {learner:.0%} of its time for trajectories, the generators {generators:.0%} for prompts"
    if learner - generators > _ALIKE:
        return f"{both}: generating is the slower side"
    return f"{both}: training is the slower side" if generators - learner > _ALIKE else both
