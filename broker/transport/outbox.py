"""Outbox: finished trajectories that the store has not acknowledged yet."""

import threading
import time

from slipstream.broker.messages import Nack
from slipstream.buffer.codec import Packed
from slipstream.buffer.trajectory import TrajectoryHeader
from slipstream.runtime.clock import Clock

_ANSWER_TIMEOUT_S = 15.0


class Outbox:
    """Holds each trajectory until its Ack or fatal Nack, and releases it for sending within the credit. Thread-safe.

    States of an entry: waiting -> sent -> gone. A non-fatal Nack or a missing answer (a lost connection drops frames
    silently) returns it to waiting.
    """

    def __init__(self, *, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[str, Packed] = {}
        self._waiting: dict[str, float] = {}
        self._sent_at: dict[str, float] = {}
        self._sent_bytes = self._max_messages = self._max_bytes = 0
        self.deferral_reason = ""
        """Reason of the newest non-fatal Nack; cleared by the next Ack."""
        self.num_deferred = 0
        """Non-fatal Nacks so far."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_over_credit(self) -> bool:
        """Whether the backlog exceeds the credit, so that no prompts should be requested."""
        with self._lock:
            return bool(self._waiting) and len(self._entries) >= self._max_messages

    def lease_ids(self) -> set[str]:
        with self._lock:
            return {header.lease_id for header, _ in self._entries.values()}

    def set_credit(self, *, messages: int, size_bytes: int) -> None:
        with self._lock:
            self._max_messages, self._max_bytes = messages, size_bytes

    def add(self, header: TrajectoryHeader, payload: bytes) -> None:
        with self._lock:
            self._entries[header.id] = header, payload
            self._waiting[header.id] = 0.0

    def pop_sendable(self) -> list[Packed]:
        """Return the trajectories to send now, oldest first, and mark them as sent."""
        now = self._clock()
        with self._lock:
            for trajectory_id in [each for each, at in self._sent_at.items() if now - at > _ANSWER_TIMEOUT_S]:
                self._wait(trajectory_id, until=0.0)
            sendable: list[Packed] = []
            for trajectory_id, at in self._waiting.items():
                header, payload = self._entries[trajectory_id]
                if at > now:
                    continue
                sent = len(self._entries) - len(self._waiting) + len(sendable)
                fits = self._sent_bytes + len(payload) <= self._max_bytes
                # Always keep one in flight, so that a trajectory larger than the credit does not block the outbox.
                if sent and not (sent < self._max_messages and fits):
                    break
                self._sent_bytes += len(payload)
                sendable.append((header, payload))
            for header, _ in sendable:
                del self._waiting[header.id]
                self._sent_at[header.id] = now
            return sendable

    def acknowledge(self, ids: list[str]) -> None:
        with self._lock:
            for trajectory_id in ids:
                self._remove(trajectory_id)
            self.deferral_reason = ""

    def reject(self, nack: Nack) -> None:
        """Remove the trajectory of a fatal Nack; schedule a retry otherwise."""
        with self._lock:
            if nack.is_fatal:
                self._remove(nack.id)
            # A late Nack from before a reconnect must not delay a waiting trajectory.
            elif nack.id in self._sent_at:
                self._wait(nack.id, until=self._clock() + nack.retry_after_s)
                self.deferral_reason = nack.reason
                self.num_deferred += 1

    def resend_all(self) -> None:
        with self._lock:
            self._waiting = dict.fromkeys(self._entries, 0.0)
            self._sent_at = {}
            self._sent_bytes = 0

    def _wait(self, trajectory_id: str, *, until: float) -> None:
        del self._sent_at[trajectory_id]
        self._sent_bytes -= len(self._entries[trajectory_id][1])
        self._waiting[trajectory_id] = until

    def _remove(self, trajectory_id: str) -> None:
        entry = self._entries.pop(trajectory_id, None)
        self._waiting.pop(trajectory_id, None)
        if entry and self._sent_at.pop(trajectory_id, None) is not None:
            self._sent_bytes -= len(entry[1])
