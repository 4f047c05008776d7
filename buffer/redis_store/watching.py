"""RedisStore, what people watch: counts, gauges, metrics."""

from typing import Any

import msgspec

from buffer.codec import encode
from buffer.limits import METRICS_KEPT
from buffer.records import StoreCounts
from buffer.redis_scripts.watching import APPEND_METRICS, COUNTS, METRICS_AFTER, REPORT_ROLE
from buffer.redis_store.door import RedisDoor, text

_IN_SCRIPT_ORDER = (
    "admitted",
    "leased",
    "returned",
    "open",
    "ready",
    "claimed",
    "used",
    "retired",
    "quarantined",
    "accepted",
    "duplicates",
    "superseded",
    "open_members",
    "quarantined_members",
)


class RedisWatching(RedisDoor):
    """Operations that only look, and the gauges looked at."""

    def counts(self) -> StoreCounts:
        """See `Store.counts`."""
        *numbers, refused = self._run(COUNTS)
        by_reason = {text(reason): int(count) for reason, count in zip(refused[::2], refused[1::2], strict=True)}
        return StoreCounts(**dict(zip(_IN_SCRIPT_ORDER, numbers, strict=True)), refused=by_reason)

    def report_role(self, role_id: str, gauges: dict[str, Any]) -> None:
        """See `Store.report_role`."""
        self._run(REPORT_ROLE, role_id, encode(gauges))

    def roles(self) -> dict[str, dict[str, Any]]:
        """See `Store.roles`."""
        pipeline = self._client.pipeline(transaction=True)
        pipeline.hgetall(self._key("roles"))
        pipeline.hgetall(self._key("role_times"))
        with self._reaching():
            gauges, times = pipeline.execute()
        return {
            text(role_id): msgspec.msgpack.decode(packed) | {"reported_at": int(times[role_id]) / 1000}
            for role_id, packed in gauges.items()
        }

    def append_metrics(self, row: dict[str, Any]) -> None:
        """See `Store.append_metrics`."""
        self._run(APPEND_METRICS, encode(row), METRICS_KEPT)

    def metrics(self, *, after: int = 0) -> list[dict[str, Any]]:
        """See `Store.metrics`."""
        return [msgspec.msgpack.decode(row) for row in self._run(METRICS_AFTER, after)]
