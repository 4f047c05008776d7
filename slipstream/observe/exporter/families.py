"""Prometheus metric families of a run and their samples.

The row key `learner/ess` becomes `slipstream_learner_ess`. Variable parts of a key become labels:
`learner/by_lag/4-7/ess` is `slipstream_learner_by_lag_ess{lag="4-7"}`, `eval/accuracy_greedy` is
`slipstream_eval_accuracy{set="greedy"}`.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, get_args

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from slipstream.buffer.records import Phase
from slipstream.buffer.role_reports import Roles, RoleStatus, number_of
from slipstream.configs.run import RunConfig
from slipstream.observe.run_status import RunStatus

_PREFIX = "slipstream_"
_KEY = re.compile(r"learner/by_(?P<kind>lag|source|layer)/(?P<value>[^/]+)/(?P<name>.+)")
_EVAL = re.compile(r"eval/(?:by_source/(?P<source>.+)/)?(?P<name>[a-z]+(?:@\d+)?)_(?P<set>.+)")
_NOT_A_NAME = re.compile(r"[^a-z0-9_]+")
_ROW = "`{key}` of the newest step, see docs/metrics.md"


class Family(NamedTuple):
    """Name and meaning of a metric family."""

    name: str
    """Without the prefix and `_total`."""
    help: str
    source: str = ""
    """Attribute of the RunStatus or, for `role_...`, of a RoleStatus; empty if computed."""
    is_counter: bool = False

    @property
    def full_name(self) -> str:
        return f"{_PREFIX}{self.name}{'_total' if self.is_counter else ''}"


FAMILIES = {
    family.name: family
    for family in (
        Family("up", "1 while the store answers the exporter"),
        Family("phase", "1 for the phase that the run is in"),
        Family("step", "steps committed", "step"),
        Family("max_steps", "steps of the whole run", "max_steps"),
        Family("version", "newest policy version that every generator has verified", "version"),
        Family("announced_version", "newest policy version of the learner", "announced_version"),
        Family("checkpoint_step", "step of the checkpoint that a resume starts from"),
        Family("checkpoint_age_seconds", "since that checkpoint changed, as seen by the exporter"),
        Family("disk_free_bytes", "free space on the disk of the run folder"),
        Family("progress_age_seconds", "since the newest step was committed", "progress_age_s"),
        Family("arrival_age_seconds", "since a trajectory was last accepted, as seen by the exporter"),
        Family("eta_seconds", "until the last step at the present pace", "eta_s"),
        Family("dead_end", "1 while the learner reports a wait that cannot end"),
        Family("dead_end_after_seconds", "learner.stall.timeout_s: time without an arrival that ends the run"),
        Family("max_lag", "staleness.max_lag: versions that a token may be old"),
        Family("learner_wait_fraction", "share of the learner's time spent waiting for groups, last 20 steps"),
        Family("generators_alive", "generators that report"),
        Family("generators_target", "generators that the launcher keeps running, or generators.count without one"),
        Family("generators_busy_fraction", "trajectories in progress / capacity of the living generators"),
        Family("role_up", "1 while the role reports, 0 once it is silent or gone", "is_alive"),
        Family("role_report_age_seconds", "since the last report of a role", "report_age_s"),
        Family("role_progress_age_seconds", "since the last progress of a role", "progress_age_s"),
        Family("role_waiting", "1 while the role waits, by what it waits for"),
        Family("role_version_lag", "versions announced since the one that a generator holds", "version_lag"),
        Family("role_tokens_per_second", "tokens generated, or trained on", "tokens_per_s"),
        Family("role_running", "trajectories in progress", "running"),
        Family("role_capacity", "trajectories that a generator may have in progress", "capacity"),
        Family("role_rewards_failed", "trajectories whose reward function failed", "rewards_failed", is_counter=True),
        Family("role_restarts", "restarts by the launcher", "restarts", is_counter=True),
        Family("logger_entries", "entries of a logger: sent, failed, dropped, lost", is_counter=True),
        Family("logger_queued", "entries that wait for a logger"),
        Family("admitted_prompts", "prompts admitted, less those given back", "admission.admitted"),
        Family("admission_limit", "prompts that pacing allows so far", "admission.limit"),
        Family("admission_target_lag", "lag that pacing admits prompts for, versions", "admission.target_lag"),
        Family("groups", "groups by state"),
        Family("ready_groups", "ready groups by the versions that their oldest token is old"),
        Family("group_ends", "groups that are over, by outcome and reason", is_counter=True),
        Family("trajectories", "trajectories: accepted, duplicates, superseded, trained", is_counter=True),
        Family("tokens", "model-written tokens: accepted, superseded, wasted, trained", is_counter=True),
        Family("refused_frames", "frames that the broker refused, by reason", is_counter=True),
        Family("store_payload_bytes", "encoded trajectories in the store", "counts.payload_bytes"),
        Family("store_memory_bytes", "memory of the store's server"),
        Family("store_memory_limit_bytes", "limit of that memory; absent without one"),
        Family("lag_tokens", "tokens of the newest step by their lag"),
        Family("step_seconds", "wall time of the mean step"),
        Family("time_share", "share of a role's wall time by phase"),
    )
}
"""Exported for every run, regardless of its metric rows."""
_OF_ROLES = [family for family in FAMILIES.values() if family.source and family.name.startswith("role_")]
_OF_RUN = [family for family in FAMILIES.values() if family.source and family not in _OF_ROLES]


class Context(NamedTuple):
    """Sources of samples in addition to the status."""

    run: RunConfig
    roles: Roles
    arrival_age_s: float
    checkpoint_age_s: float
    disk_free_bytes: int


Sample = tuple[str, Mapping[str, str], float]
"""(family name, labels, value)."""


def family_of(key: str) -> tuple[Family, dict[str, str]]:
    """Family of a row key, and the labels in the key."""
    labels: dict[str, str] = {}
    if found := _KEY.fullmatch(key):
        labels, name = {found["kind"]: found["value"]}, f"learner_by_{found['kind']}_{found['name']}"
    elif found := _EVAL.fullmatch(key):
        source = {"source": found["source"]} if found["source"] else {}
        labels, name = {"set": found["set"]} | source, f"eval_{'by_source_' if source else ''}{found['name']}"
    else:
        name = key
    name = _NOT_A_NAME.sub("_", name.replace("@", "_at_").lower())
    return Family(name, _ROW.format(key=key)), labels


def metrics_of(status: RunStatus, context: Context) -> list[Metric]:
    """All families with samples, labeled with the run's name."""
    families: dict[str, Metric] = {}
    known = dict(FAMILIES)
    for key, value in status.last_row.items():
        if isinstance(value, int | float):
            family, labels = family_of(key)
            known.setdefault(family.name, family)
            _add(families, known[family.name], labels, float(value), run=status.run)
    for name, given, number in _samples(status, context):
        _add(families, known[name], given, number, run=status.run)
    return list(families.values())


def unreachable(run: str) -> list[Metric]:
    """Metrics without a responding store: `up 0`."""
    families: dict[str, Metric] = {}
    _add(families, FAMILIES["up"], {}, 0.0, run=run)
    return list(families.values())


def _add(families: dict[str, Metric], family: Family, labels: Mapping[str, str], value: float, *, run: str) -> None:
    kind = CounterMetricFamily if family.is_counter else GaugeMetricFamily
    found = families.setdefault(family.name, kind(f"{_PREFIX}{family.name}", family.help))
    found.add_sample(family.full_name, {"run": run, **labels}, value)


def _samples(status: RunStatus, context: Context) -> Iterator[Sample]:
    run, memory = context.run, status.memory
    computed: dict[str, float | None] = {
        "up": 1.0,
        "checkpoint_step": status.checkpoint.step if status.checkpoint else None,
        "checkpoint_age_seconds": context.checkpoint_age_s,
        "disk_free_bytes": context.disk_free_bytes,
        "arrival_age_seconds": context.arrival_age_s,
        "dead_end": float(bool(context.roles.get("learner", {}).get("dead_end"))),
        "dead_end_after_seconds": run.learner.stall.timeout_s,
        "max_lag": run.staleness.max_lag,
        "learner_wait_fraction": status.learner_wait_fraction,
        "generators_alive": sum(role.role == "generator" and role.is_alive for role in status.roles),
        "generators_target": run.generators.count if status.generators_target is None else status.generators_target,
        "generators_busy_fraction": status.generators_busy_fraction,
        "store_memory_bytes": memory.used_bytes or None,
        "store_memory_limit_bytes": memory.max_bytes or None,
    }
    yield from _known(computed | _read(status, _OF_RUN), {})
    yield from (("phase", {"phase": phase}, float(phase == status.phase)) for phase in get_args(Phase))
    for role in status.roles:
        yield from _role_samples(role, context.roles.get(role.name, {}))
    yield from _count_samples(status)
    row = status.last_row
    yield from (("lag_tokens", {"lag": str(lag)}, n) for lag, n in row.get("lag/histogram", {}).items())
    if times := row.get("times"):
        yield "step_seconds", {}, times["step_s"]
        for role in times["roles"]:
            for phase, share in role["shares"].items():
                yield "time_share", {"role": role["role"], "phase": phase}, share


def _read(record: object, families: Sequence[Family]) -> dict[str, float | None]:
    return {family.name: attrgetter(family.source)(record) for family in families}


def _known(values: Mapping[str, float | None], labels: Mapping[str, str]) -> Iterator[Sample]:
    yield from ((name, labels, float(value)) for name, value in values.items() if value is not None)


def _role_samples(role: RoleStatus, gauges: Mapping[str, Any]) -> Iterator[Sample]:
    labels = {"role": role.role, "name": role.name}
    yield from _known(_read(role, _OF_ROLES), labels)
    if role.waits_for:
        yield "role_waiting", labels | {"waits_for": role.waits_for}, 1.0
    if role.role == "logger":
        counts = {each: number_of(dict(gauges), each) for each in ("sent", "failed", "dropped", "lost", "queued")}
        yield "logger_queued", {"name": role.name}, counts.pop("queued") or 0.0
        yield from (("logger_entries", {"name": role.name, "outcome": each}, n or 0.0) for each, n in counts.items())


def _count_samples(status: RunStatus) -> Iterator[Sample]:
    counts = msgspec.to_builtins(status.counts)
    for state in ("leased", "returned", "open", "ready", "claimed", "used", "reusable", "unarchived"):
        yield "groups", {"state": state}, counts[state]
    for lag, number in status.ready_by_lag.items():
        yield "ready_groups", {"lag": str(lag)}, number
    ends: Counter[tuple[str, str]] = Counter()
    for reason, number in status.counts.reasons.items():
        # The whole reason would create a series per group.
        outcome, why, *_ = f"{reason}: ".split(": ")
        ends[outcome, why] += number
    yield from (("group_ends", {"outcome": outcome, "reason": why}, number) for (outcome, why), number in ends.items())
    # Trained groups end without a reason.
    yield "group_ends", {"outcome": "retired", "reason": ""}, status.counts.outcomes.get("retired", 0)
    for kind in ("accepted", "duplicates", "superseded", "trained"):
        yield "trajectories", {"kind": kind}, counts[kind]
    for kind in ("accepted", "superseded", "wasted", "trained"):
        yield "tokens", {"kind": kind}, counts[f"{kind}_tokens"]
    # Start at 0, so that the first increase is visible.
    for reason, number in ({"": 0} | status.counts.refused).items():
        yield "refused_frames", {"reason": reason}, number
