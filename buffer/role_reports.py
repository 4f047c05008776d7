"""Role reports: the status of each role, and where the time of steps goes.

Only peers with the run's token can report (slipstream/runtime/credentials.py).
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from slipstream.configs.base import Record
from slipstream.configs.run import RunConfig

Liveness = Literal["alive", "silent", "gone"]
"""Reported recently | no report for `broker.peer_timeout_s` | has left."""

Roles = dict[str, dict[str, Any]]
"""Role name -> latest gauges, from `Store.roles`."""

LAUNCHER = "launcher"
LEARNER = "learner"

PROBLEM_PREFIX = "problem/"
"""Prefix of generators' gauges that describe the first failure of each kind; a hash follows."""

WaitsFor = Literal[
    "", "groups", "evaluation", "weights", "transfer", "prompts", "agents", "store", "disk", "storage", "user"
]
"""Gauge `waits_for`: nothing | groups to train on | evaluation answers | publication of weights | their transfer |
prompts | external agents | the store, or room in it | disk space, or a writable archive | the object store |
`slipstream pause --off`.
"""


class RoleStatus(Record):
    """Status of one role.

    Example: RoleStatus(name="generator-0", role="generator", liveness="alive", state="ready", report_age_s=0.4,
        progress_age_s=0.4, reason="", host="node-3", pid=4711, version=12, version_lag=1, tokens_per_s=5210.0,
        running=96, capacity=128, rewards_failed=0, restarts=0)
    """

    name: str
    """Unique within the run."""
    role: str
    """generator | learner | broker | archiver | launcher | logger."""
    liveness: Liveness
    state: str
    report_age_s: float
    progress_age_s: float | None
    """Seconds since the last progress; None without progress gauges."""
    reason: str
    """Current activity, reason for waiting, or why it left."""
    waits_for: str = ""
    """WaitsFor; empty if working or not reported."""
    host: str | None = None
    pid: int | None = None
    version: int | None = None
    """Policy version it holds; None before the first, or without weights."""
    version_lag: int | None = None
    """Generators: versions announced since."""
    tokens_per_s: float | None = None
    """Generated or trained on."""
    running: int | None = None
    """Generators: trajectories in progress."""
    capacity: int | None = None
    """Generators: maximum of `running`."""
    rewards_failed: int | None = None
    """Generators: trajectories with a failed reward function."""
    restarts: int | None = None
    """By the launcher; None if it does not run this role."""
    kv_usage: float | None = None
    """Generators: fraction of the engine's KV cache in use."""
    preemptions: int | None = None
    """Generators: requests preempted because the KV cache was full."""
    is_chief: bool = False
    """Brokers: whether it is the chief (`store_rules`)."""
    broker: str | None = None
    """Generators: their broker; None if the run has only one."""

    @property
    def is_alive(self) -> bool:
        return self.liveness == "alive"


def role_statuses(roles: Roles, *, run: RunConfig, now: float, announced_version: int) -> list[RoleStatus]:
    """Status of every stored role, generators last, each by name."""
    restarts = roles.get(LAUNCHER, {}).get("restarts", {})
    statuses = [
        _role_status(name, gauges, run=run, now=now, announced_version=announced_version, restarts=restarts.get(name))
        for name, gauges in roles.items()
    ]
    return sorted(statuses, key=lambda each: (each.role == "generator", each.name))


def _role_status(
    name: str, gauges: dict[str, Any], *, run: RunConfig, now: float, announced_version: int, restarts: int | None
) -> RoleStatus:
    # Negative if the store's clock was set back since the report.
    age_s = abs(now - gauges["reported_at"])
    progressed_at = number_of(gauges, "progressed_at")
    # Peers without a version report -1.
    version = held if (held := gauges.get("version", -1)) >= 0 else None
    is_generator = gauges.get("role") == "generator"
    has_left = gauges.get("state") == "gone"
    # A generator reports its limit once its engine has started.
    capacity = _count(gauges, "max_concurrency") or run.generators.max_concurrency
    shown: dict[str, Any] = {key: str(gauges.get(key, "")) for key in ("role", "state", "reason")}
    shown |= {key: gauges.get(key) for key in ("host", "pid", "broker")}
    shown |= {key: number_of(gauges, key) for key in ("tokens_per_s", "kv_usage")}
    shown |= {key: _count(gauges, key) for key in ("running", "rewards_failed", "preemptions")}
    return RoleStatus(
        name=name,
        liveness="gone" if has_left else "alive" if age_s <= run.broker.peer_timeout_s else "silent",
        report_age_s=age_s,
        progress_age_s=None if progressed_at is None else max(0.0, now - progressed_at),
        waits_for="" if has_left else str(gauges.get("waits_for", "")),
        version=version,
        version_lag=announced_version - version if is_generator and version is not None else None,
        capacity=capacity if is_generator and not has_left else None,
        restarts=restarts,
        is_chief=gauges.get("is_chief") is True,
        **shown,
    )


def last_heard(roles: list[RoleStatus], role: str) -> RoleStatus | None:
    """Role of this kind with the latest report, if any."""
    return min((each for each in roles if each.role == role), key=lambda each: each.report_age_s, default=None)


def number_of(gauges: dict[str, Any], name: str) -> float | None:
    """Gauge if it is a finite number: peers may report any plain value."""
    value = gauges.get(name)
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _count(gauges: dict[str, Any], name: str) -> int | None:
    value = number_of(gauges, name)
    return None if value is None else int(value)


# --- step times -------------------------------------------------------------------------------------------------------
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
"""Role -> counted phase of its TimeAccount -> description."""
_LEAST_SHARE = 0.005
_ALIKE = 0.1
"""Largest difference of wait shares without a slower side."""

Counter = tuple[str, str, str]
"""(role, process name, gauge): ("generator", "generator-0", "time/working")."""


class RoleTimes(Record):
    """All processes of a role combined.

    Example: RoleTimes(role="generator", count=2, shares={"working": 0.7, "prompts": 0.3}, cpu_s=0.49)
    """

    role: str
    count: int
    shares: dict[str, float]
    """Phase -> fraction of wall time; sums to 1, except for the store."""
    cpu_s: float
    """Per step, of all processes and their children."""


class StepTimes(Record):
    """Wall time of the mean step. Example: StepTimes(steps=80, step_s=0.46, roles=[RoleTimes(...), ...])."""

    steps: int
    step_s: float
    """The sum of the learner's phases."""
    roles: list[RoleTimes]
    """Times of each role, the learner's first."""

    def share(self, role: str, phase: str) -> float:
        return self.shares(role).get(phase, 0.0)

    def shares(self, role: str) -> dict[str, float]:
        return next((each.shares for each in self.roles if each.role == role), {})


def time_counters(roles: Roles) -> dict[Counter, float]:
    """Roles' time counters. The broker reports the store's."""
    found: dict[Counter, float] = {}
    for name, gauges in roles.items():
        kind = str(gauges.get("role", ""))
        keys = ["cpu_s", *(f"time/{phase}" for phase in PHASES.get(kind, ()))]
        found |= {(kind, name, key): value for key in keys if (value := number_of(gauges, key)) is not None}
        if kind == "broker" and (seconds := number_of(gauges, "store_cpu_s")) is not None:
            # Several brokers report it; a dead one's report is out of date.
            found["store", "store", "cpu_s"] = max(seconds, found.get(("store", "store", "cpu_s"), 0.0))
    return {counter: value for counter, value in found.items() if counter[0] in PHASES}


def make_step_times(grown: Mapping[Counter, float], *, steps: int) -> StepTimes:
    """Compute the mean step from the growth of the counters over `steps` steps."""
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
    """Format StepTimes, as stored in a metrics row, as table lines; empty without any."""
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
    learner, generators = found.share("learner", "waiting"), found.share("generator", "prompts")
    verdict = f"the learner waits {learner:.0%} of its time for trajectories"
    if not found.shares("generator"):
        return [*lines, f"{verdict}; no generator has reported its time"]
    verdict += f", the generators {generators:.0%} for prompts"
    if abs(learner - generators) > _ALIKE:
        verdict += f": {'generating' if learner > generators else 'training'} is the slower side"
    return [*lines, verdict]
