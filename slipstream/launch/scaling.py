"""Scaling: how many generators a launcher keeps while its run goes on: as it is asked, or by who waits for whom."""

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from math import inf
from typing import Any

from slipstream.broker.status.monitor import RunSnapshot
from slipstream.broker.status.role_status import LAUNCHER, RoleStatus, role_statuses
from slipstream.broker.status.run_status import busy_fraction
from slipstream.buffer.errors import ReplayBufferError
from slipstream.buffer.records import EVENTS_KEPT
from slipstream.buffer.store import Store
from slipstream.configs.base import ConfigError
from slipstream.configs.run import RunConfig
from slipstream.launch.autoscaler import Autoscaler, Change
from slipstream.launch.generator_pool import GeneratorPool, Happening
from slipstream.runtime.clock import Clock


# @@ AbsenceTracker: which of the generators that are kept are waited for, and which have been away for too long for that.
class AbsenceTracker:
    """Life: note, at every look. One that is away is waited for, until its time is over."""

    def __init__(self, *, patience_s: float, clock: Clock = time.monotonic) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._away_since: dict[str, float] = {}
        self._given_up: set[str] = set()

    def note(self, kept: AbstractSet[str], *, at_work: AbstractSet[str]) -> list[str]:
        """Take in who is there; returns those that nobody waits for any more from now on, each once per absence."""
        now = self._clock()
        self._away_since = {name: self._away_since.get(name, now) for name in kept - at_work}
        given_up = {name for name, since in self._away_since.items() if now - since > self._patience_s}
        new, self._given_up = given_up - self._given_up, given_up
        return sorted(new)

    @property
    def is_complete(self) -> bool:
        """Whether all are at work that are waited for."""
        return self._away_since.keys() == self._given_up


# @@ LauncherReport: what the launcher tells the store: that it lives, whom it keeps and restarted, and every death.
class LauncherReport:
    """Keeps what happens while the store is away until it can be told.

    Life: (note -> send)* -> end.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._answer: dict[str, str] = {}
        self._untold: deque[tuple[str, str]] = deque(maxlen=EVENTS_KEPT)

    def note(self, role_id: str, sentence: str) -> None:
        """Something happened to a role; the sentence may begin with its name."""
        self._untold.append((role_id, sentence.removeprefix(f"{role_id} ")))

    def answer(self, request_id: str, refusal: str) -> None:
        """What was asked for is done, or why not; with the next `send`."""
        self._answer = {"answered": request_id, "refusal": refusal}

    def send(self, *, restarts: Mapping[str, int], generators_target: int) -> None:
        """Tell the store what was noted, and who is kept and was restarted. Raises StoreUnavailableError, RunConflictError.

        The oldest first, each dropped only once the store has it: an answer that gets lost tells it twice.
        """
        while self._untold:
            self._store.record_event(*self._untold[0])
            self._untold.popleft()
        self._report("ready", {"restarts": dict(restarts), "generators_target": generators_target, **self._answer})

    def end(self, *, reason: str, restarts: Mapping[str, int], generators_target: int) -> None:
        """The last word; a store that does not answer (any more) goes without it."""
        with suppress(ReplayBufferError):
            self.send(restarts=restarts, generators_target=generators_target)
            self._report("gone", {"restarts": dict(restarts), "reason": reason})

    def _report(self, state: str, gauges: dict[str, Any]) -> None:
        where = {"host": socket.gethostname(), "pid": os.getpid()}
        self._store.report_role(LAUNCHER, {"role": LAUNCHER, "state": state, **where, **gauges})


GENERATORS = "generators"
"""Subject of a request for another number; its value: the number, a space, an id for the answer."""
_AT_WORK = ("ready", "updating")
"""States of a generator that has its weights."""


class Scaling:
    """Changes what a fleet keeps. Life: look, again and again."""

    def __init__(
        self,
        fleet: GeneratorPool,
        report: LauncherReport,
        *,
        run: RunConfig,
        check_room: Callable[[int], None],
        clock: Clock = time.monotonic,
    ) -> None:
        """`check_room(count)` raises ConfigError when this machine has no place for so many."""
        self._fleet = fleet
        self._report = report
        self._run = run
        self._check_room = check_room
        config = run.generators.autoscale
        self._autoscaler = Autoscaler(config, clock=clock) if config else None
        self._patience_s = config.absent_after_s if config else inf
        self._attendance = AbsenceTracker(patience_s=self._patience_s, clock=clock)
        self._refused: tuple[int, str] | None = None
        self._is_first_look = True

    def look(self, store: Store, snapshot: RunSnapshot) -> list[Happening]:
        """Do what was asked for since the last look, or what the waits call for. Raises StoreUnavailableError."""
        asked = store.take_requests("launcher")
        if self._is_first_look:
            # Those were for the launcher before.
            self._is_first_look, asked = False, {}
        happened = self._do(asked[GENERATORS]) if GENERATORS in asked else []
        return happened + self._follow_the_waits(store, snapshot)

    def _do(self, asked: str) -> list[Happening]:
        number, _, request_id = asked.partition(" ")
        try:
            self._check_bounds(int(number))
            happened = self._keep(int(number), reason="as asked")
        except (ValueError, ConfigError) as error:
            self._report.answer(request_id, str(error))
            return []
        self._report.answer(request_id, "")
        return happened

    def _check_bounds(self, wanted: int) -> None:
        scale = self._run.generators.autoscale
        if scale and not scale.min <= wanted <= scale.max:
            raise ConfigError(
                f"generators must lie between generators.autoscale.min and max ({scale.min} to {scale.max}), got "
                f"{wanted}: the waits decide in between; begin the run with other bounds."
            )

    def _follow_the_waits(self, store: Store, snapshot: RunSnapshot) -> list[Happening]:
        state = snapshot.state
        if self._autoscaler is None or state.phase != "training":
            return []
        roles = role_statuses(snapshot.roles, run=self._run, now=store.now(), announced_version=state.announced_version)
        workers = [role for role in roles if role.role == "generator" and role.is_alive and role.state in _AT_WORK]
        happened = self._note_absences(roles, at_work={role.name for role in workers})
        learner = next((role for role in roles if role.role == "learner" and role.is_alive), None)
        is_starving = learner is not None and learner.waits_for == "groups"
        is_training = learner is not None and (state.step > 0 or is_starving)
        if not (is_training and self._attendance.is_complete):
            # While somebody starts, the waits of the others say nothing of how many generators are needed.
            self._autoscaler.begin()
            return happened
        change = self._autoscaler.look(
            snapshot.new_rows,
            busy=busy_fraction(workers),
            is_starving=is_starving,
            at_work=len(workers),
            count=self._fleet.wanted,
        )
        return happened + (self._follow(change) if change else [])

    def _note_absences(self, roles: Sequence[RoleStatus], *, at_work: set[str]) -> list[Happening]:
        states = {role.name: role.state if role.is_alive else role.liveness for role in roles}
        return [
            (
                name,
                f"{name} is {states.get(name, 'not there')}, and has not been at work for {self._patience_s:g} s: the "
                "number of generators is decided without it until it is",
            )
            for name in self._attendance.note(self._fleet.kept, at_work=at_work)
        ]

    def _follow(self, change: Change) -> list[Happening]:
        try:
            return self._keep(change.wanted, reason=change.reason)
        except ConfigError as error:
            told, self._refused = self._refused, (change.wanted, str(error))
            if told == self._refused:
                # Said at every decision, it would in time push everything else out of the events.
                return []
            return [("launcher", f"no generator more, though {change.reason}: {error}")]

    def _keep(self, wanted: int, *, reason: str) -> list[Happening]:
        before = self._fleet.wanted
        self._check_room(wanted)
        self._refused = None
        return [
            ("launcher", f"{wanted} generators are wanted, not {before}: {reason}"),
            *self._fleet.set_wanted(wanted),
        ]
