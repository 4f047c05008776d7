"""MemoryStore, trajectories: what arrives, and what is kept of what is refused."""

from slipstream.buffer.accounting import Audit, Snapshot, audit
from slipstream.buffer.memory.state import Group, Member, MemoryState, OpenEvaluation
from slipstream.buffer.records import FRAME_BYTES_KEPT, FinishedGroup, Insertion
from slipstream.buffer.trajectory import TrajectoryHeader
from slipstream.buffer.transitions import evaluation_group_id, is_evaluation


# @@ MemoryStore, groups that are over: kept for the archive, and added up.
class MemoryFinished(MemoryState):
    """Operations on groups that are over, and the books."""

    def finished(self, *, limit: int) -> list[FinishedGroup]:
        """See `Store.finished`."""
        with self._changed:
            self._opened()
            return [_finished_group(self._groups[group_id]) for group_id in self._finished[:limit]]

    def forget(self, group_ids: list[str]) -> int:
        """See `Store.forget`."""
        with self._changed:
            self._opened()
            forgotten = [group_id for group_id in dict.fromkeys(group_ids) if group_id in self._finished]
            for group_id in forgotten:
                self._finished.remove(group_id)
                del self._groups[group_id]
            return len(forgotten)

    def audit(self) -> Audit:
        """See `Store.audit`."""
        with self._changed:
            return audit(self._snapshot())

    def _snapshot(self) -> Snapshot:
        groups = {
            "leased": [group_id for group_id in self._leases if not is_evaluation(group_id)],
            "returned": [str(ordinal) for ordinal in self._returned],
            "ready": list(self._ready.values()),
            "claimed": [group_id for claim in self._claims.values() for group_id in claim.group_ids],
            "used": [group_id for used in self._used.values() for group_id in used.group_ids],
        }
        sizes = {group: len(self._groups[group].members) for ids in groups.values() for group in ids}
        return Snapshot(
            next_ordinal=self._opened().next_ordinal,
            max_uses=self._opened().max_uses,
            accepted=self._counters["accepted"],
            groups=groups,
            members={group: (size, size) for group, size in sizes.items()},
            done=sorted(self._done),
            outcome_members=dict(self._outcome_members),
            ledger=[self._ledger[step] for step in sorted(self._ledger)],
        )


def _finished_group(group: Group) -> FinishedGroup:
    assert group.outcome is not None
    return FinishedGroup(
        id=group.id,
        outcome=group.outcome,
        reason=group.reason,
        steps=group.steps,
        payloads=[group.members[index].payload for index in sorted(group.members)],
    )


class MemoryTrajectories(MemoryState):
    """Operations on arriving trajectories."""

    def insert(self, trajectories: list[tuple[TrajectoryHeader, bytes]]) -> list[Insertion]:
        """See `Store.insert`."""
        with self._changed:
            self._opened()
            return [self._insert_one(header, payload) for header, payload in trajectories]

    def quarantine(self, reason: str, frame: bytes) -> None:
        """See `Store.quarantine`."""
        with self._changed:
            self._opened()
            self._frames.appendleft((reason, bytes(frame[:FRAME_BYTES_KEPT])))
            self._refused[reason] += 1

    def quarantined_frames(self) -> list[tuple[str, bytes]]:
        """Reason and first bytes of the newest refused frames, newest first."""
        with self._changed:
            return list(self._frames)

    def _insert_one(self, header: TrajectoryHeader, payload: bytes) -> Insertion:
        if header.purpose != "train":
            return self._count_answer(header)
        insertion = self._judge(header)
        if insertion.outcome == "inserted":
            return self._store(header, payload)
        self._counters[insertion.outcome] += 1
        if insertion.outcome == "superseded":
            self._counters["superseded_tokens"] += header.written_tokens
        return insertion

    def _judge(self, header: TrajectoryHeader) -> Insertion:
        group = self._groups.get(header.group_id)
        sums = {member.id: member.checksum for member in group.members.values()} if group else {}
        if header.id in sums:
            is_same = sums[header.id] == header.checksum
            return Insertion(outcome="duplicate") if is_same else _refusal("content_conflict")
        if group is None or group.purpose != "train":
            is_done = header.group_id.isdecimal() and int(header.group_id) in self._done
            return Insertion(outcome="superseded") if is_done else _refusal("unknown_group")
        if header.index in group.members or group.outcome or group.is_closed:
            return Insertion(outcome="superseded")
        if header.group_size != group.size or header.index >= group.size:
            return _refusal("group_size")
        if header.is_greedy != (group.has_baseline and header.index == group.size - 1):
            return _refusal("baseline")
        if header.attempt > group.attempt:
            return _refusal("unknown_lease")
        if header.newest_version > self._opened().announced_version:
            return _refusal("future_version")
        return Insertion(outcome="inserted")

    def _store(self, header: TrajectoryHeader, payload: bytes) -> Insertion:
        group = self._groups[header.group_id]
        if not group.members:
            group.first_at = self._now()
        group.members[header.index] = self._member(header, payload)
        self._counters["accepted"] += 1
        self._counters["accepted_tokens"] += header.written_tokens
        is_ready = len(group.members) == group.size and self._complete(group)
        return Insertion(outcome="inserted", group_is_ready=is_ready)

    def _member(self, header: TrajectoryHeader, payload: bytes) -> Member:
        run = self._opened()
        adopted = max(header.oldest_version, run.version)
        announced = max(adopted, run.announced_version)
        in_flight = adopted - header.oldest_version
        return Member(header.id, header.checksum, payload, header, in_flight, announced - adopted, announced)

    def _count_answer(self, header: TrajectoryHeader) -> Insertion:
        evaluation_id, _, row = header.group_id.rpartition(":")
        evaluation = self._evaluations.get(evaluation_id)
        if evaluation is None or evaluation.purpose != header.purpose:
            return _refusal("unknown_group")
        if len(evaluation.answered) == evaluation.num_prompts or (row.isdecimal() and int(row) in evaluation.answered):
            return Insertion(outcome="duplicate")
        group = self._groups.get(header.group_id)
        if group is None:
            return _refusal("unknown_group")
        if header.attempt > group.attempt:
            return _refusal("unknown_lease")
        if header.newest_version > self._opened().announced_version:
            return _refusal("future_version")
        self._answer(evaluation, header, evaluation_id=evaluation_id, row=int(row))
        is_complete = len(evaluation.answered) == evaluation.num_prompts
        return Insertion(outcome="inserted", group_is_ready=is_complete)

    def _answer(self, evaluation: OpenEvaluation, header: TrajectoryHeader, *, evaluation_id: str, row: int) -> None:
        is_failed = header.reward_status != "ok"
        evaluation.answered.add(row)
        evaluation.num_failed += is_failed
        evaluation.num_correct += header.is_correct and not is_failed
        group = self._groups.pop(evaluation_group_id(evaluation_id, row))
        self._evaluation_leases.pop(group.id, None)
        self._evaluation_pending.pop(group.sequence, None)


def _refusal(reason: str) -> Insertion:
    return Insertion(outcome="refused", reason=reason)
