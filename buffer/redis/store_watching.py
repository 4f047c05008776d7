"""RedisStore, what people watch: counts, gauges, metrics."""

from typing import Any

import msgspec

from slipstream.buffer.accounting import StoreCounts
from slipstream.buffer.codec import encode
from slipstream.buffer.records import (
    EVENT_CHARACTERS_KEPT,
    EVENTS_KEPT,
    METRICS_KEPT,
    ROLES_KEPT,
    Addressee,
    Event,
    MetricsRows,
    progress_mark,
)
from slipstream.buffer.redis.connection import RedisConnection, text
from slipstream.buffer.redis.scripts.watching import (
    APPEND_METRICS,
    COUNTS,
    METRICS_AFTER,
    NOTE_EVENT,
    READY_VERSIONS,
    REPORT_ROLE,
    REQUEST,
    TAKE_REQUESTS,
)

_IN_SCRIPT_ORDER = (
    "admitted",
    "leased",
    "returned",
    "open",
    "ready",
    "claimed",
    "used",
    "reusable",
    "accepted",
    "duplicates",
    "superseded",
    "unarchived",
    "open_members",
    "short_members",
    "payload_bytes",
    "accepted_tokens",
    "superseded_tokens",
    "wasted_tokens",
    "trained",
    "trained_tokens",
    "became_ready",
)
_TABLES = ("refused", "outcomes", "outcome_members", "reasons")


class RedisWatching(RedisConnection):
    """Operations that only look, and the gauges looked at."""

    def counts(self) -> StoreCounts:
        """See `Store.counts`."""
        answer = self._run(COUNTS)
        numbers, tables = answer[: len(_IN_SCRIPT_ORDER)], answer[len(_IN_SCRIPT_ORDER) :]
        named: dict[str, Any] = dict(zip(_TABLES, map(_as_counts, tables), strict=True))
        return StoreCounts(**named, **dict(zip(_IN_SCRIPT_ORDER, numbers, strict=True)))

    def now(self) -> float:
        """See `Store.now`."""
        if self._clock is not None:
            return self._clock()
        with self._mapped_errors():
            seconds, microseconds = self._client.time()
        return float(seconds + microseconds / 1e6)

    def ready_versions(self) -> dict[int, int]:
        """See `Store.ready_versions`."""
        return {int(version): count for version, count in _as_counts(self._run(READY_VERSIONS)).items()}

    def report_role(self, role_id: str, gauges: dict[str, Any]) -> None:
        """See `Store.report_role`."""
        self._run(REPORT_ROLE, role_id, encode(gauges), progress_mark(gauges), ROLES_KEPT)

    def roles(self) -> dict[str, dict[str, Any]]:
        """See `Store.roles`."""
        pipeline = self._client.pipeline(transaction=True)
        for name in ("roles", "role_times", "role_progress_times"):
            pipeline.hgetall(self._key(name))
        with self._mapped_errors():
            gauges, reported, progressed = pipeline.execute()
        stamps = {"reported_at": reported, "progressed_at": progressed}
        return {
            text(role_id): msgspec.msgpack.decode(packed)
            | {stamp: int(times[role_id]) / 1000 for stamp, times in stamps.items() if role_id in times}
            for role_id, packed in gauges.items()
        }

    def record_event(self, role_id: str, text: str) -> None:
        """See `Store.record_event`."""
        self._run(NOTE_EVENT, role_id, text[:EVENT_CHARACTERS_KEPT], EVENTS_KEPT)

    def request(self, addressee: Addressee, subject: str, value: str) -> None:
        """See `Store.request`."""
        self._run(REQUEST, f"{addressee}_requests", subject, value)

    def take_requests(self, addressee: Addressee) -> dict[str, str]:
        """See `Store.take_requests`."""
        answer = self._run(TAKE_REQUESTS, f"{addressee}_requests")
        return {text(subject): text(value) for subject, value in zip(answer[::2], answer[1::2], strict=True)}

    def events(self, *, limit: int) -> list[Event]:
        """See `Store.events`."""
        with self._mapped_errors():
            packed = self._client.lrange(self._key("events"), -limit, -1) if limit else []
        rows = [msgspec.msgpack.decode(each, type=tuple[int, str, str]) for each in packed]
        return [Event(at / 1000, role_id, said) for at, role_id, said in rows]

    def append_metrics(self, row: dict[str, Any]) -> None:
        """See `Store.append_metrics`."""
        self._run(APPEND_METRICS, encode(row), METRICS_KEPT)

    def metrics(self, *, after: int = 0) -> MetricsRows:
        """See `Store.metrics`."""
        last, packed = self._run(METRICS_AFTER, after)
        return MetricsRows(last, [msgspec.msgpack.decode(row) for row in packed])


def _as_counts(flat: list[bytes]) -> dict[str, int]:
    """A hash as a script answers it: name, value, name, value."""
    return {text(name): int(count) for name, count in zip(flat[::2], flat[1::2], strict=True)}
