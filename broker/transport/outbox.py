"""Outbox: trajectories a generator has made and the store does not have yet."""

import threading
import time

from slipstream.broker.messages import Nack
from slipstream.buffer.trajectory import Record, TrajectoryHeader
from slipstream.runtime.clock import Clock

_ANSWER_S = 15.0


class _Entry(Record):
    header: TrajectoryHeader
    payload: bytes


class Outbox:
    """Keeps each trajectory until Ack or fatal Nack; hands it out for sending as credit allows. Thread-safe.

    States of an entry: waiting -> sent -> gone; a non-fatal Nack puts it back to waiting until `retry_after_s` is over,
    and so does no answer within `_ANSWER_S`: what was on its way over a connection that broke for an instant is lost
    without a word, the answer too. The store takes nothing twice.
    """

    def __init__(self, *, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._waiting: dict[str, float] = {}
        self._sent_at: dict[str, float] = {}
        self._sent_bytes = 0
        self._max_messages = 0
        self.deferral_reason = ""
        """Why the broker would not have some of them yet, such as `store_full`; empty once it takes them again."""
        self._max_bytes = 0
        self.num_deferred = 0
        """Times a trajectory was to be sent again later."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_over_credit(self) -> bool:
        """Whether more is made than the broker takes: time to stop asking for prompts."""
        with self._lock:
            return bool(self._waiting) and len(self._entries) >= self._max_messages

    def lease_ids(self) -> set[str]:
        """Leases whose trajectories are still here."""
        with self._lock:
            return {entry.header.lease_id for entry in self._entries.values()}

    def set_credit(self, *, messages: int, size_bytes: int) -> None:
        """What may be sent without an acknowledgement."""
        with self._lock:
            self._max_messages, self._max_bytes = messages, size_bytes

    def add(self, header: TrajectoryHeader, payload: bytes) -> None:
        """Take one in."""
        with self._lock:
            self._entries[header.id] = _Entry(header, payload)
            self._waiting[header.id] = 0.0

    def take_sendable(self) -> list[tuple[TrajectoryHeader, bytes]]:
        """What may be sent now, oldest first; it counts as sent from here on."""
        now = self._clock()
        with self._lock:
            self._recall_unanswered(now)
            taken: list[tuple[TrajectoryHeader, bytes]] = []
            for trajectory_id, at in self._waiting.items():
                entry = self._entries[trajectory_id]
                if at > now:
                    continue
                if not self._has_credit(len(entry.payload), num_taken=len(taken)):
                    break
                self._sent_bytes += len(entry.payload)
                taken.append((entry.header, entry.payload))
            for header, _ in taken:
                del self._waiting[header.id]
                self._sent_at[header.id] = now
            return taken

    def acknowledge(self, ids: list[str]) -> None:
        """The store has these."""
        with self._lock:
            for trajectory_id in ids:
                self._forget(trajectory_id)
            self.deferral_reason = ""

    def reject(self, nack: Nack) -> None:
        """The store does not have this one: forget it, or keep it for later."""
        with self._lock:
            if nack.is_fatal:
                self._forget(nack.id)
            elif nack.id in self._sent_at:
                self._wait(nack.id, until=self._clock() + nack.retry_after_s)
                self.deferral_reason = nack.reason
                self.num_deferred += 1

    def resend_all(self) -> None:
        """A new broker: everything unacknowledged waits again."""
        with self._lock:
            self._waiting = dict.fromkeys(self._entries, 0.0)
            self._sent_at = {}
            self._sent_bytes = 0

    def _recall_unanswered(self, now: float) -> None:
        for trajectory_id in [each for each, at in self._sent_at.items() if now - at > _ANSWER_S]:
            self._wait(trajectory_id, until=0.0)

    def _wait(self, trajectory_id: str, *, until: float) -> None:
        del self._sent_at[trajectory_id]
        self._sent_bytes -= len(self._entries[trajectory_id].payload)
        self._waiting[trajectory_id] = until

    def _has_credit(self, size_bytes: int, *, num_taken: int) -> bool:
        sent = len(self._entries) - len(self._waiting) + num_taken
        fits = self._sent_bytes + size_bytes <= self._max_bytes
        return sent == 0 or (sent < self._max_messages and fits)

    def _forget(self, trajectory_id: str) -> None:
        entry = self._entries.pop(trajectory_id, None)
        self._waiting.pop(trajectory_id, None)
        if entry and self._sent_at.pop(trajectory_id, None) is not None:
            self._sent_bytes -= len(entry.payload)
