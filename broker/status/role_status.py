"""RoleStatus: status of one role of a run, from its last report."""

import math
from typing import Any, Literal

from slipstream.buffer.trajectory import Record
from slipstream.configs.run import RunConfig

Liveness = Literal["alive", "silent", "gone"]
"""Reported recently | no report for `broker.peer_timeout_s`: dead, or cut off from the store | has left."""

Roles = dict[str, dict[str, Any]]
"""Newest gauges by the name of the role, as the store returns them."""

LAUNCHER = "launcher"
"""Name of the launcher among the roles."""

WaitsFor = Literal[
    "", "groups", "evaluation", "weights", "transfer", "prompts", "agents", "store", "disk", "storage", "user"
]
"""Gauge `waits_for` of a role: nothing | groups to train on | answers of an evaluation | the publication of weights |
their transfer | prompts | agents outside | room in the store, or the store itself | room on the disk, or an archive
folder that can be written | the object store | `slipstream pause --off`."""


class RoleStatus(Record):
    """Status of one role.

    Example: RoleStatus(name="generator-0", role="generator", liveness="alive", state="ready", report_age_s=0.4,
        progress_age_s=0.4, reason="", host="node-3", pid=4711, version=12, version_lag=1, tokens_per_s=5210.0,
        running=96, capacity=128, rewards_failed=0, restarts=0)
    """

    name: str
    """Name, unique in the run."""
    role: str
    """generator | learner | broker | archiver | launcher | logger."""
    liveness: Liveness
    state: str
    report_age_s: float
    """Seconds since the last report."""
    progress_age_s: float | None
    """Seconds since its last progress; None for a role without a progress counter."""
    reason: str
    """Current activity or cause of the wait; for a role that is gone, why it left."""
    waits_for: str = ""
    """WaitsFor; empty if it works or does not report it."""
    host: str | None = None
    """Host name; None if not reported."""
    pid: int | None = None
    """Process id on that host."""
    version: int | None = None
    """Policy version it holds; None before the first and for roles without weights."""
    version_lag: int | None = None
    """Generators: versions announced since that one."""
    tokens_per_s: float | None = None
    """Tokens generated, or trained on, per second."""
    running: int | None = None
    """Generators: number of trajectories in progress."""
    capacity: int | None = None
    """Generators: maximum number of concurrent trajectories."""
    rewards_failed: int | None = None
    """Generators: trajectories whose reward function failed."""
    restarts: int | None = None
    """Restarts by the launcher; None if it does not run this role."""
    kv_usage: float | None = None
    """Generators: share of the engine's KV cache in use."""
    preemptions: int | None = None
    """Generators: requests that the engine interrupted for want of KV cache."""
    is_chief: bool = False
    """Brokers: whether it does what is done once for all of them."""
    broker: str | None = None
    """Generators: the broker that serves it; None if the run has one."""

    @property
    def is_alive(self) -> bool:
        """Whether its last report is recent."""
        return self.liveness == "alive"


def role_statuses(roles: Roles, *, run: RunConfig, now: float, announced_version: int) -> list[RoleStatus]:
    """Return the status of every role that ever reported: single roles first, then generators, by name."""
    restarts = roles.get(LAUNCHER, {}).get("restarts", {})
    statuses = [
        _role_status(name, gauges, run=run, now=now, announced_version=announced_version, restarts=restarts.get(name))
        for name, gauges in roles.items()
    ]
    return sorted(statuses, key=lambda each: (each.role == "generator", each.name))


def _role_status(
    name: str, gauges: dict[str, Any], *, run: RunConfig, now: float, announced_version: int, restarts: int | None
) -> RoleStatus:
    # A report from the future: the store's clock was set back, and the role has not reported since.
    age_s = abs(now - gauges["reported_at"])
    progressed_at = number_of(gauges, "progressed_at")
    version = _version(gauges)
    is_generator = gauges.get("role") == "generator"
    has_not_left = gauges.get("state") != "gone"
    return RoleStatus(
        name=name,
        role=str(gauges.get("role", "")),
        liveness=_liveness(gauges, age_s=age_s, timeout_s=run.broker.peer_timeout_s),
        state=str(gauges.get("state", "")),
        report_age_s=age_s,
        progress_age_s=None if progressed_at is None else max(0.0, now - progressed_at),
        reason=str(gauges.get("reason", "")),
        waits_for=str(gauges.get("waits_for", "")) if has_not_left else "",
        host=gauges.get("host"),
        pid=gauges.get("pid"),
        version=version,
        version_lag=announced_version - version if is_generator and version is not None else None,
        tokens_per_s=number_of(gauges, "tokens_per_s"),
        running=_count(gauges, "running"),
        capacity=_capacity(gauges, run) if is_generator and has_not_left else None,
        rewards_failed=_count(gauges, "rewards_failed"),
        restarts=restarts,
        kv_usage=number_of(gauges, "kv_usage"),
        preemptions=_count(gauges, "preemptions"),
        is_chief=gauges.get("is_chief") is True,
        broker=gauges.get("broker"),
    )


def last_heard(roles: list[RoleStatus], role: str) -> RoleStatus | None:
    """Return that one of a kind which has reported last, such as of several brokers; None without any."""
    return min((each for each in roles if each.role == role), key=lambda each: each.report_age_s, default=None)


def _liveness(gauges: dict[str, Any], *, age_s: float, timeout_s: float) -> Liveness:
    if gauges.get("state") == "gone":
        return "gone"
    return "alive" if age_s <= timeout_s else "silent"


def _capacity(gauges: dict[str, Any], run: RunConfig) -> int:
    # Reported by the generator once its engine has started; until then, the limit in the settings.
    return _count(gauges, "max_concurrency") or run.generators.max_concurrency


def number_of(gauges: dict[str, Any], name: str) -> float | None:
    """Return a gauge if it is a finite number: peers send them, so any plain value is possible."""
    value = gauges.get(name)
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _count(gauges: dict[str, Any], name: str) -> int | None:
    value = number_of(gauges, name)
    return None if value is None else int(value)


def _version(gauges: dict[str, Any]) -> int | None:
    # A peer without a version reports -1.
    version = gauges.get("version", -1)
    return version if version >= 0 else None
