"""LiveGroups: the groups of a store that is in use, read beside those who work with it."""

from collections.abc import Iterator

from slipstream.buffer.archive.trajectory_filter import Place, StoredTrajectory
from slipstream.buffer.codec import unpack
from slipstream.buffer.redis.connection import RedisConnection, text
from slipstream.buffer.trajectory import group_of, lease_of

_READ_AT_ONCE = 32
"""Groups whose payloads are in memory together."""
_LISTED: tuple[tuple[str, str, Place], ...] = (("used_steps", "used", "used"), ("claims", "claimed", "claimed"))
"""Steps, the groups of each, and where those are."""
_QUEUED: tuple[Place, ...] = ("ready", "open")
"""Places that are sorted sets of groups."""


class LiveGroups(RedisConnection):
    """Reads a run's groups, and changes nothing.

    A look, not an audit: it holds nobody up, so a group that moves meanwhile is told at one of its places, and one that
    leaves the store meanwhile is left out.
    """

    def read(self, *, trajectory_id: str | None = None, place: str | None = None) -> Iterator[StoredTrajectory]:
        """Every trajectory, groups that are over first; those of one place, or of one trajectory's group."""
        wanted = group_of(lease_of(trajectory_id)) if trajectory_id else None
        places = {
            group_id: at
            for group_id, at in self._places().items()
            if wanted in (None, group_id) and (place is None or at in (None, place))
        }
        group_ids = list(places)
        for start in range(0, len(group_ids), _READ_AT_ONCE):
            chunk = group_ids[start : start + _READ_AT_ONCE]
            found = self._members(chunk, places)
            yield from (stored for stored in found if place in (None, stored.place))

    def _places(self) -> dict[str, Place | None]:
        """Group -> where it is; None for one that is over: its record says how it ended."""
        with self._mapped_errors():
            places: dict[str, Place | None] = dict.fromkeys(self._sorted("finished"))
            for steps, groups, place in _LISTED:
                for step in self._sorted(steps):
                    listed = self._client.lrange(self._key(f"{groups}:{step}"), 0, -1)
                    places |= dict.fromkeys(map(text, listed), place)
            for place in _QUEUED:
                places |= dict.fromkeys(self._sorted(place), place)
            return places

    def _sorted(self, name: str) -> list[str]:
        return [text(member) for member in self._client.zrange(self._key(name), 0, -1)]

    def _members(self, group_ids: list[str], places: dict[str, Place | None]) -> Iterator[StoredTrajectory]:
        pipeline = self._client.pipeline(transaction=False)
        for group_id in group_ids:
            pipeline.hmget(self._key(f"group:{group_id}"), ["outcome", "reason", "steps"])
            pipeline.hgetall(self._key(f"payloads:{group_id}"))
        with self._mapped_errors():
            answers = pipeline.execute()
        for group_id, facts, payloads in zip(group_ids, answers[::2], answers[1::2], strict=True):
            outcome, reason, steps = map(text, facts)
            for index in sorted(payloads, key=int):
                yield StoredTrajectory(
                    unpack(payloads[index]),
                    outcome or places[group_id],  # type: ignore[arg-type]
                    reason,
                    [int(step) for step in steps.split(",") if step],
                )
