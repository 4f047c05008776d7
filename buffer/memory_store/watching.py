"""MemoryStore, what people watch: counts, gauges, metrics."""

from collections import Counter
from typing import Any

import msgspec

from buffer.books import StoreCounts
from buffer.codec import encode
from buffer.leases import is_evaluation
from buffer.limits import EVENT_CHARACTERS_KEPT, ROLES_KEPT
from buffer.memory_store.state import MemoryState
from buffer.progress import progress_mark
from buffer.records import Addressee, Event, MetricsRows

_COUNTERS = ("accepted_tokens", "superseded_tokens", "wasted_tokens", "trained", "trained_tokens")


class MemoryWatching(MemoryState):
    """Operations that only look, and the gauges looked at."""

    def counts(self) -> StoreCounts:
        """See `Store.counts`."""
        with self._changed:
            open_sizes = self._open_sizes()
            held = [group for group in self._groups.values() if not group.outcome]
            return StoreCounts(
                admitted=self._opened().admitted,
                became_ready=self._opened().ready_sequence,
                leased=len(self._leases),
                returned=len(self._returned),
                open=len(open_sizes),
                ready=len(self._ready),
                demoted=len(self._demoted),
                claimed=sum(len(claim.group_ids) for claim in self._claims.values()),
                used=sum(len(used.group_ids) for used in self._used.values()),
                reusable=len(self._reusable),
                accepted=self._counters["accepted"],
                duplicates=self._counters["duplicate"],
                superseded=self._counters["superseded"],
                refused=dict(self._refused),
                outcomes=dict(self._outcomes),
                outcome_members=dict(self._outcome_members),
                reasons=dict(self._reasons),
                unarchived=len(self._finished),
                open_members=sum(open_sizes),
                short_members=sum(group.size - len(group.members) for group in held if group.is_closed),
                payload_bytes=sum(group.num_bytes for group in self._groups.values()),
                **{name: self._counters[name] for name in _COUNTERS},
            )

    def now(self) -> float:
        """See `Store.now`."""
        return self._clock()

    def ready_versions(self) -> dict[int, int]:
        """See `Store.ready_versions`."""
        with self._changed:
            self._opened()
            return dict(Counter(self._groups[group_id].oldest_version for group_id in self._ready.values()))

    def report_role(self, role_id: str, gauges: dict[str, Any]) -> None:
        """See `Store.report_role`."""
        with self._changed:
            self._opened()
            self._roles[role_id] = (encode(gauges), self._now())
            mark = progress_mark(gauges)
            if mark and self._progress.get(role_id, ("", 0))[0] != mark:
                self._progress[role_id] = (mark, self._now())
            if len(self._roles) > ROLES_KEPT:
                self._forget_longest_unheard(but=role_id)

    def roles(self) -> dict[str, dict[str, Any]]:
        """See `Store.roles`."""
        with self._changed:
            return {
                role_id: msgspec.msgpack.decode(packed)
                | {"reported_at": reported_at / 1000}
                | self._progressed(role_id)
                for role_id, (packed, reported_at) in self._roles.items()
            }

    def _forget_longest_unheard(self, *, but: str) -> None:
        _, forgotten = min((at, role_id) for role_id, (_, at) in self._roles.items() if role_id != but)
        del self._roles[forgotten]
        self._progress.pop(forgotten, None)

    def _progressed(self, role_id: str) -> dict[str, float]:
        return {"progressed_at": self._progress[role_id][1] / 1000} if role_id in self._progress else {}

    def note_event(self, role_id: str, text: str) -> None:
        """See `Store.note_event`."""
        with self._changed:
            self._opened()
            self._events.append(Event(self._now() / 1000, role_id, text[:EVENT_CHARACTERS_KEPT]))

    def request(self, addressee: Addressee, subject: str, value: str) -> None:
        """See `Store.request`."""
        with self._changed:
            self._opened()
            self._requests[addressee][subject] = value

    def take_requests(self, addressee: Addressee) -> dict[str, str]:
        """See `Store.take_requests`."""
        with self._changed:
            self._opened()
            return self._requests.pop(addressee, {})

    def events(self, *, limit: int) -> list[Event]:
        """See `Store.events`."""
        with self._changed:
            return list(self._events)[-limit:] if limit else []

    def append_metrics(self, row: dict[str, Any]) -> None:
        """See `Store.append_metrics`."""
        with self._changed:
            self._opened()
            self._metrics.append(encode(row))
            self._counters["metrics"] += 1

    def metrics(self, *, after: int = 0) -> MetricsRows:
        """See `Store.metrics`."""
        with self._changed:
            self._opened()
            last = self._counters["metrics"]
            packed = list(self._metrics)[max(0, after - (last - len(self._metrics))) :]
            return MetricsRows(last, [msgspec.msgpack.decode(row) for row in packed])

    def _open_sizes(self) -> list[int]:
        groups = (group for group in self._groups.values() if not is_evaluation(group.id))
        waiting = (group for group in groups if not group.outcome and not group.is_closed)
        return [len(group.members) for group in waiting if 0 < len(group.members) < group.size]
