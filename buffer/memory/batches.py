"""MemoryStore, batches: claim, fetch, reject, commit, checkpoint, roll back."""

from collections import Counter

from slipstream.buffer.codec import checksum, pack, unpack
from slipstream.buffer.memory.state import Group, LiveClaim, Member, MemoryState, UsedStep
from slipstream.buffer.records import CheckpointPointer, Claim, FinishedGroup, LagSplit, StepEntry
from slipstream.buffer.sampling import (
    Candidate,
    Evictions,
    NotReady,
    Queue,
    Sample,
    SamplingRules,
    evict,
    sample,
    sample_oldest,
)
from slipstream.buffer.trajectory import make_lease_id
from slipstream.buffer.transitions import (
    already_committed,
    make_claim,
    not_stored,
    not_yet_committed,
    out_of_order,
    split_lag,
    stale_claim,
    superseded_learner,
)


# @@ MemoryStore, stored rollouts: groups of an earlier run, ready to be trained on again.
class MemoryStored(MemoryState):
    """What only a replay does."""

    def load(self, groups: list[FinishedGroup], *, samples: dict[int, Sample] | None = None) -> None:
        """Take groups in as ready, in the order given. Raises RecordRefusedError for a payload that is damaged.

        They count as accepted and admitted. Ordinals between them are marked as over, so that no prompt is leased.
        `samples`: what these steps claim, whatever the sampler says.
        """
        with self._changed:
            run = self._opened()
            for stored in groups:
                run.ready_sequence += 1
                self._groups[stored.id] = _ready_group(stored, sequence=run.ready_sequence)
                self._put_all([stored.id])
            ordinals = {int(stored.id) for stored in groups}
            run.next_ordinal = max(ordinals, default=-1) + 1
            run.admitted = len(groups)
            self._done = set(range(run.next_ordinal)) - ordinals
            self._counters["accepted"] = sum(len(stored.payloads) for stored in groups)
            self._planned = samples or {}
            uses = Counter(group_id for planned in self._planned.values() for group_id in planned.group_ids)
            run.max_uses = max([run.max_uses, *uses.values()])


def _ready_group(stored: FinishedGroup, *, sequence: int) -> Group:
    group = Group(stored.id, "train", len(stored.payloads), sequence)
    for payload in stored.payloads:
        trajectory = unpack(payload)
        lease_id = make_lease_id(stored.id, trajectory.attempt)
        header, _ = pack(trajectory, lease_id=lease_id, purpose="train", group_size=group.size)
        group.members[trajectory.index] = Member(trajectory.id, checksum(payload), payload, header)
    return group


class MemoryBatches(MemoryState):
    """Operations on the learner's batches."""

    def claim(
        self, *, step: int, version: int, num_groups: int, rules: SamplingRules, lease_s: float
    ) -> Claim | NotReady:
        """See `Store.claim`."""
        with self._changed:
            run = self._opened()
            if step <= run.step:
                raise already_committed(step, newest=run.step)
            self._release(step)
            selected = self._select(rules, step=step, version=version, num_groups=num_groups)
            if isinstance(selected, NotReady):
                return selected
            for group_id in selected.group_ids:
                self._take(group_id)
            run.fence += 1
            self._claims[step] = LiveClaim(run.fence, self._deadline(lease_s), list(selected.group_ids))
            lag = self._lag(selected.group_ids, version=version)
            return make_claim(selected, step=step, fence=run.fence, lag=lag)

    def _select(self, rules: SamplingRules, *, step: int, version: int, num_groups: int) -> Sample | NotReady:
        if step in self._planned:
            return self._planned[step]
        if rules.only_oldest:
            oldest = [self._ready[sequence] for sequence in sorted(self._ready)[:num_groups]]
            return sample_oldest(oldest, num_groups=num_groups, num_ready=len(self._ready))
        self._evict(evict(self._queue(), rules, version=version))
        return sample(self._queue(), rules, num_groups=num_groups, seed=self._opened().seed, step=step)

    def _queue(self) -> Queue:
        run = self._opened()
        return Queue(
            ready=[self._candidate(self._ready[sequence]) for sequence in sorted(self._ready)],
            reusable=[self._candidate(self._reusable[sequence]) for sequence in sorted(self._reusable)],
            num_arrived=run.ready_sequence,
            num_uses=run.uses,
        )

    def _candidate(self, group_id: str) -> Candidate:
        group = self._groups[group_id]
        headers = [member.header for member in group.in_order_of_arrival()]
        rewards = [header.reward for header in headers if header.reward_status == "ok" and not header.is_greedy]
        assert group.oldest_version is not None
        return Candidate(
            id=group_id,
            sequence=group.sequence,
            oldest_version=group.oldest_version,
            answered=len(rewards),
            reward_sum=sum(rewards),
            reward_squares=sum(reward * reward for reward in rewards),
        )

    def _evict(self, evictions: Evictions) -> None:
        for group_id in evictions.expired:
            del self._ready[self._groups[group_id].sequence]
            self._end(group_id, "expired", "on_stale")
        for group_id in evictions.released:
            del self._reusable[self._groups[group_id].sequence]

    def _lag(self, group_ids: list[str], *, version: int) -> LagSplit:
        members = [member for group_id in group_ids for member in self._groups[group_id].members.values()]
        in_flight, publish = sum(m.in_flight for m in members), sum(m.publish for m in members)
        return split_lag(len(members), in_flight, publish, sum(m.arrived for m in members), version=version)

    def wait_ready(self, *, num_groups: int, timeout_s: float) -> bool:
        """See `Store.wait_ready`."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._ready) >= num_groups, timeout=timeout_s)

    def fetch(self, group_ids: list[str]) -> list[list[bytes]]:
        """See `Store.fetch`."""
        with self._changed:
            return [self._payloads(group_id) for group_id in group_ids]

    def renew_claim(self, claim: Claim, *, lease_s: float) -> None:
        """See `Store.renew_claim`."""
        with self._changed:
            self._live(claim).deadline = self._deadline(lease_s)

    def reject(self, claim: Claim, *, group_ids: list[str], reason: str) -> int:
        """See `Store.reject`."""
        with self._changed:
            live = self._live(claim)
            rejected = [group_id for group_id in dict.fromkeys(group_ids) if group_id in live.group_ids]
            for group_id in rejected:
                live.group_ids.remove(group_id)
                if self._groups[group_id].steps:
                    self._put(group_id, is_let_go=True)
                else:
                    self._end(group_id, "rejected", reason)
            return len(rejected)

    def commit(self, claim: Claim, entry: StepEntry) -> None:
        """See `Store.commit`."""
        with self._changed:
            if claim.step in self._used and self._used[claim.step].fence == claim.fence:
                return
            live = self._live(claim)
            if claim.step != self._opened().step + 1:
                raise out_of_order(claim, newest=self._opened().step)
            del self._claims[claim.step]
            self._used[claim.step] = UsedStep(claim.fence, live.group_ids)
            for group_id in live.group_ids:
                self._use(self._groups[group_id], step=claim.step)
            self._consumed_at[claim.step] = self._opened().consumed
            self._ledger[claim.step] = entry
            run = self._opened()
            run.step, run.stepped_at, run.learner_fence = claim.step, self._now() / 1000, claim.fence

    def _use(self, group: Group, *, step: int) -> None:
        run = self._opened()
        run.uses += 1
        run.consumed += not group.steps
        group.steps.append(step)
        self._count_trained(group, uses=1)
        if len(group.steps) < run.max_uses:
            self._reusable[group.sequence] = group.id

    def _count_trained(self, group: Group, *, uses: int) -> None:
        self._counters["trained"] += uses * len(group.members)
        self._counters["trained_tokens"] += uses * group.written_tokens

    def checkpoint(self, pointer: CheckpointPointer, *, fence: int) -> int:
        """See `Store.checkpoint`."""
        with self._changed:
            run = self._opened()
            if pointer.step > run.step:
                raise not_yet_committed(pointer, step=run.step)
            if fence != run.learner_fence:
                raise superseded_learner(pointer, fence=fence, newest=run.learner_fence)
            run.checkpoint = pointer
            if run.phase == "finishing":
                self._reusable.clear()
            return sum(self._retire(step) for step in sorted(step for step in self._used if step <= pointer.step))

    def roll_back(self, *, to_step: int, to_version: int) -> int:
        """See `Store.roll_back`."""
        with self._changed:
            run = self._opened()
            by_deadline = sorted(self._claims, key=lambda step: (self._claims[step].deadline, str(step)))
            returned = sum(self._fail_claim(step)[0] for step in by_deadline)
            for step in sorted(step for step in self._used if step > to_step):
                returned += self._take_back(self._used.pop(step).group_ids, to_step=to_step)
            self._ledger = {step: entry for step, entry in self._ledger.items() if step <= to_step}
            self._consumed_at = {step: total for step, total in self._consumed_at.items() if step <= to_step}
            run.step, run.version = to_step, to_version
            run.fence += 1
            run.learner_fence = run.fence
            run.consumed = run.consumed_by_version = self._consumed_at.get(to_step, 0)
            return returned

    def ledger(self, *, first_step: int = 1) -> list[StepEntry]:
        """See `Store.ledger`."""
        with self._changed:
            self._opened()
            return [self._ledger[step] for step in sorted(self._ledger) if step >= first_step]

    def _retire(self, step: int) -> int:
        used = self._used.pop(step)
        kept = [group_id for group_id in used.group_ids if self._groups[group_id].sequence in self._reusable]
        if kept:
            self._used[step] = UsedStep(None, kept)
        for group_id in used.group_ids:
            if group_id not in kept:
                self._end(group_id, "retired")
        return len(used.group_ids) - len(kept)

    def _take_back(self, group_ids: list[str], *, to_step: int) -> int:
        for group_id in group_ids:
            group = self._groups[group_id]
            self._reusable.pop(group.sequence, None)
            kept = [step for step in group.steps if step <= to_step]
            undone = len(group.steps) - len(kept)
            self._opened().uses -= undone
            self._count_trained(group, uses=-undone)
            group.steps = kept
        return self._put_all(group_ids)

    def _release(self, step: int) -> int:
        claim = self._claims.pop(step, None)
        return self._put_all(claim.group_ids) if claim else 0

    def _live(self, claim: Claim) -> LiveClaim:
        self._opened()
        live = self._claims.get(claim.step)
        if live is None or live.fence != claim.fence:
            raise stale_claim(claim)
        return live

    def _payloads(self, group_id: str) -> list[bytes]:
        group = self._groups.get(group_id)
        if group is None or not group.members:
            raise not_stored(group_id)
        return [group.members[index].payload for index in sorted(group.members)]
