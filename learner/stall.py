"""StallDetector: detects dead ends of the learner's waits, then fails or keeps waiting.

Produces: the reason in status and live view, a log line every few seconds, DeadEndError.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import structlog

from slipstream.buffer.codec import unpack
from slipstream.buffer.errors import ReplayBufferError
from slipstream.buffer.records import Claim
from slipstream.buffer.role_reports import WaitsFor
from slipstream.buffer.store import Store
from slipstream.configs.learner import PAUSE_REQUEST
from slipstream.configs.run import RunConfig
from slipstream.learner.errors import DeadEndError
from slipstream.learner.stall_causes import Progress, StallCause, find_cause, no_reward, take_snapshot
from slipstream.runtime.clock import Clock

_CHECK_EVERY_S = 1.0
_LOG_EVERY_S = 5.0
_EVENTS_READ, _EVENTS_SHOWN = 100, 3
_PAUSE_POLL_S = 0.5

log = structlog.get_logger(__name__)


class StallDetector:
    """Life: (begin -> (poll | reject_unscored)* -> end)*.

    Waits with progress have their own limit.
    """

    def __init__(
        self,
        *,
        run: RunConfig,
        store: Store,
        describe: Callable[[], str],
        keep_alive: Callable[[], object],
        clock: Clock,
    ) -> None:
        """`describe`: who is missing, for the log. `keep_alive` runs every few seconds of a wait."""
        self._run = run
        self._store = store
        self._describe = describe
        self._keep_alive = keep_alive
        self._clock = clock
        self._progress = Progress(run, clock=clock)
        self._cause: StallCause | None = None
        self._goal = ""
        self._disk = ""
        self._excused_until = -math.inf
        self._waits_for: WaitsFor = ""
        self._check_at = self._log_at = clock()

    def gauges(self) -> dict[str, str]:
        """State of the wait, as gauges. Thread-safe."""
        return {"waits_for": self._waits_for, "dead_end": str(self._cause or "")}

    def begin(self, goal: str, *, waits_for: WaitsFor) -> None:
        """Start a wait for `goal`."""
        self._goal, self._waits_for = goal, waits_for
        self._log_at = self._clock() + _LOG_EVERY_S
        self._progress.begin()

    def poll(self, missing: str, *, answered: int | None = None) -> str:
        """Check the run at most once a second. Returns the reason for the wait, with `missing`.

        `answered`: answers of the awaited evaluation. Raises DeadEndError with `learner.stall.policy=fail`.
        """
        now = self._clock()
        if now >= self._check_at:
            self._check_at = now + _CHECK_EVERY_S
            self._disk = self._store.full_disk()
            if self._disk:
                # Not a dead end: every role waits for disk space, and none can report.
                self._excused_until = now + self._run.broker.peer_timeout_s
            if now < self._excused_until:
                self._progress.excuse()
            else:
                self._progress.update(take_snapshot(self._store, self._run, answered=answered))
                self._set_cause(find_cause(self._progress))
        if now >= self._log_at:
            self._log_at = now + _LOG_EVERY_S
            # The other ranks wait in a collective, which must not time out.
            self._keep_alive()
            if self._cause:
                self._warn(self._cause)
            else:
                log.info("waiting", goal=self._goal, missing=f"{missing}, {self._describe()}")
        if self._disk:
            return f"waiting for {self._goal}, which needs room on the disk of the store: {self._disk}"
        return f"waiting for {self._goal}: {missing}" + (f"; dead end: {self._cause}" if self._cause else "")

    def while_paused(self) -> Iterator[str]:
        """Yield the reason twice a second while a user pauses the run."""
        if PAUSE_REQUEST not in self._store.requests("learner"):
            return
        self._record("paused, as requested")
        self._waits_for, self._log_at = "user", -math.inf
        while PAUSE_REQUEST in self._store.requests("learner"):
            if self._clock() >= self._log_at:
                self._log_at = self._clock() + _LOG_EVERY_S
                self._keep_alive()
                log.info("paused")
            yield "paused: `slipstream pause --off` resumes the run"
            time.sleep(_PAUSE_POLL_S)
        self._waits_for = ""
        self._record("resumed, as requested")

    def reject_unscored(self, claim: Claim) -> bool:
        """While rewards are the cause, reject groups without any reward. Returns whether the claim had such groups.

        Otherwise an outage of the reward service would use up the run's steps.
        """
        if self._cause is None or self._cause.kind != "rewards":
            return False
        payloads = zip(claim.group_ids, self._store.fetch(claim.group_ids), strict=True)
        unscored = [name for name, group in payloads if not any(unpack(each).reward.status == "ok" for each in group)]
        if unscored:
            self._store.reject(claim, group_ids=unscored, reason="no_reward")
        return bool(unscored)

    def end(self) -> None:
        """A `rewards` cause persists: groups without rewards still arrive."""
        self._waits_for = ""
        if self._cause and self._cause.kind != "rewards":
            self._set_cause(None)

    def report_no_reward(self, *, num_failed: int) -> None:
        """Report a complete evaluation without any reward. Raises DeadEndError like `poll`."""
        self._progress.record_no_reward(num_failed=num_failed)
        self._set_cause(no_reward(self._run, num_failed=num_failed))

    def _set_cause(self, cause: StallCause | None) -> None:
        if cause and self._run.learner.stall.policy == "fail":
            roles = {name for name, gauges in self._store.roles().items() if gauges.get("role") == "generator"}
            roles |= {*self._run.broker.names, "store"}
            last = [e for e in self._store.events(limit=_EVENTS_READ) if e.role in roles][-_EVENTS_SHOWN:]
            now = self._store.now()
            # On one line, for the launcher.
            shown = [f"{max(0.0, now - e.at):.0f} s ago {e.role}: {' '.join(e.text.split())}" for e in last]
            events = f" Last events: {' | '.join(shown)}." if shown else ""
            raise DeadEndError(f"{self._goal} must come, but {cause}; then continue with resume=true.{events}")
        if cause is None and self._cause:
            self._cause = None
            log.info("dead_end_resolved", goal=self._goal)
            self._record("dead end resolved")
        elif cause:
            # Within one kind, only counts and times change.
            is_new = self._cause is None or self._cause.kind != cause.kind
            self._cause = cause
            if is_new:
                self._warn(cause)
                self._record(f"dead end, waits for {self._goal}: {cause.problem}")

    def _warn(self, cause: StallCause) -> None:
        log.warning("dead_end", goal=self._goal, cause=cause.problem, remedy=cause.remedy)

    def _record(self, text: str) -> None:
        # A store that rejects an event must not end the wait.
        with suppress(ReplayBufferError):
            self._store.record_event("learner", text)
