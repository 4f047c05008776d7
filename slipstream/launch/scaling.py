"""Scaling: number of generators of a live run, by request or measured waits."""

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from math import inf
from typing import Any

from slipstream.buffer.errors import ReplayBufferError
from slipstream.buffer.records import EVENTS_KEPT
from slipstream.buffer.role_reports import LAUNCHER, role_statuses
from slipstream.buffer.store import GENERATORS, Store
from slipstream.configs.base import ConfigError, Record, require
from slipstream.configs.generators import AutoscaleConfig
from slipstream.configs.run import RunConfig
from slipstream.launch.generator_pool import Event, GeneratorPool
from slipstream.observe.run_status import RunSnapshot, busy_fraction, wait_fraction
from slipstream.runtime.clock import Clock

_WORKING_STATES = ("ready", "updating")
_MIN_STEPS = 5
"""Steps before the learner's waits are meaningful."""
_MORE_ABOVE = 0.3
"""Fraction of the learner's time spent waiting for groups, above which a generator is added: below it, a step becomes
shorter by less than a third."""
_FEWER_BELOW = 0.5
"""Used fraction of all generators' capacity, below which one is removed: far enough from full that the next measurement
does not add it again."""
_SETTLE_S = 60.0
"""Window of a measurement, once all roles work: many answers, and a few steps."""
_ABSENT_AFTER_S = 600.0
"""Longest wait for a generator, which may load a large model, before the measurement ignores it."""


class Change(Record):
    """A decision of the autoscaler.

    Example: Change(target=3, reason="the learner waited 45% of the last 62 s for groups, above 30%")
    """

    target: int
    reason: str


class Autoscaler:
    """Decides once per window of `_SETTLE_S`, or longer if steps are slow.

    Scaling up has priority: if the learner waits while generators idle, the cause lies elsewhere.
    """

    def __init__(self, config: AutoscaleConfig, *, clock: Clock = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self.start_window()

    def start_window(self) -> None:
        self._started_at = self._clock()
        self._rows: list[dict[str, Any]] = []
        self._busy: list[float] = []
        self._starving: list[bool] = []

    def observe(
        self, rows: Sequence[dict[str, Any]], *, busy: float | None, is_starving: bool, num_ready: int, target: int
    ) -> Change | None:
        """Add one observation; at the end of a window, return a change or None.

        `rows`: new metrics rows. `busy`: used fraction of the capacity of the `num_ready` generators with weights.
        `is_starving`: the learner waits for groups now.
        """
        self._rows += rows
        self._busy += [] if busy is None else [busy]
        self._starving.append(is_starving)
        seconds = self._clock() - self._started_at
        if seconds < _SETTLE_S:
            return None
        change = self._choose(seconds, num_ready=num_ready, target=target)
        # Extend a window with too few steps, or slow steps would never be measured.
        if not 0 < len(self._rows) < _MIN_STEPS:
            self.start_window()
        return change

    def _choose(self, seconds: float, *, num_ready: int, target: int) -> Change | None:
        config = self._config
        waited = wait_fraction(self._rows) if len(self._rows) >= _MIN_STEPS else None
        if not self._rows:
            # Before the first step: share of the observations in which it waited.
            waited = sum(self._starving) / len(self._starving)
        if target < config.min:
            # Generators were drained or abandoned.
            return Change(config.min, f"generators.autoscale.min is {config.min}")
        if waited is None:
            return None
        if waited > _MORE_ABOVE:
            why = f"the learner waited {waited:.0%} of the last {seconds:.0f} s for groups, above {_MORE_ABOVE:.0%}"
            # At `max`, no generator is removed, or it would leave and return repeatedly.
            return Change(target + 1, why) if target < config.max else None
        if target <= config.min or not self._busy or len(self._rows) < _MIN_STEPS:
            return None
        busy = sum(self._busy) / len(self._busy)
        # The others must be able to take over its work.
        if busy >= _FEWER_BELOW or busy * num_ready > num_ready - 1:
            return None
        capacity = f"{busy:.0%} of their capacity in the last {seconds:.0f} s"
        return Change(target - 1, f"the generators used {capacity}, below {_FEWER_BELOW:.0%}")


class AbsenceTracker:
    """Tracks generators that do not work."""

    def __init__(self, *, absent_after_s: float, clock: Clock = time.monotonic) -> None:
        self._absent_after_s = absent_after_s
        self._clock = clock
        self._away_since: dict[str, float] = {}
        self._abandoned: set[str] = set()

    def update(self, expected: AbstractSet[str], *, working: AbstractSet[str]) -> list[str]:
        """Return newly abandoned generators, once per absence."""
        now = self._clock()
        self._away_since = {name: self._away_since.get(name, now) for name in expected - working}
        abandoned = {name for name, since in self._away_since.items() if now - since > self._absent_after_s}
        new, self._abandoned = abandoned - self._abandoned, abandoned
        return sorted(new)

    @property
    def is_complete(self) -> bool:
        """Whether every generator works, except abandoned ones."""
        return self._away_since.keys() == self._abandoned


class LauncherReport:
    """Reports the launcher to the store. Queues events during an outage. Life: (record | send)* -> end."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._answer: dict[str, str] = {}
        self._unsent: deque[Event] = deque(maxlen=EVENTS_KEPT)

    def record(self, event: Event) -> None:
        """Queue an event, without the role name that starts its message."""
        self._unsent.append(Event(event.role, event.message.removeprefix(f"{event.role} ")))

    def answer(self, request_id: str, refusal: str) -> None:
        """An empty refusal means success."""
        self._answer = {"answered": request_id, "refusal": refusal}

    def send(self, *, restarts: Mapping[str, int], generators_target: int) -> None:
        """Record the waiting events and report. Raises StoreUnavailableError, RunConflictError."""
        while self._unsent:
            # Dequeue after the call: a lost answer then repeats the event.
            self._store.record_event(*self._unsent[0])
            self._unsent.popleft()
        self._report("ready", {"restarts": dict(restarts), "generators_target": generators_target, **self._answer})

    def end(self, *, reason: str, restarts: Mapping[str, int], generators_target: int) -> None:
        """No-op if the store does not answer."""
        with suppress(ReplayBufferError):
            self.send(restarts=restarts, generators_target=generators_target)
            self._report("gone", {"restarts": dict(restarts), "reason": reason})

    def _report(self, state: str, gauges: dict[str, Any]) -> None:
        process = {"role": LAUNCHER, "state": state, "host": socket.gethostname(), "pid": os.getpid()}
        self._store.report_role(LAUNCHER, process | gauges)


class Scaling:
    """Sets the target of a generator pool, once per `poll`."""

    def __init__(
        self,
        pool: GeneratorPool,
        report: LauncherReport,
        *,
        run: RunConfig,
        check_room: Callable[[int], None],
        clock: Clock = time.monotonic,
    ) -> None:
        """`check_room(count)` raises ConfigError if that many generators do not fit."""
        self._pool = pool
        self._report = report
        self._run = run
        self._check_room = check_room
        config = run.generators.autoscale
        self._autoscaler = Autoscaler(config, clock=clock) if config else None
        self._absences = AbsenceTracker(absent_after_s=_ABSENT_AFTER_S if config else inf, clock=clock)
        self._refused: tuple[int, str] | None = None
        self._is_first_poll = True

    def poll(self, store: Store, snapshot: RunSnapshot) -> list[Event]:
        """Apply a user request, then an autoscaler decision. Raises StoreUnavailableError."""
        requests = store.take_requests("launcher")
        if self._is_first_poll:
            # Older requests were addressed to the previous launcher.
            self._is_first_poll, requests = False, {}
        events = self._handle_request(requests[GENERATORS]) if GENERATORS in requests else []
        return events + self._autoscale(store, snapshot)

    def _handle_request(self, value: str) -> list[Event]:
        number, _, request_id = value.partition(" ")
        scale = self._run.generators.autoscale
        try:
            if scale:
                must = f"lie between generators.autoscale.min and max ({scale.min} to {scale.max})"
                why = "the autoscaler decides within them; start the run with other bounds"
                require(scale.min <= int(number) <= scale.max, "generators", must, got=int(number), why=why)
            events = self._set_target(int(number), reason="requested")
        except (ValueError, ConfigError) as error:
            self._report.answer(request_id, str(error))
            return []
        self._report.answer(request_id, "")
        return events

    def _autoscale(self, store: Store, snapshot: RunSnapshot) -> list[Event]:
        state = snapshot.state
        if self._autoscaler is None or state.phase != "training":
            return []
        roles = role_statuses(snapshot.roles, run=self._run, now=store.now(), announced_version=state.announced_version)
        workers = [r for r in roles if r.role == "generator" and r.is_alive and r.state in _WORKING_STATES]
        states = {role.name: role.state if role.is_alive else role.liveness for role in roles}
        absent = self._absences.update(self._pool.active_names, working={role.name for role in workers})
        since = f"has not worked for {_ABSENT_AFTER_S:g} s: the autoscaler ignores it until it works"
        events = [Event(name, f"{name} is {states.get(name, 'absent')} and {since}") for name in absent]
        learner = next((role for role in roles if role.role == "learner" and role.is_alive), None)
        is_starving = learner is not None and learner.waits_for == "groups"
        is_training = learner is not None and (state.step > 0 or is_starving)
        if not (is_training and self._absences.is_complete):
            # Waits during a start say nothing about the number needed.
            self._autoscaler.start_window()
            return events
        busy, ready = busy_fraction(workers), len(workers)
        change = self._autoscaler.observe(
            snapshot.new_rows, busy=busy, is_starving=is_starving, num_ready=ready, target=self._pool.target
        )
        if change is None:
            return events
        try:
            return events + self._set_target(change.target, reason=change.reason)
        except ConfigError as error:
            previous, self._refused = self._refused, (change.target, str(error))
            # Once: repeats would push other events out of the store.
            stays = f"the number of generators stays at {self._pool.target}, although {change.reason}: {error}"
            return events if previous == self._refused else [*events, Event(LAUNCHER, stays)]

    def _set_target(self, target: int, *, reason: str) -> list[Event]:
        previous = self._pool.target
        # Raises before anything changes.
        self._check_room(target)
        self._refused = None
        changed = f"the number of generators changes from {previous} to {target}: {reason}"
        return [Event(LAUNCHER, changed), *self._pool.set_target(target)]
