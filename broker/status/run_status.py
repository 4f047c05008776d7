"""RunStatus: where a run stands, from one look at its store: what `run_async.py status` shows."""

import time
from collections.abc import Sequence
from typing import Any

from slipstream.broker.admission import admission_limit, admission_reason
from slipstream.broker.status.blocking import Wait, find_waits
from slipstream.broker.status.monitor import Monitor, RunSnapshot
from slipstream.broker.status.role_status import LAUNCHER, RoleStatus, role_statuses
from slipstream.buffer.accounting import StoreCounts
from slipstream.buffer.records import CheckpointPointer, Event
from slipstream.buffer.store import Store
from slipstream.buffer.trajectory import Record
from slipstream.configs.run import RunConfig
from slipstream.runtime.clock import Clock

_EVENTS_SHOWN = 8
_RECENT_STEPS = 20
"""Over which the learner's waiting is told."""


class StatusEvent(Record):
    """Something that went wrong. Example: StatusEvent(age_s=12.5, role="generator-1", text="died (signal SIGKILL)")."""

    age_s: float
    """Since then, seconds."""
    role: str
    """Whom it befell."""
    text: str
    """What happened."""


class Admission(Record):
    """How many training prompts may be out. Example: Admission(admitted=96, limit=96, reason="pacing: ...")."""

    admitted: int
    """Prompts ever leased for the first time, less those handed back to the budget."""
    limit: int
    """What pacing allows in all, by what the learner has consumed."""
    reason: str
    """Why no more is admitted now; empty when more may be."""


class RunStatus(Record):
    """The run as its store tells it now. Times are ages in seconds, by the store's clock."""

    run: str
    """Its name."""
    phase: str
    """starting, training, finishing, finished, failed."""
    detail: str
    """Why the phase is what it is."""
    step: int
    """Steps committed."""
    max_steps: int
    """Steps of the whole run."""
    version: int
    """Newest policy version that all generators adopted and verified."""
    announced_version: int
    """Newest policy version the learner has made."""
    checkpoint: CheckpointPointer | None
    """What a resumed run starts from."""
    progress_age_s: float | None
    """Since the newest step was committed; None before the first."""
    eta_s: float | None
    """Until `max_steps` at the present pace; None before the second step."""
    roles: list[RoleStatus]
    """Every role that ever reported."""
    waits: list[Wait]
    """Who waits for whom, and why."""
    learner_wait_fraction: float | None
    """Share of the learner's time spent waiting for groups, last 20 steps; None before the first."""
    generators_target: int | None
    """How many the launcher keeps; None without one."""
    generators_busy_fraction: float | None
    """Trajectories under way / what the living generators can run together; None without any."""
    admission: Admission
    """What pacing and the store's capacity let out."""
    counts: StoreCounts
    """Where every group and trajectory is, and how it ended."""
    ready_by_lag: dict[int, int]
    """Versions behind `announced_version` -> number of ready groups whose oldest token is that old."""
    length_bias: float
    """Mean length of what was trained on / of what arrived."""
    waste_fraction: float
    """Share of the generated tokens that arrived and were let go without a step."""
    last_row: dict[str, Any]
    """Newest metrics row; docs/metrics.md says what each is."""
    events: list[StatusEvent]
    """What went wrong last, newest last."""


class StatusReader:
    """Reads the status of one run, again and again. Raises StoreUnavailableError when the store does not answer."""

    def __init__(self, store: Store, run: RunConfig, *, clock: Clock = time.monotonic) -> None:
        self._store = store
        self._run = run
        self._monitor = Monitor(store, run, clock=clock)

    def read(self) -> RunStatus:
        """Look once; nothing in the store changes."""
        return make_status(
            self._monitor.poll(),
            run=self._run,
            now=self._store.now(),
            ready_versions=self._store.ready_versions(),
            events=self._store.events(limit=_EVENTS_SHOWN),
        )


def make_status(
    snapshot: RunSnapshot, *, run: RunConfig, now: float, ready_versions: dict[int, int], events: list[Event]
) -> RunStatus:
    """The status of what was read at `now`, seconds of the store's clock."""
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
        waits=find_waits(state, roles, admission_reason=admission.reason),
        learner_wait_fraction=wait_fraction(snapshot.rows[-_RECENT_STEPS:]),
        generators_target=snapshot.roles.get(LAUNCHER, {}).get("generators_target"),
        generators_busy_fraction=busy_fraction(roles),
        admission=admission,
        counts=counts,
        ready_by_lag=_by_lag(ready_versions, version=state.announced_version),
        length_bias=counts.length_bias,
        waste_fraction=counts.waste_fraction,
        last_row=snapshot.last,
        events=[StatusEvent(max(0.0, now - event.at), event.role, event.text) for event in events],
    )


def _by_lag(ready_versions: dict[int, int], *, version: int) -> dict[int, int]:
    return {version - oldest: ready_versions[oldest] for oldest in sorted(ready_versions, reverse=True)}


def wait_fraction(rows: Sequence[dict[str, Any]]) -> float | None:
    """Share of the learner's time that it waited for groups in the steps of these rows; None without any."""
    waited = sum(row["learner/wait_s"] for row in rows)
    worked = sum(row["learner/train_s"] + row["learner/publish_s"] for row in rows)
    return waited / (waited + worked) if waited + worked else None


def busy_fraction(roles: Sequence[RoleStatus]) -> float | None:
    """Trajectories under way / what the living generators can run together; None without any."""
    living = [role for role in roles if role.is_alive and role.capacity]
    capacity = sum(role.capacity or 0 for role in living)
    return sum(role.running or 0 for role in living) / capacity if capacity else None
