"""MemoryStore, prompts: leases out, renewed, returned, lapsed."""

from slipstream.buffer.memory.state import Group, MemoryState, OpenEvaluation
from slipstream.buffer.records import EvaluationResult, Lease
from slipstream.buffer.trajectory import Purpose, group_of, make_lease_id
from slipstream.buffer.transitions import (
    evaluation_group_id,
    is_evaluation,
    lapsed_claim_message,
    lapsed_lease_message,
    make_lease,
    short_group_message,
)
from slipstream.configs.buffer import DropShortConfig, GroupDeadline, RefillConfig, TrainShortConfig


# @@ MemoryStore, evaluations: held-out rows asked and answered.
class MemoryEvaluations(MemoryState):
    """Operations on evaluations."""

    def open_evaluation(self, evaluation_id: str, *, purpose: Purpose, version: int, rows: list[int]) -> None:
        """See `Store.open_evaluation`."""
        with self._changed:
            run = self._opened()
            if evaluation_id in self._evaluations:
                return
            asked = list(dict.fromkeys(rows))
            self._evaluations[evaluation_id] = OpenEvaluation(purpose, version, len(asked))
            for row in asked:
                run.evaluation_sequence += 1
                group = Group(evaluation_group_id(evaluation_id, row), purpose, 1, run.evaluation_sequence)
                self._groups[group.id] = group
                self._evaluation_pending[group.sequence] = group.id

    def evaluation(self, evaluation_id: str) -> EvaluationResult | None:
        """See `Store.evaluation`."""
        with self._changed:
            stored = self._evaluations.get(evaluation_id)
            if stored is None:
                return None
            return EvaluationResult(
                id=evaluation_id,
                purpose=stored.purpose,
                version=stored.version,
                num_prompts=stored.num_prompts,
                num_answered=len(stored.answered),
                num_correct=stored.num_correct,
                num_failed=stored.num_failed,
            )


class MemoryPrompts(MemoryState):
    """Operations on prompt leases."""

    def lease(
        self,
        *,
        owner: str,
        max_groups: int,
        group_size: int,
        lease_s: float,
        admission_limit: int,
        has_baseline: bool = False,
    ) -> list[Lease]:
        """See `Store.lease`."""
        with self._changed:
            group_ids = self._take_pending_rows(max_groups)
            if self._opened().phase in ("starting", "training"):
                group_ids += self._take_returned(max_groups - len(group_ids))
                room = max_groups - len(group_ids)
                group_ids += self._admit(room, size=group_size, has_baseline=has_baseline, limit=admission_limit)
            deadline = self._deadline(lease_s)
            return [self._hand_out(group_id, owner=owner, deadline=deadline) for group_id in group_ids]

    def renew_leases(self, *, owner: str, lease_s: float, lease_ids: list[str]) -> int:
        """See `Store.renew_leases`."""
        with self._changed:
            self._opened()
            held = self._leased_to(owner)
            groups = [group for group in map(self._leased_group, dict.fromkeys(lease_ids)) if group in held]
            for group_id in groups:
                self._leases_holding(group_id)[group_id] = self._deadline(lease_s)
            return len(groups)

    def return_leases(self, *, lease_ids: list[str], reason: str, owner: str = "") -> int:
        """See `Store.return_leases`."""
        with self._changed:
            self._opened()
            # Each is looked up when its turn comes: an id named twice is returned once.
            return sum(self._return_lease(lease_id, reason, owner) for lease_id in lease_ids)

    def return_leases_of(self, *, owner: str, reason: str) -> int:
        """See `Store.return_leases_of`."""
        with self._changed:
            self._opened()
            return len([self._give_back(group_id, reason) for group_id in self._leased_to(owner)])

    def reap(self, *, group_deadline: GroupDeadline | None = None) -> list[str]:
        """See `Store.reap`."""
        with self._changed:
            self._opened()
            lapsed = [*_lapsed(self._leases, now=self._now()), *_lapsed(self._evaluation_leases, now=self._now())]
            events = [self._give_back(group_id, "lapsed") for group_id in lapsed]
            return [*events, *self._reap_groups(group_deadline), *self._reap_claims()]

    def _reap_groups(self, deadline: GroupDeadline | None) -> list[str]:
        if deadline is None or isinstance(deadline, RefillConfig):
            return []
        first_at = {group.id: group.first_at for group in self._groups.values() if self._is_open(group)}
        late = _lapsed(first_at, now=self._now() - int(deadline.after_s * 1000))
        fewest = deadline.min_members if isinstance(deadline, TrainShortConfig) else 0
        groups = [self._groups[group_id] for group_id in late]
        return [self._reap_group(group, deadline) for group in groups if group.num_sampled >= fewest]

    def _is_open(self, group: Group) -> bool:
        is_waiting = group.id in self._leases or (not is_evaluation(group.id) and int(group.id) in self._returned)
        return is_waiting and bool(group.members)

    def _reap_group(self, group: Group, deadline: TrainShortConfig | DropShortConfig) -> str:
        line = short_group_message(group.id, members=len(group.members), size=group.size, deadline=deadline)
        if isinstance(deadline, DropShortConfig):
            self._leases.pop(group.id, None)
            self._returned.discard(int(group.id))
            self._end(group.id, "expired", "group_deadline")
        else:
            group.is_closed = True
            self._complete(group)
        return line

    def _take_pending_rows(self, room: int) -> list[str]:
        if self._opened().phase in ("finished", "failed"):
            return []
        return [self._evaluation_pending.pop(sequence) for sequence in sorted(self._evaluation_pending)[:room]]

    def _take_returned(self, room: int) -> list[str]:
        ordinals = sorted(self._returned)[:room]
        self._returned.difference_update(ordinals)
        return [str(ordinal) for ordinal in ordinals]

    def _admit(self, room: int, *, size: int, has_baseline: bool, limit: int) -> list[str]:
        run = self._opened()
        num_new = max(0, min(room, limit - run.admitted))
        group_ids = [str(run.next_ordinal + place) for place in range(num_new)]
        run.next_ordinal += num_new
        run.admitted += num_new
        self._groups |= {group_id: Group(group_id, "train", size, has_baseline=has_baseline) for group_id in group_ids}
        return group_ids

    def _hand_out(self, group_id: str, *, owner: str, deadline: int) -> Lease:
        run, group = self._opened(), self._groups[group_id]
        group.owner = owner
        self._leases_holding(group_id)[group_id] = deadline
        return make_lease(
            group_id,
            attempt=group.attempt,
            purpose=group.purpose,
            indices=[index for index in range(group.size) if index not in group.members],
            num_rows=run.num_rows,
            seed=run.seed,
        )

    def _leases_holding(self, group_id: str) -> dict[str, int]:
        return self._evaluation_leases if is_evaluation(group_id) else self._leases

    def _leased_to(self, owner: str) -> list[str]:
        leased = [*self._leases, *self._evaluation_leases]
        return [group_id for group_id in leased if self._groups[group_id].owner == owner]

    def _leased_group(self, lease_id: str) -> str | None:
        group_id = group_of(lease_id)
        is_leased = group_id in self._leases_holding(group_id)
        is_current = is_leased and make_lease_id(group_id, self._groups[group_id].attempt) == lease_id
        return group_id if is_current else None

    def _return_lease(self, lease_id: str, reason: str, owner: str) -> bool:
        group_id = self._leased_group(lease_id)
        if group_id is not None and owner and self._groups[group_id].owner != owner:
            return False
        if group_id is not None:
            self._give_back(group_id, reason)
        return group_id is not None

    def _give_back(self, group_id: str, reason: str) -> str:
        group = self._groups[group_id]
        del self._leases_holding(group_id)[group_id]
        group.attempt += 1
        is_quarantined = not is_evaluation(group_id) and group.attempt >= self._max_attempts
        if is_quarantined:
            self._end(group_id, "quarantined", f"lease_attempts: {reason}")
        elif is_evaluation(group_id):
            self._evaluation_pending[group.sequence] = group_id
        else:
            self._returned.add(int(group_id))
        return lapsed_lease_message(
            group_id, attempt=group.attempt - 1, owner=group.owner, is_quarantined=is_quarantined
        )

    def _reap_claims(self) -> list[str]:
        deadlines = {str(step): claim.deadline for step, claim in self._claims.items()}
        return [self._reap_claim(int(step)) for step in _lapsed(deadlines, now=self._now())]

    def _reap_claim(self, step: int) -> str:
        num_ready, tired = self._fail_claim(step)
        return lapsed_claim_message(step, num_ready=num_ready, quarantined=tired)


def _lapsed(deadlines: dict[str, int], *, now: int) -> list[str]:
    """Earliest deadline first; equal ones by name, as Redis orders them."""
    return sorted((name for name, deadline in deadlines.items() if deadline <= now), key=lambda n: (deadlines[n], n))
