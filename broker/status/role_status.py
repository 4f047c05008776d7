"""RoleStatus: how one role of a run is, from what was last reported of it."""

from typing import Any, Literal

from slipstream.buffer.trajectory import Record
from slipstream.configs.run import RunConfig

Liveness = Literal["alive", "silent", "gone"]
"""Reported of lately | not reported of for `broker.peer_timeout_s`: dead, or it cannot reach the store | has left."""

Roles = dict[str, dict[str, Any]]
"""Newest gauges by name, as the store gives them."""

LAUNCHER = "launcher"
"""Name of the launcher among the roles."""


WaitsFor = Literal["", "groups", "evaluation", "weights", "transfer", "prompts", "store", "disk"]
"""What a role says of itself in the gauge `waits_for`: nothing | groups to train on | answers of an evaluation | that
weights are published | that they arrive | prompts | room in the store, or the store itself | room on the disk."""


class RoleStatus(Record):
    """One role.

    Example: RoleStatus(name="generator-0", role="generator", liveness="alive", state="ready", report_age_s=0.4,
        progress_age_s=0.4, reason="", host="node-3", pid=4711, version=12, version_lag=1, tokens_per_s=5210.0,
        running=96, capacity=128, rewards_failed=0, restarts=0)
    """

    name: str
    """Unique in the run."""
    role: str
    """generator, learner, broker, archiver, launcher."""
    liveness: Liveness
    """Whether it lives, as far as the store can tell."""
    state: str
    """What it said of itself last."""
    report_age_s: float
    """Since it was last reported of, seconds."""
    progress_age_s: float | None
    """Since it last got any further, seconds; None for a role that has no such number."""
    reason: str
    """What it does, or what it waits for; of one that is gone: why."""
    waits_for: str = ""
    """See WaitsFor; empty when it does something, and of one that does not say."""
    host: str | None = None
    """Where it runs; None when it does not say."""
    pid: int | None = None
    """Its process there."""
    version: int | None = None
    """Policy version it holds; None before the first, and for roles without one."""
    version_lag: int | None = None
    """Of a generator: versions announced since that one."""
    tokens_per_s: float | None = None
    """Generated, or trained on."""
    running: int | None = None
    """Of a generator: trajectories under way."""
    capacity: int | None = None
    """Of a generator: trajectories it runs together at most."""
    rewards_failed: int | None = None
    """Of a generator: its trajectories whose reward function did not answer."""
    restarts: int | None = None
    """By the launcher; None where it looks after no such role."""

    @property
    def is_alive(self) -> bool:
        """Whether it was reported of lately."""
        return self.liveness == "alive"


def role_statuses(roles: Roles, *, run: RunConfig, now: float, announced_version: int) -> list[RoleStatus]:
    """Every role that ever reported: roles of one process first, then generators, by name."""
    restarts = roles.get(LAUNCHER, {}).get("restarts", {})
    statuses = [
        _role_status(name, gauges, run=run, now=now, announced_version=announced_version, restarts=restarts.get(name))
        for name, gauges in roles.items()
    ]
    return sorted(statuses, key=lambda each: (each.role == "generator", each.name))


def _role_status(
    name: str, gauges: dict[str, Any], *, run: RunConfig, now: float, announced_version: int, restarts: int | None
) -> RoleStatus:
    age_s = max(0.0, now - gauges["reported_at"])
    progressed_at = gauges.get("progressed_at")
    version = _version(gauges)
    is_generator = gauges.get("role") == "generator"
    is_here = gauges.get("state") != "gone"
    return RoleStatus(
        name=name,
        role=str(gauges.get("role", "")),
        liveness=_liveness(gauges, age_s=age_s, timeout_s=run.broker.peer_timeout_s),
        state=str(gauges.get("state", "")),
        report_age_s=age_s,
        progress_age_s=None if progressed_at is None else max(0.0, now - progressed_at),
        reason=str(gauges.get("reason", "")),
        waits_for=str(gauges.get("waits_for", "")) if is_here else "",
        host=gauges.get("host"),
        pid=gauges.get("pid"),
        version=version,
        version_lag=announced_version - version if is_generator and version is not None else None,
        tokens_per_s=_number(gauges, "tokens_per_s"),
        running=_count(gauges, "running"),
        capacity=_capacity(gauges, run) if is_generator and is_here else None,
        rewards_failed=_count(gauges, "rewards_failed"),
        restarts=restarts,
    )


def _liveness(gauges: dict[str, Any], *, age_s: float, timeout_s: float) -> Liveness:
    if gauges.get("state") == "gone":
        return "gone"
    return "alive" if age_s <= timeout_s else "silent"


def _capacity(gauges: dict[str, Any], run: RunConfig) -> int:
    """Its own where it tells it, else what the run's settings give each."""
    return _count(gauges, "max_concurrency") or run.generators.max_concurrency


def _number(gauges: dict[str, Any], name: str) -> float | None:
    """What peers say of themselves may be anything plain."""
    value = gauges.get(name)
    return value if isinstance(value, int | float) else None


def _count(gauges: dict[str, Any], name: str) -> int | None:
    value = _number(gauges, name)
    return None if value is None else int(value)


def _version(gauges: dict[str, Any]) -> int | None:
    """-1 is how a peer says that it holds none yet."""
    version = gauges.get("version", -1)
    return version if version >= 0 else None
