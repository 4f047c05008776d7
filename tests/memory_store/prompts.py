"""MemoryStore, generator side: leases, arriving trajectories, evaluations."""

from collections.abc import Mapping
from math import ceil
from typing import Any

from slipstream.buffer.records import (
    FRAME_BYTES_KEPT,
    EvaluationAnswer,
    EvaluationResult,
    Insertion,
    Lease,
    stored_answer,
)
from slipstream.buffer.sampling import NOTHING_SKIPPED, Upcoming
from slipstream.buffer.store_rules import (
    NO_FENCE,
    asked_answers,
    evaluation_group_id,
    evaluation_sequence,
    is_evaluation,
    lapsed_claim_message,
    lapsed_lease_message,
    make_lease,
    short_group_message,
)
from slipstream.buffer.trajectory import Purpose, TrajectoryHeader, group_of, make_lease_id
from slipstream.configs.buffer import DropShortConfig, GroupDeadline, RefillConfig, TrainShortConfig
from tests.memory_store.state import Group, Member, MemoryState, OpenEvaluation


class MemoryPrompts(MemoryState):
    def lease(
        self,
        *,
        owner: str,
        max_groups: int,
        group_size: int,
        lease_s: float,
        admission_limit: int,
        has_baseline: bool = False,
        version: int | None = None,
        max_evaluations: int | None = None,
        upcoming: Upcoming = NOTHING_SKIPPED,
    ) -> list[Lease]:
        most = max_groups * group_size
        group_ids = self._take_pending_rows(most if max_evaluations is None else min(most, max_evaluations), version)
        room = max_groups + len(group_ids) - ceil(len(group_ids) / group_size)
        if self._opened().phase in ("starting", "training") and admission_limit >= 0:
            returned = sorted(self._returned)[: room - len(group_ids)]
            self._returned.difference_update(returned)
            group_ids += map(str, returned)
            of_all = {"size": group_size, "has_baseline": has_baseline}
            group_ids += self._admit(room - len(group_ids), limit=admission_limit, upcoming=upcoming, **of_all)
        group_ids += self._take_pending_rows((room - len(group_ids)) * group_size, version)
        deadline = self._deadline(lease_s)
        return [self._hand_out(group_id, owner=owner, deadline=deadline) for group_id in group_ids]

    def put_images(self, images: Mapping[str, bytes]) -> None:
        self._images = dict(images) | self._images

    def images(self, names: list[str]) -> dict[str, bytes]:
        return {name: self._images[name] for name in names if name in self._images}

    def _renew_leases(self, owner: str, lease_ids: list[str], *, lease_s: float) -> int:
        held = self._leased_to(owner)
        groups = [group for group in map(self._leased_group, dict.fromkeys(lease_ids)) if group in held]
        for group_id in groups:
            self._leases_of_kind(group_id)[group_id] = self._deadline(lease_s)
        return len(groups)

    def return_leases(self, *, lease_ids: list[str], reason: str, owner: str = "") -> int:
        num_returned = 0
        for lease_id in lease_ids:
            group_id = self._leased_group(lease_id)
            if group_id is not None and owner in ("", self._groups[group_id].owner):
                self._return_lease(group_id, reason)
                num_returned += 1
        return num_returned

    def return_leases_of(self, *, owner: str, reason: str) -> int:
        return len([self._return_lease(group_id, reason) for group_id in self._leased_to(owner)])

    def follow_clock(self, *, jump_s: float, lease_s: float, claim_lease_s: float, fence: int = NO_FENCE) -> None:
        self._check_chief(fence)
        by = int(jump_s * 1000)
        for leases in (self._leases, self._evaluation_leases):
            for group_id, deadline in leases.items():
                leases[group_id] = min(deadline + by, self._deadline(lease_s))
        for claim in self._claims.values():
            claim.deadline = min(claim.deadline + by, self._deadline(claim_lease_s))
        for group in self._groups.values():
            group.first_at = min(group.first_at + by, self._now())

    def reap(self, *, group_deadline: GroupDeadline | None = None, fence: int = NO_FENCE) -> list[str]:
        self._check_chief(fence)
        lapsed = [*_lapsed(self._leases, now=self._now()), *_lapsed(self._evaluation_leases, now=self._now())]
        messages = [self._return_lease(group_id, "lapsed") for group_id in lapsed]
        return [*messages, *self._reap_groups(group_deadline), *self._reap_claims()]

    def _take_pending_rows(self, room: int, version: int | None) -> list[str]:
        if self._opened().phase in ("finished", "failed"):
            return []
        asked = sorted(each for each in self._evaluation_pending if version in (None, each >> 32))
        return [self._evaluation_pending.pop(sequence) for sequence in asked[:room]]

    def _admit(self, room: int, *, limit: int, upcoming: Upcoming, **of_all: Any) -> list[str]:
        run, group_ids = self._opened(), list[str]()
        rows = upcoming.rows(num_rows=run.num_rows, seed=run.seed)
        known = dict(enumerate(zip(rows, upcoming.explored, strict=True), start=upcoming.first))
        while len(group_ids) < room and run.admitted < limit:
            ordinal, run.next_ordinal = run.next_ordinal, run.next_ordinal + 1
            row, is_explored = known.get(ordinal, (None, True))
            if self._skips(row, is_explored=is_explored):
                self._done.add(ordinal)
                continue
            run.admitted += 1
            group_ids.append(str(ordinal))
            self._groups[str(ordinal)] = Group(str(ordinal), "train", row=row, **of_all)
        return group_ids

    def _skips(self, row: int | None, *, is_explored: bool) -> bool:
        curriculum = self._opened().curriculum
        flaw = self._success[row].flaw(curriculum) if curriculum and row is not None else ""
        if flaw:
            self._curriculum["explored" if is_explored else f"skipped_{flaw}"] += 1
        return bool(flaw) and not is_explored

    def _hand_out(self, group_id: str, *, owner: str, deadline: int) -> Lease:
        run, group = self._opened(), self._groups[group_id]
        group.owner = owner
        self._leases_of_kind(group_id)[group_id] = deadline
        indices = [index for index in range(group.size) if index not in group.members]
        of_group = {"attempt": group.attempt, "purpose": group.purpose, "indices": indices}
        return make_lease(group_id, num_rows=run.num_rows, seed=run.seed, **of_group)

    def _leases_of_kind(self, group_id: str) -> dict[str, int]:
        return self._evaluation_leases if is_evaluation(group_id) else self._leases

    def _leased_to(self, owner: str) -> list[str]:
        leased = [*self._leases, *self._evaluation_leases]
        return [group_id for group_id in leased if self._groups[group_id].owner == owner]

    def _leased_group(self, lease_id: str) -> str | None:
        group_id = group_of(lease_id)
        if group_id not in self._leases_of_kind(group_id):
            return None
        return group_id if make_lease_id(group_id, self._groups[group_id].attempt) == lease_id else None

    def _return_lease(self, group_id: str, reason: str) -> str:
        group = self._groups[group_id]
        del self._leases_of_kind(group_id)[group_id]
        group.attempt += 1
        is_quarantined = not is_evaluation(group_id) and group.attempt >= self._max_attempts
        if is_quarantined:
            self._end(group_id, "quarantined", f"lease_attempts: {reason}")
        elif is_evaluation(group_id):
            self._evaluation_pending[group.sequence] = group_id
        else:
            self._returned.add(int(group_id))
        lapsed = {"attempt": group.attempt - 1, "owner": group.owner, "is_quarantined": is_quarantined}
        return lapsed_lease_message(group_id, **lapsed)

    def _reap_groups(self, deadline: GroupDeadline | None) -> list[str]:
        if deadline is None or isinstance(deadline, RefillConfig):
            return []
        fewest = deadline.min_members if isinstance(deadline, TrainShortConfig) else 0
        return [
            self._reap_group(group, deadline)
            for group in self._open_groups(until=self._now() - int(deadline.after_s * 1000))
            if sum(not member.header.is_greedy for member in group.members.values()) >= fewest
        ]

    def _open_groups(self, *, until: int) -> list[Group]:
        waiting = [self._groups[group_id] for group_id in (*self._leases, *map(str, self._returned))]
        first_at = {group.id: group.first_at for group in waiting if group.members}
        return [self._groups[group_id] for group_id in _lapsed(first_at, now=until)]

    def _reap_group(self, group: Group, deadline: TrainShortConfig | DropShortConfig) -> str:
        message = short_group_message(group.id, members=len(group.members), size=group.size, deadline=deadline)
        if isinstance(deadline, DropShortConfig):
            self._leases.pop(group.id, None)
            self._returned.discard(int(group.id))
            self._end(group.id, "expired", "group_deadline")
        else:
            group.is_closed = True
            self._complete(group)
        return message

    def _reap_claims(self) -> list[str]:
        deadlines = {str(step): claim.deadline for step, claim in self._claims.items()}
        messages = []
        for step in map(int, _lapsed(deadlines, now=self._now())):
            num_ready, quarantined = self._fail_claim(step)
            messages.append(lapsed_claim_message(step, num_ready=num_ready, quarantined=quarantined))
        return messages

    def insert(self, trajectories: list[tuple[TrajectoryHeader, bytes]], *, guest: str = "") -> list[Insertion]:
        return [
            self._insert(*each, guest) if each[0].purpose == "train" else self._insert_evaluation(*each)
            for each in trajectories
        ]

    def quarantine_guest(self, guest: str, *, reason: str) -> int:
        self._quarantined.setdefault(guest, reason)
        for sequence, group_id in list(self._reusable.items()):
            if guest in self._groups[group_id].guests:
                del self._reusable[sequence]
        ready = [self._groups[self._ready[at]] for at in sorted(self._ready)]
        ended = [each for each in (*ready, *self._open_groups(until=self._now())) if guest in each.guests]
        for group in ended:
            self._ready.pop(group.sequence, None)
            self._leases.pop(group.id, None)
            self._returned.discard(int(group.id))
            self._end(group.id, "quarantined", f"guest: {guest}")
        return len(ended)

    def quarantined_guests(self) -> dict[str, str]:
        return dict(self._quarantined)

    def quarantine(self, reason: str, frame: bytes) -> None:
        self._frames.appendleft((reason, bytes(frame[:FRAME_BYTES_KEPT])))
        self._refused[reason] += 1

    def quarantined_frames(self) -> list[tuple[str, bytes]]:
        return list(self._frames)

    def _insert(self, header: TrajectoryHeader, payload: bytes, guest: str) -> Insertion:
        objection = self._objection_to(header)
        if objection is None and guest in self._quarantined:
            objection = _refusal("guest_quarantined")
        if objection:
            self._counters[objection.outcome] += 1
            if objection.outcome == "superseded":
                self._counters["superseded_tokens"] += header.written_tokens
            return objection
        group = self._groups[header.group_id]
        if not group.members:
            group.first_at = self._now()
        group.members[header.index] = self._make_member(header, payload)
        group.guests |= {guest} - {""}
        self._counters["accepted"] += 1
        self._counters["accepted_tokens"] += header.written_tokens
        return Insertion("inserted", group_is_ready=len(group.members) == group.size and self._complete(group))

    def _objection_to(self, header: TrajectoryHeader) -> Insertion | None:
        group = self._groups.get(header.group_id)
        for stored in group.members.values() if group else ():
            if stored.header.id == header.id:
                is_same = stored.header.checksum == header.checksum
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
        return self._lease_objection_to(header, group)

    def _lease_objection_to(self, header: TrajectoryHeader, group: Group) -> Insertion | None:
        if header.attempt > group.attempt:
            return _refusal("unknown_lease")
        if header.newest_version > self._opened().announced_version:
            return _refusal("future_version")
        return None

    def _make_member(self, header: TrajectoryHeader, payload: bytes) -> Member:
        applied = max(header.oldest_version, self._opened().version)
        announced = max(applied, self._opened().announced_version)
        return Member(payload, header, applied - header.oldest_version, announced - applied, announced)

    def open_evaluation(
        self, evaluation_id: str, *, purpose: Purpose, version: int, rows: list[int], samples: int = 1
    ) -> None:
        run = self._opened()
        if evaluation_id in self._evaluations:
            return
        asked = asked_answers(rows, samples=samples)
        self._evaluations[evaluation_id] = OpenEvaluation(purpose, version, len(asked))
        for answer in asked:
            run.evaluation_sequence += 1
            sequence = evaluation_sequence(version, run.evaluation_sequence)
            group = Group(evaluation_group_id(evaluation_id, answer), purpose, 1, sequence)
            self._groups[group.id] = group
            self._evaluation_pending[group.sequence] = group.id

    def evaluation(self, evaluation_id: str) -> EvaluationResult | None:
        stored = self._evaluations.get(evaluation_id)
        if stored is None:
            return None
        same = {
            name: getattr(stored, name) for name in ("purpose", "version", "num_asked", "num_correct", "num_failed")
        }
        return EvaluationResult(id=evaluation_id, num_answered=len(stored.answered), **same)

    def evaluation_answers(self, evaluation_id: str) -> list[EvaluationAnswer]:
        stored = self._evaluations.get(evaluation_id)
        return list(stored.answered.values()) if stored else []

    def _insert_evaluation(self, header: TrajectoryHeader, payload: bytes) -> Insertion:
        evaluation_id, _, answer = header.group_id.rpartition(":")
        evaluation = self._evaluations.get(evaluation_id)
        if evaluation is None or evaluation.purpose != header.purpose:
            return _refusal("unknown_group")
        if len(evaluation.answered) == evaluation.num_asked or answer in evaluation.answered:
            return Insertion(outcome="duplicate")
        group = self._groups.get(header.group_id)
        if group is None:
            return _refusal("unknown_group")
        if objection := self._lease_objection_to(header, group):
            return objection
        if not header.oldest_version == header.newest_version == evaluation.version:
            return _refusal("other_version")
        is_failed = header.reward_status != "ok"
        evaluation.answered[answer] = stored_answer(header, payload)
        evaluation.num_failed += is_failed
        evaluation.num_correct += header.is_correct and not is_failed
        if self._opened().keeps_finished:
            group.members[0] = self._make_member(header, payload)
            group.outcome = "evaluated"
            self._finished.append(group.id)
        else:
            del self._groups[group.id]
        self._evaluation_leases.pop(group.id, None)
        self._evaluation_pending.pop(group.sequence, None)
        return Insertion(outcome="inserted", group_is_ready=len(evaluation.answered) == evaluation.num_asked)


def _lapsed(deadlines: dict[str, int], *, now: int) -> list[str]:
    return sorted((name for name, deadline in deadlines.items() if deadline <= now), key=lambda n: (deadlines[n], n))


def _refusal(reason: str) -> Insertion:
    return Insertion(outcome="refused", reason=reason)
