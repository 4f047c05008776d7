"""RedisStore, trajectories: what arrives, and what is kept of what is refused."""

from typing import Any

import msgspec

from buffer.chunks import Packed, chunks
from buffer.errors import StoreUnavailable
from buffer.limits import FRAME_BYTES_KEPT, FRAMES_KEPT
from buffer.records import Insertion
from buffer.redis_scripts.trajectories import INSERT, INSERT_EVALUATION, QUARANTINE_FRAME
from buffer.redis_store.door import RedisDoor, is_out_of_memory, text
from buffer.trajectory import TrajectoryHeader


class RedisTrajectories(RedisDoor):
    """Operations on arriving trajectories."""

    def insert(self, trajectories: list[Packed]) -> list[Insertion]:
        """See `Store.insert`."""
        train = [item for item in trajectories if item[0].purpose == "train"]
        inserted = (word for chunk in chunks(train) for word in self._insert_chunk(chunk))
        return [
            _insertion(next(inserted) if header.purpose == "train" else self._count_answer(header))
            for header, _ in trajectories
        ]

    def quarantine(self, reason: str, frame: bytes) -> None:
        """See `Store.quarantine`."""
        entry = msgspec.msgpack.encode((reason, frame[:FRAME_BYTES_KEPT]))
        self._run(QUARANTINE_FRAME, reason, entry, FRAMES_KEPT)

    def quarantined_frames(self) -> list[tuple[str, bytes]]:
        """Reason and first bytes of the newest refused frames, newest first."""
        with self._reaching():
            entries = self._client.lrange(self._key("quarantine"), 0, -1)
        return [msgspec.msgpack.decode(entry, type=tuple[str, bytes]) for entry in entries]

    def _insert_chunk(self, chunk: list[Packed]) -> list[str]:
        """One call: the server answers nobody else meanwhile, and looks only once whether memory is full."""
        arguments = (argument for header, payload in chunk for argument in (_train_argument(header), payload))
        try:
            return text(self._run(INSERT, *arguments)).split()
        except StoreUnavailable as error:
            if not is_out_of_memory(error):
                raise
            return ["store_full"] * len(chunk)

    def _count_answer(self, header: TrajectoryHeader) -> str:
        return text(self._run(INSERT_EVALUATION, *_evaluation_arguments(header)))


def _insertion(word: str) -> Insertion:
    """Of the word with which a script answers."""
    if word in ("inserted", "ready"):
        return Insertion(outcome="inserted", group_is_ready=word == "ready")
    if word in ("duplicate", "superseded"):
        return Insertion(outcome=word)  # type: ignore[arg-type]
    return Insertion(outcome="refused", reason=word)


def _train_argument(header: TrajectoryHeader) -> bytes:
    """Numbers as text, because that is what the store compares them with, and a script's numbers are doubles."""
    fields = (
        header.id,
        header.group_id,
        header.index,
        header.group_size,
        header.oldest_version,
        header.newest_version,
        header.checksum,
        header.attempt,
        header.written_tokens,
        header.reward,
        int(header.reward_status == "ok"),
        int(header.is_correct),
        int(header.is_greedy),
    )
    return msgspec.msgpack.encode([str(field) for field in fields])


def _evaluation_arguments(header: TrajectoryHeader) -> list[Any]:
    evaluation_id, _, row = header.group_id.rpartition(":")
    is_failed = header.reward_status != "ok"
    is_correct = header.is_correct and not is_failed
    verdict = [int(is_correct), int(is_failed), header.purpose]
    return [header.group_id, evaluation_id, row, header.newest_version, *verdict, header.attempt]
