"""WaitWatch: looks at the run while the learner waits, says why it waits, and ends or outlasts a wait that is hopeless.

Consumes: the store's counts, roles and events.
Produces: the reason that status and live view show, a line in the log every few seconds, DeadEnd.
Waits for: nothing.
"""

from collections.abc import Callable
from contextlib import suppress

import structlog

from broker.clock import Clock
from broker.role_status import WaitsFor
from buffer.codec import unpack
from buffer.errors import BufferFault
from buffer.records import Claim
from buffer.store import Store
from configs.run import RunConfig
from learner.dead_end_cause import DeadEndCause
from learner.dead_ends import DeadEnds
from learner.errors import DeadEnd
from learner.run_look import look_at

_LOOK_EVERY_S = 1.0
_SAY_EVERY_S = 5.0
_EVENTS_READ = 100
_EVENTS_TOLD = 3
_OWN_NAME = "learner"
_OF_ALL = ("broker", "store")
"""Roles whose events concern every wait, beside the generators'."""

log = structlog.get_logger(__name__)


class WaitWatch:
    """Life: (begin -> (look | takes)* -> end)*."""

    def __init__(
        self,
        *,
        run: RunConfig,
        store: Store,
        who_is_missing: Callable[[], str],
        stand_by: Callable[[], object],
        clock: Clock,
    ) -> None:
        """`who_is_missing`: a phrase for the log. `stand_by` is called every few seconds of a wait."""
        self._run = run
        self._store = store
        self._who_is_missing = who_is_missing
        self._stand_by = stand_by
        self._clock = clock
        self._dead_ends = DeadEnds(run, clock=clock)
        self._cause: DeadEndCause | None = None
        self._look_at = clock()
        self._what = ""
        self._waits_for: WaitsFor = ""
        self._say_at = clock()

    def gauges(self) -> dict[str, str]:
        """What the learner's Pong says of the wait under way; may be asked from any thread."""
        cause = self._cause
        return {"waits_for": self._waits_for, "dead_end": _sentence(cause) if cause else ""}

    def begin(self, what: str, *, waits_for: WaitsFor, timeout_s: float, setting: str) -> None:
        """A wait for `what` begins, of at most `timeout_s` (which `setting` says) while it gets on."""
        self._what, self._waits_for = what, waits_for
        self._say_at = self._clock() + _SAY_EVERY_S
        self._dead_ends.begin(timeout_s=timeout_s, setting=setting)

    def look(self, missing: str, *, answered: int | None = None) -> str:
        """Look, at most once a second, and return why the learner waits; `missing` says what for.

        `answered`: answers in of the evaluation that is waited for; None for groups. Raises DeadEnd where the run is
        told to fail.
        """
        if self._clock() >= self._look_at:
            self._look_at = self._clock() + _LOOK_EVERY_S
            self._judge(answered=answered)
        if self._clock() >= self._say_at:
            self._say_at = self._clock() + _SAY_EVERY_S
            self._stand_by()
            self._say(missing)
        cause = f"; dead end: {_sentence(self._cause)}" if self._cause else ""
        return f"waiting for {self._what}: {missing}{cause}"

    def takes(self, claim: Claim) -> bool:
        """Whether the step may train on the claim. While no reward answers, groups without any are let go instead."""
        if self._cause is None or self._cause.kind != "rewards":
            return True
        payloads = zip(claim.group_ids, self._store.fetch(claim.group_ids), strict=True)
        unscored = [group_id for group_id, members in payloads if not any(map(_has_reward, members))]
        if unscored:
            self._store.reject(claim, group_ids=unscored, reason="no_reward")
        return not unscored

    def end(self) -> None:
        """What was waited for is there. Rewards that do not answer may still do so: that is for the next look."""
        self._waits_for = ""
        if self._cause and self._cause.kind != "rewards":
            self._overcome()

    def find_no_reward(self, *, num_failed: int) -> None:
        """An evaluation is complete, and no reward function has answered in it. Raises DeadEnd like `look`."""
        self._meet(self._dead_ends.find_no_reward(num_failed=num_failed))

    # --- dead ends -----------------------------------------------------------------------------------------------
    def _judge(self, *, answered: int | None) -> None:
        cause = self._dead_ends.judge(look_at(self._store, self._run, answered=answered))
        if cause:
            self._meet(cause)
        elif self._cause:
            self._overcome()

    def _meet(self, cause: DeadEndCause) -> None:
        if self._run.learner.dead_end.policy == "fail":
            raise DeadEnd(
                f"{self._what} must come, but {_sentence(cause)}; then go on with resume=true.{self._last_events()}"
            )
        if self._cause is None or self._cause.kind != cause.kind:
            self._cause = cause
            log.warning("dead_end", for_=self._what, cause=cause.what, remedy=cause.remedy)
            self._note(f"dead end, waits for {self._what}: {cause.what}")

    def _overcome(self) -> None:
        self._cause = None
        log.info("goes_on", for_=self._what)
        self._note("goes on after a dead end")

    def _say(self, missing: str) -> None:
        if self._cause:
            log.warning("dead_end", for_=self._what, cause=self._cause.what, remedy=self._cause.remedy)
        else:
            log.info("waiting", for_=self._what, missing=f"{missing}, {self._who_is_missing()}")

    def _note(self, text: str) -> None:
        """For people; a wait does not end for want of it."""
        with suppress(BufferFault):
            self._store.note_event(_OWN_NAME, text)

    def _last_events(self) -> str:
        """Of the generators and of what everybody needs."""
        roles = self._store.roles()
        concerned = {name for name, gauges in roles.items() if gauges.get("role") == "generator"} | set(_OF_ALL)
        events = [event for event in self._store.events(limit=_EVENTS_READ) if event.role in concerned]
        now = self._store.now()
        told = [f"{max(0.0, now - each.at):.0f} s ago {each.role}: {each.text}" for each in events[-_EVENTS_TOLD:]]
        # One line, whatever a role has said: a launcher shows the last line of a log.
        return " Last events: " + " | ".join(" ".join(each.split()) for each in told) + "." if told else ""


def _has_reward(payload: bytes) -> bool:
    return unpack(payload).reward.status == "ok"


def _sentence(cause: DeadEndCause) -> str:
    return f"{cause.what}: {cause.remedy}"
