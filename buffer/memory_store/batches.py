"""MemoryStore, batches: claim, fetch, commit, retire, roll back."""

from buffer.claims import no_members, stale
from buffer.memory_store.state import LiveClaim, MemoryState, UsedStep
from buffer.records import Claim
from buffer.samplers import draw_ranks
from configs.buffer import FifoConfig, UniformConfig


class MemoryBatches(MemoryState):
    """Operations on the learner's batches."""

    def claim(self, *, step: int, num_groups: int, sampler: FifoConfig | UniformConfig, lease_s: float) -> Claim | None:
        """See `Store.claim`."""
        with self._changed:
            run = self._opened()
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

    def commit(self, claim: Claim) -> None:
        """See `Store.commit`."""
        with self._changed:
            if claim.step in self._used and self._used[claim.step].fence == claim.fence:
                return
            live = self._live(claim)
            del self._claims[claim.step]
            used = self._used.setdefault(claim.step, UsedStep(claim.fence, []))
            used.fence = claim.fence
            used.group_ids += live.group_ids
            self._opened().step = claim.step

    def retire(self, *, up_to_step: int) -> int:
        """See `Store.retire`."""
        with self._changed:
            self._opened()
            steps = [step for step in self._used if step <= up_to_step]
            group_ids = [group_id for step in steps for group_id in self._used.pop(step).group_ids]
            for group_id in group_ids:
                self._done.add(int(group_id))
                del self._groups[group_id]
            return len(group_ids)

    def roll_back(self, *, to_step: int, to_version: int) -> int:
        """See `Store.roll_back`."""
        with self._changed:
            run = self._opened()
            returned = sum(self._release(step) for step in list(self._claims))
            for step in [step for step in self._used if step > to_step]:
                returned += self._make_ready(self._used.pop(step).group_ids)
            run.step, run.version, run.announced_version = to_step, to_version, to_version
            return returned

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
