"""RunStatus: the complete status of a run, read from its store; `slipstream status` shows it."""

from collections.abc import Sequence
from typing import Any

from slipstream.broker.admission import admission_limit, admission_reason
from slipstream.broker.status.blocking import Wait, find_waits
from slipstream.broker.status.monitor import Monitor, RunSnapshot
from slipstream.broker.status.role_status import LAUNCHER, RoleStatus, role_statuses
from slipstream.buffer.accounting import StoreCounts, StoreMemory
from slipstream.buffer.records import CheckpointPointer, Event
from slipstream.buffer.store import Store
from slipstream.buffer.trajectory import Record
from slipstream.configs.run import RunConfig

_NUM_EVENTS = 8
_NO_MEMORY = StoreMemory()
_RECENT_STEPS = 20
"""Steps over which the learner's wait fraction is measured."""


class StatusEvent(Record):
    """A recorded problem. Example: StatusEvent(age_s=12.5, role="generator-1", text="died (signal SIGKILL)")."""

    age_s: float
    role: str
    text: str


class Admission(Record):
    """State of the admission of training prompts. Example: Admission(admitted=96, limit=96, reason="pacing: ...")."""

    admitted: int
    """Prompts ever leased for the first time, less those whose budget was returned."""
    limit: int
    """Total that pacing allows, given what the learner has consumed."""
    reason: str
    """Reason why no more are admitted now; empty if more may be."""


class RunStatus(Record):
    """Status of a run. Times are ages in seconds by the store's clock."""

    run: str
    phase: str
    """starting | training | finishing | finished | failed."""
    detail: str
    """Cause of the phase; empty if it has none."""
    step: int
    max_steps: int
    """Number of steps of the whole run."""
    version: int
    """Newest committed policy version: verified by all generators that were well then."""
    announced_version: int
    """Newest policy version announced by the learner."""
    checkpoint: CheckpointPointer | None
    """Checkpoint that a resumed run starts from."""
    progress_age_s: float | None
    """Seconds since the newest step was committed; None before the first."""
    eta_s: float | None
    """Seconds to `max_steps` at the current pace; None before the second step."""
    roles: list[RoleStatus]
    """Every role that ever reported."""
    waits: list[Wait]
    learner_wait_fraction: float | None
    """Share of the learner's time spent waiting for groups, last 20 steps; None before the first."""
    generators_target: int | None
    """Number of generators that the launcher keeps running; None without a launcher."""
    address: str
    """Address at which generators on other machines join; empty if the broker listens at no port."""
    generators_busy_fraction: float | None
    """Trajectories in progress / capacity of the living generators; None without any."""
    admission: Admission
    counts: StoreCounts
    """States and outcomes of all groups and trajectories."""
    ready_by_lag: dict[int, int]
    """Versions behind `announced_version` -> number of ready groups whose oldest token is that old."""
    length_bias: float
    """Mean length of the trajectories trained on / of those that arrived."""
    waste_fraction: float
    """Share of the arrived tokens that were discarded without being trained on."""
    last_row: dict[str, Any]
    """Newest metrics row, see docs/metrics.md; empty before the first step."""
    events: list[StatusEvent]
    """The latest few problems, newest last."""
    memory: StoreMemory
    """Memory of the store's server."""


class StatusReader:
    """Reads the status of one run repeatedly."""

    def __init__(self, store: Store, run: RunConfig) -> None:
        self._store = store
        self._run = run
        self._monitor = Monitor(store, run)

    def read(self) -> RunStatus:
        """Read the current status, without changing the store. Raises StoreUnavailableError."""
        return make_status(
            self._monitor.poll(),
            run=self._run,
            now=self._store.now(),
            ready_versions=self._store.ready_versions(),
            events=self._store.events(limit=_NUM_EVENTS),
            full_disk=self._store.full_disk(),
            memory=self._store.memory(),
        )


def make_status(
    snapshot: RunSnapshot,
    *,
    run: RunConfig,
    now: float,
    ready_versions: dict[int, int],
    events: list[Event],
    full_disk: str = "",
    memory: StoreMemory = _NO_MEMORY,
) -> RunStatus:
    """Build the status from a snapshot taken at `now`, seconds of the store's clock."""
    state, counts = snapshot.state, snapshot.counts
    roles = role_statuses(snapshot.roles, run=run, now=now, announced_version=state.announced_version)
    admission = Admission(
        counts.admitted,
        limit=admission_limit(run, consumed=state.consumed),
        reason=admission_reason(run, state=state, counts=counts),
    )
    return RunStatus(
        run=state.run_id,
        phase=state.phase,
        detail=state.detail,
        step=state.step,
        max_steps=run.learner.max_steps,
        version=state.version,
        announced_version=state.announced_version,
        checkpoint=state.checkpoint,
        progress_age_s=None if state.stepped_at is None else max(0.0, now - state.stepped_at),
        eta_s=snapshot.eta_s,
        roles=roles,
        waits=find_waits(state, roles, admission_reason=admission.reason, full_disk=full_disk),
        learner_wait_fraction=wait_fraction(snapshot.rows[-_RECENT_STEPS:]),
        generators_target=snapshot.roles.get(LAUNCHER, {}).get("generators_target"),
        address=_address_to_join(snapshot, roles),
        generators_busy_fraction=busy_fraction(roles),
        admission=admission,
        counts=counts,
        ready_by_lag={
            state.announced_version - oldest: ready_versions[oldest] for oldest in sorted(ready_versions, reverse=True)
        },
        length_bias=counts.length_bias,
        waste_fraction=counts.waste_fraction,
        last_row=snapshot.last,
        events=[StatusEvent(max(0.0, now - event.at), event.role, event.text) for event in events],
        memory=memory,
    )


def _address_to_join(snapshot: RunSnapshot, roles: list[RoleStatus]) -> str:
    """Return the port at which a living broker listens; empty without one."""
    living = [role.name for role in roles if role.role == "broker" and role.is_alive]
    return next((str(address) for name in living if (address := snapshot.roles[name].get("address"))), "")


def wait_fraction(rows: Sequence[dict[str, Any]]) -> float | None:
    """Return the share of the learner's time spent waiting for groups in these rows; None without any."""
    waited = sum(row["learner/wait_s"] for row in rows)
    worked = sum(row["learner/train_s"] + row["learner/publish_s"] for row in rows)
    return waited / (waited + worked) if waited + worked else None


def busy_fraction(roles: Sequence[RoleStatus]) -> float | None:
    """Return trajectories in progress / capacity of the living generators; None without any."""
    living = [role for role in roles if role.is_alive and role.capacity]
    capacity = sum(role.capacity or 0 for role in living)
    return sum(role.running or 0 for role in living) / capacity if capacity else None
