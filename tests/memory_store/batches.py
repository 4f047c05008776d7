"""MemoryStore, learner side: claims, commits, checkpoints, rollbacks, the step ledger."""

from slipstream.buffer.errors import StaleFenceError
from slipstream.buffer.records import CheckpointPointer, Claim, LagSplit, StepEntry
from slipstream.buffer.sampling import Candidate, NotReady, Queue, Sample, SamplingRules, evict, sample, sample_oldest
from slipstream.buffer.store_rules import make_claim, split_lag, stale_claim
from tests.memory_store.state import Group, LiveClaim, MemoryState, UsedStep

_RESUME = "start again with resume=true."


class MemoryBatches(MemoryState):
    def claim(
        self, *, step: int, version: int, num_groups: int, rules: SamplingRules, lease_s: float
    ) -> Claim | NotReady:
        run = self._opened()
        if step <= run.step:
            raise StaleFenceError(
                f"a step must be claimed before it is committed, got step {step}, but step {run.step} is the last one "
                f"committed: another learner has continued this run; {_RESUME}"
            )
        if earlier := self._claims.pop(step, None):
            self._enqueue_all(earlier.group_ids)
        selected = self._sample(rules, step=step, version=version, num_groups=num_groups)
        if isinstance(selected, NotReady):
            return selected
        for group_id in selected.group_ids:
            self._dequeue(group_id)
        run.fence += 1
        self._claims[step] = LiveClaim(run.fence, self._deadline(lease_s), list(selected.group_ids))
        lag = self._lag(selected.group_ids, version=version)
        return make_claim(selected, step=step, fence=run.fence, lag=lag, num_spare=len(self._ready))

    def _sample(self, rules: SamplingRules, *, step: int, version: int, num_groups: int) -> Sample | NotReady:
        if rules.only_oldest:
            oldest = [self._ready[sequence] for sequence in sorted(self._ready)[:num_groups]]
            return sample_oldest(oldest, num_groups=num_groups, num_ready=len(self._ready))
        evictions = evict(self._queue(), rules, version=version)
        for group_id in evictions.expired:
            del self._ready[self._groups[group_id].sequence]
            self._end(group_id, "expired", "on_stale")
        for group_id in evictions.released:
            del self._reusable[self._groups[group_id].sequence]
        return sample(self._queue(), rules, num_groups=num_groups, seed=self._opened().seed, step=step)

    def _queue(self) -> Queue:
        run = self._opened()
        ready = [self._candidate(self._ready[sequence]) for sequence in sorted(self._ready)]
        reusable = [self._candidate(self._reusable[sequence]) for sequence in sorted(self._reusable)]
        return Queue(ready, reusable, run.ready_sequence, run.uses)

    def _candidate(self, group_id: str) -> Candidate:
        group = self._groups[group_id]
        headers = [member.header for member in group.members.values()]
        rewards = [header.reward for header in headers if header.reward_status == "ok" and not header.is_greedy]
        assert group.oldest_version is not None
        squares = sum(reward * reward for reward in rewards)
        return Candidate(group_id, group.sequence, group.oldest_version, len(rewards), sum(rewards), squares)

    def _lag(self, group_ids: list[str], *, version: int) -> LagSplit:
        members = [member for group_id in group_ids for member in self._groups[group_id].members.values()]
        sums = (sum(getattr(member, name) for member in members) for name in ("in_flight", "publish", "arrived"))
        return split_lag(len(members), *sums, version=version)

    def wait_ready(self, *, num_groups: int, timeout_s: float) -> bool:
        return self._changed.wait_for(lambda: len(self._ready) >= num_groups, timeout=timeout_s)

    def fetch(self, group_ids: list[str]) -> list[list[bytes]]:
        for group_id in group_ids:
            if group_id not in self._groups or not self._groups[group_id].members:
                raise StaleFenceError(
                    f"group {group_id} must be stored to be fetched, but it is retired or has no members."
                )
        return [self._groups[group_id].payloads for group_id in group_ids]

    def renew_claim(self, claim: Claim, *, lease_s: float) -> None:
        self._live(claim).deadline = self._deadline(lease_s)

    def reject(self, claim: Claim, *, group_ids: list[str], reason: str) -> int:
        live = self._live(claim)
        rejected = [group_id for group_id in dict.fromkeys(group_ids) if group_id in live.group_ids]
        for group_id in rejected:
            live.group_ids.remove(group_id)
            if self._groups[group_id].steps:
                self._enqueue(group_id, is_released=True)
            else:
                self._end(group_id, "rejected", reason)
        return len(rejected)

    def _live(self, claim: Claim) -> LiveClaim:
        live = self._claims.get(claim.step)
        if live is None or live.fence != claim.fence:
            raise stale_claim(claim)
        return live

    def commit(self, claim: Claim, entry: StepEntry) -> None:
        if claim.step in self._used and self._used[claim.step].fence == claim.fence:
            return
        run, live = self._opened(), self._live(claim)
        if claim.step != run.step + 1:
            raise StaleFenceError(
                f"steps must be committed one after the other, got step {claim.step} after step {run.step}: the store "
                f"is behind the learner, or another learner is running; {_RESUME}"
            )
        del self._claims[claim.step]
        self._used[claim.step] = UsedStep(claim.fence, live.group_ids)
        for group_id in live.group_ids:
            self._use(self._groups[group_id], step=claim.step)
        self._consumed_at[claim.step] = run.consumed
        self._ledger[claim.step] = entry
        run.step, run.stepped_at, run.learner_fence = claim.step, self._now() / 1000, claim.fence

    def _use(self, group: Group, *, step: int) -> None:
        run = self._opened()
        run.uses += 1
        run.consumed += not group.steps
        group.steps.append(step)
        self._count_trained(group, uses=1)
        if len(group.steps) < run.max_uses and not group.guests & self._quarantined.keys():
            self._reusable[group.sequence] = group.id

    def _count_trained(self, group: Group, *, uses: int) -> None:
        self._counters["trained"] += uses * len(group.members)
        self._counters["trained_tokens"] += uses * group.written_tokens

    def checkpoint(self, pointer: CheckpointPointer, *, fence: int) -> int:
        run = self._opened()
        if pointer.step > run.step:
            raise StaleFenceError(
                f"a checkpoint must cover committed steps only, got step {pointer.step} ({pointer.name}), but step "
                f"{run.step} is the last one committed: the store is behind the learner; start the learner again with "
                "resume=true."
            )
        if fence != run.learner_fence:
            raise StaleFenceError(
                f"a checkpoint must come from the newest learner, got {pointer.name} with fence {fence} after fence "
                f"{run.learner_fence}: another learner has continued this run; {_RESUME}"
            )
        run.checkpoint = pointer
        if run.phase == "finishing":
            self._reusable.clear()
        return sum(self._retire(step) for step in sorted(step for step in self._used if step <= pointer.step))

    def _retire(self, step: int) -> int:
        used = self._used.pop(step)
        kept = [group_id for group_id in used.group_ids if self._groups[group_id].sequence in self._reusable]
        if kept:
            self._used[step] = UsedStep(None, kept)
        for group_id in used.group_ids:
            if group_id not in kept:
                self._end(group_id, "retired")
        return len(used.group_ids) - len(kept)

    def roll_back(self, *, to_step: int, to_version: int) -> tuple[int, int]:
        run = self._opened()
        by_deadline = sorted(self._claims, key=lambda step: (self._claims[step].deadline, str(step)))
        num_returned = sum(self._fail_claim(step)[0] for step in by_deadline)
        for step in sorted(step for step in self._used if step > to_step):
            num_returned += self._undo_uses(self._used.pop(step).group_ids, to_step=to_step)
        self._ledger = {step: entry for step, entry in self._ledger.items() if step <= to_step}
        self._consumed_at = {step: total for step, total in self._consumed_at.items() if step <= to_step}
        run.step, run.version = to_step, to_version
        run.archived_step = min(run.archived_step, to_step)
        run.fence += 1
        run.learner_fence = run.fence
        run.consumed = run.consumed_by_version = self._consumed_at.get(to_step, 0)
        return num_returned, run.fence

    def _undo_uses(self, group_ids: list[str], *, to_step: int) -> int:
        for group_id in group_ids:
            group = self._groups[group_id]
            self._reusable.pop(group.sequence, None)
            undone = sum(step > to_step for step in group.steps)
            self._opened().uses -= undone
            self._count_trained(group, uses=-undone)
            group.steps = group.steps[: len(group.steps) - undone]
        return self._enqueue_all(group_ids)

    def ledger(self, *, first_step: int = 1) -> list[StepEntry]:
        return [self._ledger[step] for step in sorted(self._ledger) if step >= first_step]
