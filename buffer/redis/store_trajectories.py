"""RedisStore, trajectories: what arrives, and what is kept of what is refused."""

from typing import Any

import msgspec
import numpy as np

from slipstream.buffer.accounting import Audit, Snapshot, audit
from slipstream.buffer.codec import Packed, chunks, decode
from slipstream.buffer.errors import StoreUnavailableError
from slipstream.buffer.records import FRAME_BYTES_KEPT, FRAMES_KEPT, FinishedGroup, Insertion, StepEntry
from slipstream.buffer.redis.connection import RedisConnection, is_out_of_memory, text
from slipstream.buffer.redis.scripts.finished import FORGET, SNAPSHOT
from slipstream.buffer.redis.scripts.trajectories import INSERT, INSERT_EVALUATION, QUARANTINE_FRAME
from slipstream.buffer.redis.store_run import RedisRun
from slipstream.buffer.trajectory import TrajectoryHeader


# @@ RedisStore, groups that are over: kept for the archive, and added up.
class RedisFinished(RedisRun):
    """Operations on groups that are over, and the books."""

    def finished(self, *, limit: int) -> list[FinishedGroup]:
        """See `Store.finished`."""
        with self._mapped_errors():
            group_ids = self._client.zrange(self._key("finished"), 0, limit - 1) if limit > 0 else []
            pipeline = self._client.pipeline(transaction=False)
            for group_id in map(text, group_ids):
                pipeline.hmget(self._key(f"group:{group_id}"), ["outcome", "reason", "steps"])
                pipeline.hgetall(self._key(f"payloads:{group_id}"))
            stored = pipeline.execute()
        pairs = zip(map(text, group_ids), stored[::2], stored[1::2], strict=True)
        # Another archiver may have had one forgotten in between.
        return [_finished_group(group_id, facts, payloads) for group_id, facts, payloads in pairs if facts[0]]

    def forget(self, group_ids: list[str]) -> int:
        """See `Store.forget`."""
        return self._run(FORGET, *group_ids)

    def audit(self) -> Audit:
        """See `Store.audit`."""
        self.run_state()
        return audit(self._snapshot())

    def _snapshot(self) -> Snapshot:
        next_ordinal, max_uses, accepted, done, places, outcomes, ledger = self._run(SNAPSHOT)
        named = {text(place): list(zip(*[iter(sized)] * 3, strict=True)) for place, sized in places}
        entries = [decode(entry, StepEntry) for entry in ledger]
        return Snapshot(
            next_ordinal=next_ordinal,
            max_uses=max_uses,
            accepted=accepted,
            groups={place: [text(group) for group, _, _ in sized] for place, sized in named.items()},
            members={text(group): (counted, kept) for sized in named.values() for group, counted, kept in sized},
            done=np.flatnonzero(np.unpackbits(np.frombuffer(done, dtype=np.uint8))).tolist(),
            outcome_members={text(name): int(count) for name, count in zip(outcomes[::2], outcomes[1::2], strict=True)},
            ledger=sorted(entries, key=lambda entry: entry.step),
        )


def _finished_group(group_id: str, facts: list[bytes], payloads: dict[bytes, bytes]) -> FinishedGroup:
    outcome, reason, steps = map(text, facts)
    return FinishedGroup(
        id=group_id,
        outcome=outcome,  # type: ignore[arg-type]
        reason=reason,
        steps=[int(step) for step in steps.split(",") if step],
        payloads=[payloads[index] for index in sorted(payloads, key=int)],
    )


class RedisTrajectories(RedisConnection):
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
        with self._mapped_errors():
            entries = self._client.lrange(self._key("quarantine"), 0, -1)
        return [msgspec.msgpack.decode(entry, type=tuple[str, bytes]) for entry in entries]

    def _insert_chunk(self, chunk: list[Packed]) -> list[str]:
        """One call: the server answers nobody else meanwhile, and looks only once whether memory is full."""
        arguments = (argument for header, payload in chunk for argument in (_train_argument(header), payload))
        try:
            return text(self._run(INSERT, *arguments)).split()
        except StoreUnavailableError as error:
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
