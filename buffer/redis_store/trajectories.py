"""RedisStore, trajectories: what arrives, and what is kept of what is refused."""

from typing import Any

import msgspec
import redis

from buffer.limits import FRAME_BYTES_KEPT, FRAMES_KEPT
from buffer.records import Insertion
from buffer.redis_scripts.trajectories import INSERT, INSERT_EVALUATION, QUARANTINE_FRAME
from buffer.redis_store.door import RedisDoor, is_out_of_memory, text
from buffer.trajectory import TrajectoryHeader

_PIPELINED_AT_ONCE = 128
"""Bounds what waits in the connection's buffers."""


class RedisTrajectories(RedisDoor):
    """Operations on arriving trajectories."""

    def insert(self, trajectories: list[tuple[TrajectoryHeader, bytes]]) -> list[Insertion]:
        """See `Store.insert`."""
        insertions: list[Insertion] = []
        for start in range(0, len(trajectories), _PIPELINED_AT_ONCE):
            insertions += self._insert_chunk(trajectories[start : start + _PIPELINED_AT_ONCE])
        return insertions

    def quarantine(self, reason: str, frame: bytes) -> None:
        """See `Store.quarantine`."""
        entry = msgspec.msgpack.encode((reason, frame[:FRAME_BYTES_KEPT]))
        self._run(QUARANTINE_FRAME, reason, entry, FRAMES_KEPT)

    def quarantined_frames(self) -> list[tuple[str, bytes]]:
        """Reason and first bytes of the newest refused frames, newest first."""
        with self._reaching():
            entries = self._client.lrange(self._key("quarantine"), 0, -1)
        return [msgspec.msgpack.decode(entry, type=tuple[str, bytes]) for entry in entries]

    def _insert_chunk(self, trajectories: list[tuple[TrajectoryHeader, bytes]]) -> list[Insertion]:
        pipeline = self._client.pipeline(transaction=False)
        for header, payload in trajectories:
            if header.purpose == "train":
                self._run(INSERT, *_train_arguments(header), payload, client=pipeline)
            else:
                self._run(INSERT_EVALUATION, *_evaluation_arguments(header), client=pipeline)
        with self._reaching():
            answers = pipeline.execute(raise_on_error=False)
        return [self._insertion(answer) for answer in answers]

    def _insertion(self, answer: Any) -> Insertion:
        if isinstance(answer, redis.ResponseError) and is_out_of_memory(answer):
            return Insertion(outcome="refused", reason="store_full")
        if isinstance(answer, Exception):
            raise self._fault(answer) from answer
        outcome, reason, is_ready = answer
        return Insertion(outcome=text(outcome), reason=text(reason), group_is_ready=bool(is_ready))  # type: ignore[arg-type]


def _train_arguments(header: TrajectoryHeader) -> list[Any]:
    return [header.id, header.group_id, header.index, header.group_size, header.newest_version, header.checksum]


def _evaluation_arguments(header: TrajectoryHeader) -> list[Any]:
    evaluation_id, _, row = header.group_id.rpartition(":")
    is_failed = header.reward_status != "ok"
    is_correct = header.is_correct and not is_failed
    verdict = [repr(header.reward), int(is_correct), int(is_failed), header.purpose]
    return [header.group_id, evaluation_id, row, header.newest_version, *verdict]
