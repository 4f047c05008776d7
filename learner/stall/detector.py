"""StallDetector: looks at the run while the learner waits, says why it waits, and ends or outlasts a wait that is hopeless.

Consumes: the store's counts, roles and events.
Produces: the reason that status and live view show, a line in the log every few seconds, DeadEndError.
Waits for: nothing.
"""

from collections.abc import Callable
from contextlib import suppress

import structlog

from slipstream.broker.status.role_status import WaitsFor
from slipstream.buffer.codec import unpack
from slipstream.buffer.errors import ReplayBufferError
from slipstream.buffer.records import Claim
from slipstream.buffer.store import Store
from slipstream.configs.run import RunConfig
from slipstream.learner.errors import DeadEndError
from slipstream.learner.stall.causes import DeadEndCause, failing_rewards, laggards, slowness, standstill
from slipstream.learner.stall.progress import AdoptionLag, Arrivals, RewardTally, RunProgress, look_at
from slipstream.runtime.clock import Clock

log = structlog.get_logger(__name__)


# @@ DeadEndDetector: says whether what the learner waits for will not come, and why; knows a run by looks at it alone.
class DeadEndDetector:
    """Life: (begin -> judge*)*, one `begin` for each wait.

    A run that is slow but gets on is none: whatever helps the wait starts the time anew, up to the wait's own limit.
    """

    def __init__(self, run: RunConfig, *, clock: Clock) -> None:
        self._run = run
        self._config = run.learner.dead_end
        self._clock = clock
        self._arrivals = Arrivals(group_size=run.generators.members_per_group, clock=clock)
        self._rewards = RewardTally()
        self._adoption = AdoptionLag(clock=clock)
        self._num_fatal = self._config.failed_batches * run.claimed_groups_per_step * run.generators.group_size
        self.begin(timeout_s=run.learner.wait_timeout_s, setting="learner.wait_timeout_s")

    def begin(self, *, timeout_s: float, setting: str) -> None:
        """A wait begins that may last `timeout_s`, as `setting` says, once somebody is there to work for it."""
        self._timeout_s = timeout_s
        self._setting = setting
        self._works_since: float | None = None
        self._arrivals.begin()

    def judge(self, look: RunProgress) -> DeadEndCause | None:
        """Why the wait is hopeless, if it is."""
        self._arrivals.note(look)
        self._rewards.note(look)
        self._adoption.note(look)
        if look.holding and self._works_since is None:
            self._works_since = self._clock()
        return self._by_rewards() or self._by_adoption(look) or self._by_standstill(look) or self._by_slowness()

    def find_no_reward(self, *, num_failed: int) -> DeadEndCause:
        """So many answers have come, and none has a reward: it stays so until a look shows one that has."""
        self._rewards.num_failed = max(self._rewards.num_failed, self._num_fatal)
        return failing_rewards(self._run, num_failed=num_failed)

    def _by_rewards(self) -> DeadEndCause | None:
        # A replay trains on the rewards that are stored.
        if self._run.mode == "replay" or self._rewards.num_failed < self._num_fatal:
            return None
        return failing_rewards(self._run, num_failed=self._rewards.num_failed)

    def _by_adoption(self, look: RunProgress) -> DeadEndCause | None:
        lag_s = self._adoption.seconds
        return laggards(look, lag_s=lag_s) if lag_s >= self._config.start_after_s else None

    def _by_standstill(self, look: RunProgress) -> DeadEndCause | None:
        may_yet_start = any(generator.is_starting for generator in look.living)
        allowed_s = max(self._config.after_s, self._config.start_after_s) if may_yet_start else self._config.after_s
        if self._arrivals.idle_s < allowed_s:
            return None
        return standstill(look, self._run, arrivals=self._arrivals, num_failed=self._rewards.num_failed)

    def _by_slowness(self) -> DeadEndCause | None:
        waited_s = 0.0 if self._works_since is None else self._clock() - self._works_since
        if waited_s < self._timeout_s:
            return None
        return slowness(waited_s=waited_s, accepted=self._arrivals.accepted, setting=self._setting)


_LOOK_EVERY_S = 1.0
_SAY_EVERY_S = 5.0
_EVENTS_READ = 100
_EVENTS_TOLD = 3
_OWN_NAME = "learner"
_OF_ALL = ("broker", "store")
"""Roles whose events concern every wait, beside the generators'."""


class StallDetector:
    """Life: (begin -> (look | takes)* -> end)*."""

    def __init__(
        self,
        *,
        run: RunConfig,
        store: Store,
        who_is_missing: Callable[[], str],
        keep_alive: Callable[[], object],
        clock: Clock,
    ) -> None:
        """`who_is_missing`: a phrase for the log. `keep_alive` is called every few seconds of a wait."""
        self._run = run
        self._store = store
        self._who_is_missing = who_is_missing
        self._stand_by = keep_alive
        self._clock = clock
        self._dead_ends = DeadEndDetector(run, clock=clock)
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

        `answered`: answers in of the evaluation that is waited for; None for groups. Raises DeadEndError where the run is
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
        """An evaluation is complete, and no reward function has answered in it. Raises DeadEndError like `look`."""
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
            raise DeadEndError(
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
        with suppress(ReplayBufferError):
            self._store.record_event(_OWN_NAME, text)

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
