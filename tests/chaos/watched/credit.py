"""Credit: an independent account of what an outbox may and must send."""

import threading
import time

from slipstream.broker.messages import Nack, Welcome
from tests.chaos.watched.journal import Journal

_CHECKS = 4
"""Client steps within which a due trajectory covered by credit must be sent."""
_GRACE_S = 0.2


class Credit:
    """Follows each trajectory from the outbox to its answer, and writes `overrun` or `overdue` into the journal.

    overrun: more is in flight than the broker granted. overdue: a trajectory waits although it may be sent: it was
    just finished, deferred until now, unanswered for `answer_timeout_s`, or sent to a replaced broker.
    """

    answer_timeout_s = 15.0

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._lock = threading.Lock()
        self._max_messages = self._max_bytes = 0
        self._broker = ""
        self._is_joined = False
        self._sizes: dict[str, int] = {}
        self._due_at: dict[str, float] = {}
        self._sent_at: dict[str, float] = {}
        self._checks: dict[str, int] = {}
        self._was_reported = False

    def add(self, trajectory_id: str, size_bytes: int) -> None:
        with self._lock:
            self._sizes[trajectory_id] = size_bytes
            self._due_at[trajectory_id] = time.monotonic()

    def welcome(self, welcome: Welcome) -> None:
        """A broker answers; a repeated answer of the same broker is ignored."""
        with self._lock:
            if self._is_joined and welcome.broker_incarnation == self._broker:
                return
            self._is_joined, self._broker = True, welcome.broker_incarnation
            self._max_messages, self._max_bytes = welcome.credit_messages, welcome.credit_bytes
            self._due_at = dict.fromkeys(self._sizes, time.monotonic())
            self._sent_at = {}
            self._checks = {}

    def leave(self) -> None:
        """The connection is lost, or the broker does not know this peer."""
        with self._lock:
            self._is_joined = False

    def send(self, trajectory_id: str, size_bytes: int) -> None:
        with self._lock:
            self._due_at.pop(trajectory_id, None)
            self._checks.pop(trajectory_id, None)
            self._sent_at.pop(trajectory_id, None)
            # Exclude those that the outbox may have just taken back.
            unexpired = time.monotonic() - self.answer_timeout_s + _GRACE_S
            under_way = [each for each, at in self._sent_at.items() if at > unexpired]
            messages, sent_bytes = len(under_way), sum(self._sizes.get(each, 0) for each in under_way)
            # One message is always allowed.
            if messages and (messages >= self._max_messages or sent_bytes + size_bytes > self._max_bytes):
                facts = {"messages": messages, "bytes": sent_bytes}
                self._report("overrun", id=trajectory_id, **facts)
            self._sent_at[trajectory_id] = time.monotonic()

    def acknowledge(self, ids: list[str]) -> None:
        with self._lock:
            for trajectory_id in ids:
                self._remove(trajectory_id)

    def reject(self, nack: Nack) -> None:
        with self._lock:
            if nack.is_fatal:
                self._remove(nack.id)
            elif self._sent_at.pop(nack.id, None) is not None:
                self._due_at[nack.id] = time.monotonic() + nack.retry_after_s

    def check(self) -> None:
        """Call once per client step, after its sends."""
        with self._lock:
            if not self._is_joined:
                return
            now = time.monotonic()
            # Count those without an answer as waiting again.
            unanswered_before = now - self.answer_timeout_s - _GRACE_S
            for each in [each for each, at in self._sent_at.items() if at < unanswered_before]:
                del self._sent_at[each]
                if each in self._sizes:
                    self._due_at[each] = now
            sent_bytes = sum(self._sizes.get(each, 0) for each in self._sent_at)
            # The largest, because the outbox sends in order and stops at the first without credit.
            largest = max((self._sizes[each] for each in self._due_at), default=0)
            has_room = len(self._sent_at) < self._max_messages and sent_bytes + largest <= self._max_bytes
            late = [each for each, at in self._due_at.items() if at < now - _GRACE_S]
            late = late if has_room or not self._sent_at else []
            self._checks = {each: self._checks.get(each, 0) + 1 for each in late}
            for each, checks in self._checks.items():
                if checks >= _CHECKS:
                    self._report("overdue", id=each)

    def _remove(self, trajectory_id: str) -> None:
        for table in (self._sizes, self._due_at, self._sent_at, self._checks):
            table.pop(trajectory_id, None)

    def _report(self, kind: str, **facts: object) -> None:
        if not self._was_reported:
            self._journal.write(kind, **facts)
        self._was_reported = True
