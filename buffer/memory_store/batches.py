"""MemoryStore, batches: claim, fetch, reject, commit, checkpoint, roll back."""

from buffer.claims import committed_already, no_members, out_of_order, stale, uncommitted
from buffer.memory_store.state import LiveClaim, MemoryState, UsedStep
from buffer.records import CheckpointPointer, Claim, StepEntry
from buffer.samplers import draw_ranks
from configs.buffer import FifoConfig, UniformConfig


class MemoryBatches(MemoryState):
    """Operations on the learner's batches."""

    def claim(self, *, step: int, num_groups: int, sampler: FifoConfig | UniformConfig, lease_s: float) -> Claim | None:
        """See `Store.claim`."""
        with self._changed:
            run = self._opened()
            if step <= run.step:
                raise committed_already(step, newest=run.step)
            self._release(step)
            in_order = sorted(self._ready)
            if len(in_order) < num_groups:
                return None
            ranks = draw_ranks(sampler, num_ready=len(in_order), num_groups=num_groups, seed=run.seed, step=step)
            group_ids = [self._ready.pop(in_order[rank]) for rank in ranks]
            run.fence += 1
            self._claims[step] = LiveClaim(run.fence, self._deadline(lease_s), group_ids)
            return Claim(step=step, fence=run.fence, group_ids=list(group_ids))

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
                self._groups[group_id].steps = [claim.step]
            self._ledger[claim.step] = entry
            self._opened().step = claim.step

    def checkpoint(self, pointer: CheckpointPointer) -> int:
        """See `Store.checkpoint`."""
        with self._changed:
            run = self._opened()
            if pointer.step > run.step:
                raise uncommitted(pointer, step=run.step)
            run.checkpoint = pointer
            steps = sorted(step for step in self._used if step <= pointer.step)
            group_ids = [group_id for step in steps for group_id in self._used.pop(step).group_ids]
            for group_id in group_ids:
                self._end(group_id, "retired")
            return len(group_ids)

    def roll_back(self, *, to_step: int, to_version: int) -> int:
        """See `Store.roll_back`."""
        with self._changed:
            run = self._opened()
            returned = sum(self._fail_claim(step)[0] for step in sorted(self._claims))
            for step in sorted(step for step in self._used if step > to_step):
                returned += self._take_back(self._used.pop(step).group_ids)
            self._ledger = {step: entry for step, entry in self._ledger.items() if step <= to_step}
            run.step, run.version = to_step, to_version
            return returned

    def ledger(self, *, first_step: int = 1) -> list[StepEntry]:
        """See `Store.ledger`."""
        with self._changed:
            self._opened()
            return [self._ledger[step] for step in sorted(self._ledger) if step >= first_step]

    def _take_back(self, group_ids: list[str]) -> int:
        for group_id in group_ids:
            self._groups[group_id].steps = []
        return self._make_ready(group_ids)

    def _release(self, step: int) -> int:
        claim = self._claims.pop(step, None)
        return self._make_ready(claim.group_ids) if claim else 0

    def _live(self, claim: Claim) -> LiveClaim:
        self._opened()
        live = self._claims.get(claim.step)
        if live is None or live.fence != claim.fence:
            raise stale(claim)
        return live

    def _payloads(self, group_id: str) -> list[bytes]:
        group = self._groups.get(group_id)
        if group is None or not group.members:
            raise no_members(group_id)
        return [group.members[index].payload for index in sorted(group.members)]
