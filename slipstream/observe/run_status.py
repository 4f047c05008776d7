"""RunStatus: the complete status of a run, from its store."""

from collections.abc import Sequence
from typing import Any

from slipstream.buffer.accounting import StoreCounts, StoreMemory
from slipstream.buffer.pacing import admission_limit, admission_reason, target_lag
from slipstream.buffer.records import METRICS_KEPT, CheckpointPointer, RunState
from slipstream.buffer.role_reports import LAUNCHER, RoleStatus, last_heard, role_statuses
from slipstream.buffer.store import Store
from slipstream.configs.base import Record
from slipstream.configs.run import RunConfig

_ALL = "all roles"
_GENERATORS, _LEARNER, _BROKER, _DISK = "the generators", "the learner", "the broker", "the disk"
_BLOCKED_ON: dict[str, str] = {
    "groups": _GENERATORS,
    "evaluation": _GENERATORS,
    "weights": _LEARNER,
    "transfer": _LEARNER,
    "prompts": _LEARNER,
    "agents": "the agents",
    "store": "the store",
    "disk": _DISK,
    "storage": "the object store",
    "user": "whoever paused the run",
}
"""WaitsFor -> who can end the wait."""
_ENDED_PHASES = ("finished", "failed")


class Wait(Record):
    """A role that waits for another role.

    Example: Wait("learner", blocked_on="the generators", reason="waiting for the 32 groups of step 13: 5 are ready")
    """

    waiter: str
    """A role's name, or all roles of a kind."""
    blocked_on: str
    reason: str


def find_waits(state: RunState, roles: list[RoleStatus], *, admission_reason: str, full_disk: str = "") -> list[Wait]:
    """Waits, those for dead roles first; none once the run has ended.

    `admission_reason`: why no prompt is admitted. `full_disk`: the store's, or empty.
    """
    if state.phase in _ENDED_PHASES:
        return []
    if full_disk:
        # No role can report, so all other information is stale.
        reason = f"the store takes no writes until there is room on {full_disk}; all goes on by itself then"
        return [Wait(_ALL, _DISK, reason)]
    waiting = (role for role in roles if role.is_alive and role.waits_for in _BLOCKED_ON)
    own = [Wait(role.name, _BLOCKED_ON[role.waits_for], role.reason) for role in waiting]
    reported = {wait.waiter for wait in own}
    with_room = [role for role in roles if role.is_alive and role.capacity and (role.running or 0) < role.capacity]
    # A generator with free slots reports a wait only once it knows why.
    is_known = not with_room or any(role.name in reported for role in with_room)
    admission = [Wait(_GENERATORS, _LEARNER, admission_reason)] if admission_reason and not is_known else []
    return [*_for_missing_roles(roles), *admission, *own]


def dead_end_cause(roles: dict[str, dict[str, Any]]) -> str:
    """Reason that the learner's wait cannot end without help, or empty."""
    return str(roles.get("learner", {}).get("dead_end", ""))


def _for_missing_roles(roles: list[RoleStatus]) -> list[Wait]:
    broker, learner, waits = last_heard(roles, "broker"), last_heard(roles, "learner"), []
    if broker is None or not broker.is_alive:
        # The other roles report through the broker.
        return [Wait(_ALL, _BROKER, _describe_absence("broker", broker))]
    if learner is None or not learner.is_alive:
        waits.append(Wait(_GENERATORS, _LEARNER, _describe_absence("learner", learner)))
    if not any(role.role == "generator" and role.is_alive for role in roles):
        why = "no generator is alive: start one with `python -m slipstream.generators`"
        waits.append(Wait(_LEARNER, _GENERATORS, why))
    return waits


def _describe_absence(name: str, role: RoleStatus | None) -> str:
    if role is None:
        return f"no {name} has joined yet"
    return f"the {name} has been {role.liveness} for {role.report_age_s:.0f} s"


_MONITORED_STEPS = 20


class RunSnapshot(Record):
    """Store data of a run at one moment."""

    state: RunState
    counts: StoreCounts
    roles: dict[str, dict[str, Any]]
    rows: list[dict[str, Any]]
    """Newest metrics rows, oldest first; as many as the store keeps."""
    new_rows: list[dict[str, Any]]
    eta_s: float | None

    @property
    def last(self) -> dict[str, Any]:
        return self.rows[-1] if self.rows else {}

    @property
    def living_generators(self) -> set[str]:
        return {name for name, g in self.roles.items() if g.get("role") == "generator" and _is_alive(g)}

    def describe_waits(self) -> str:
        waiting = [(name, g) for name, g in sorted(self.roles.items()) if g.get("waits_for") and _is_alive(g)]
        return "; ".join(f"{name}: {gauges.get('reason')}" for name, gauges in waiting)


def _is_alive(gauges: dict[str, Any]) -> bool:
    return gauges.get("state") != "gone"


_NUM_EVENTS = 8
_RECENT_STEPS = 20


class StatusEvent(Record):
    """A recorded problem: StatusEvent(12.5, role="generator-1", text="died (signal SIGKILL)")."""

    age_s: float
    role: str
    text: str


class Admission(Record):
    """State of prompt admission."""

    admitted: int
    """Prompts leased for the first time, minus returned budget."""
    limit: int
    """Total that pacing allows, given the learner's consumption."""
    target_lag: float
    """Target lag in versions: `staleness.target_lag`, or the learner's choice."""
    reason: str
    """Reason that no more prompts are admitted; else empty."""


class RunStatus(Record):
    """Status of a run. Times are ages in seconds on the store's clock."""

    run: str
    phase: str
    """starting | training | finishing | finished | failed."""
    detail: str
    """Cause of the phase, or empty."""
    step: int
    max_steps: int
    version: int
    """Newest version that every healthy generator has verified."""
    announced_version: int
    """Newest version announced by the learner."""
    checkpoint: CheckpointPointer | None
    """Checkpoint that a resume starts from."""
    progress_age_s: float | None
    """Since the newest step was committed; None before the first."""
    eta_s: float | None
    """Seconds to `max_steps` at the current rate; None before the second step."""
    roles: list[RoleStatus]
    waits: list[Wait]
    learner_wait_fraction: float | None
    """Share of the learner's time spent waiting for groups, last 20 steps; None before the first."""
    generators_target: int | None
    """Generators that the launcher keeps running; None without a launcher."""
    address: str
    """For generators on other machines; empty if the broker listens on no port."""
    generators_busy_fraction: float | None
    """Trajectories in progress / capacity of the live generators; None without any."""
    admission: Admission
    counts: StoreCounts
    ready_by_lag: dict[int, int]
    """Versions of the oldest token behind `announced_version` -> ready groups."""
    length_bias: float
    """Mean length of trained trajectories / mean length of arrived trajectories."""
    waste_fraction: float
    """Share of arrived tokens that were discarded untrained."""
    last_row: dict[str, Any]
    """Newest metrics row (docs/metrics.md); empty before the first step."""
    events: list[StatusEvent]
    memory: StoreMemory


class Monitor:
    """Reads the state of one run repeatedly. Never changes the store."""

    def __init__(self, store: Store, run: RunConfig) -> None:
        self._store = store
        self._run = run
        self._rows: list[dict[str, Any]] = []
        self._last = 0

    def poll(self) -> RunSnapshot:
        """Read the store and new rows. Raises StoreUnavailableError."""
        new = self._store.metrics(after=self._last)
        self._last = new.last
        self._rows = [*self._rows, *new.rows][-METRICS_KEPT:]
        recent, eta_s = self._rows[-_MONITORED_STEPS:], None
        # A rollback repeats steps: measure since the last one.
        starts = [i for i in range(1, len(recent)) if recent[i]["step"] <= recent[i - 1]["step"]]
        recent = recent[starts[-1] if starts else 0 :]
        if len(recent) > 1:
            first, last = recent[0], recent[-1]
            pace = (last["time_s"] - first["time_s"]) / (last["step"] - first["step"])
            eta_s = pace * (self._run.learner.max_steps - last["step"])
        store = self._store
        return RunSnapshot(
            store.run_state(), store.counts(), store.roles(), rows=self._rows, new_rows=new.rows, eta_s=eta_s
        )

    def status(self) -> RunStatus:
        """Poll and describe the run. Raises StoreUnavailableError."""
        snapshot, run = self.poll(), self._run
        state, counts, now, ready = snapshot.state, snapshot.counts, self._store.now(), self._store.ready_versions()
        roles = role_statuses(snapshot.roles, run=run, now=now, announced_version=state.announced_version)
        brokers = [role.name for role in roles if role.role == "broker" and role.is_alive]
        addresses = [snapshot.roles[name].get("address") for name in brokers]
        reason = admission_reason(run, state=state, counts=counts)
        admission = Admission(counts.admitted, admission_limit(run, state), target_lag(run, state), reason)
        events = self._store.events(limit=_NUM_EVENTS)
        shared = ("phase", "detail", "step", "version", "announced_version", "checkpoint")
        return RunStatus(
            run=state.run_id,
            **{name: getattr(state, name) for name in shared},
            max_steps=run.learner.max_steps,
            progress_age_s=None if state.stepped_at is None else max(0.0, now - state.stepped_at),
            eta_s=snapshot.eta_s,
            roles=roles,
            waits=find_waits(state, roles, admission_reason=reason, full_disk=self._store.full_disk()),
            learner_wait_fraction=wait_fraction(snapshot.rows[-_RECENT_STEPS:]),
            generators_target=snapshot.roles.get(LAUNCHER, {}).get("generators_target"),
            address=next((str(address) for address in addresses if address), ""),
            generators_busy_fraction=busy_fraction(roles),
            admission=admission,
            counts=counts,
            ready_by_lag={state.announced_version - oldest: ready[oldest] for oldest in sorted(ready, reverse=True)},
            length_bias=counts.length_bias,
            waste_fraction=counts.waste_fraction,
            last_row=snapshot.last,
            events=[StatusEvent(max(0.0, now - event.at), event.role, event.text) for event in events],
            memory=self._store.memory(),
        )


def wait_fraction(rows: Sequence[dict[str, Any]]) -> float | None:
    """Share of the learner's time spent waiting for groups; None without rows."""
    waited = sum(row["learner/wait_s"] for row in rows)
    worked = sum(row["learner/train_s"] + row["learner/publish_s"] for row in rows)
    return waited / (waited + worked) if waited + worked else None


def busy_fraction(roles: Sequence[RoleStatus]) -> float | None:
    """Trajectories in progress / capacity of live generators; None without any."""
    living = [role for role in roles if role.is_alive and role.capacity]
    capacity = sum(role.capacity or 0 for role in living)
    return sum(role.running or 0 for role in living) / capacity if capacity else None
