"""WatchedStore: the store of broker and learner with a journal of operations, and points between them.

The protocol allows retries after lost answers, so it repeats some claims and commits.
"""

import random
import time
from collections.abc import Callable
from typing import Any, ClassVar

from slipstream.buffer.errors import ReplayBufferError
from slipstream.buffer.records import CheckpointPointer, Claim, StepEntry
from slipstream.buffer.redis.connection import text
from slipstream.buffer.redis.store import RedisStore
from slipstream.buffer.sampling import NotReady
from slipstream.buffer.store_rules import NO_FENCE
from tests.chaos.watched.journal import Journal, Points

_REPEATED = 0.15


class WatchedStore(RedisStore):
    """A RedisStore with a journal. Errors pass through."""

    journal: ClassVar[Journal]
    points: ClassVar[Points]
    repeats: ClassVar[bool] = False

    def __init__(self, *given: Any, **named: Any) -> None:
        # Unreachable, because a prompt with many attempts is not poisonous here.
        super().__init__(*given, **(named | {"max_attempts": 10**6}))

    def lease(self, *, owner: str, **settings: Any) -> list[Any]:
        since = time.time()
        leases = super().lease(owner=owner, **settings)
        if trained := [lease for lease in leases if lease.purpose == "train"]:
            ids, members = [lease.id for lease in trained], [lease.indices for lease in trained]
            self.journal.write("leased", owner=owner, leases=ids, members=members, since=since)
        return leases

    def return_leases(self, *, lease_ids: list[str], reason: str, owner: str = "") -> int:
        if reason == "undeliverable":
            self.journal.write("undeliverable", leases=lease_ids)
        return super().return_leases(lease_ids=lease_ids, reason=reason, owner=owner)

    def return_leases_of(self, *, owner: str, reason: str) -> int:
        self.journal.write("departed", owner=owner, reason=reason)
        return super().return_leases_of(owner=owner, reason=reason)

    def forget(self, group_ids: list[str], *, fence: int = NO_FENCE) -> int:
        self.points.reach("before_forget")
        return super().forget(group_ids, fence=fence)

    def claim(self, *, step: int, **arguments: Any) -> Claim | NotReady:
        self.points.reach("before_claim")
        claim = super().claim(step=step, **arguments)
        if not isinstance(claim, Claim):
            return claim
        self.journal.write("claimed", step=step, fence=claim.fence, groups=claim.group_ids)
        if self.repeats and random.random() < _REPEATED:
            self.journal.write("reclaiming", step=step, fence=claim.fence)
            again = lambda: super(WatchedStore, self).claim(step=step, **arguments)  # noqa: E731
            claim = self._judge("reclaimed", "reclaim_refused", again, step=step)
            if not isinstance(claim, Claim):
                self.journal.write("reclaim_refused", step=step, error=claim.reason)
                return claim
            self.journal.write("claimed", step=step, fence=claim.fence, groups=claim.group_ids)
        self.points.reach("after_claim")
        return claim

    def renew_claim(self, claim: Claim, *, lease_s: float) -> None:
        self.journal.write("renewing", step=claim.step, fence=claim.fence)
        super().renew_claim(claim, lease_s=lease_s)
        self.journal.write("renewed", step=claim.step, fence=claim.fence)

    def commit(self, claim: Claim, entry: StepEntry) -> None:
        self.points.reach("before_commit")
        facts = {"step": claim.step, "fence": claim.fence}
        self.journal.write("committing", **facts, groups=claim.group_ids)
        self._judge("committed", "commit_refused", lambda: super(WatchedStore, self).commit(claim, entry), **facts)
        was_stopped = self.points.reach("after_commit")
        if self.repeats and (was_stopped or random.random() < _REPEATED):
            self.journal.write("recommitting", **facts)
            again = lambda: super(WatchedStore, self).commit(claim, entry)  # noqa: E731
            self._judge("recommitted", "recommit_refused", again, **facts)

    def checkpoint(self, pointer: CheckpointPointer, *, fence: int) -> int:
        self.points.reach("before_pointer")
        facts = {"step": pointer.step, "name": pointer.name, "fence": fence}
        self.journal.write("pointing", **facts)
        call = lambda: super(WatchedStore, self).checkpoint(pointer, fence=fence)  # noqa: E731
        return self._judge("pointed", "pointer_refused", call, **facts)

    def roll_back(self, *, to_step: int, to_version: int) -> tuple[int, int]:
        self.journal.write("rolling_back", step=to_step, version=to_version)
        rolled = super().roll_back(to_step=to_step, to_version=to_version)
        state = self.run_state()
        found = {"found_step": state.step, "found_version": state.version, "found_fence": state.fence}
        self.journal.write("rolled_back", step=to_step, version=to_version, fence=rolled[1], **found)
        return rolled

    def commit_version(self, version: int) -> None:
        super().commit_version(version)
        self.journal.write("version", version=version)

    def _run(self, script: str, *arguments: Any) -> Any:
        if script == "retire_step":
            self.points.reach("before_retire")
        result = super()._run(script, *arguments)
        if script == "reap_leases" and result:
            lapsed = [[f"{text(group)}-{int(attempt)}", text(owner)] for group, attempt, owner, _ in result]
            self.journal.write("lapsed", leases=lapsed)
        if script == "reap_claims" and result:
            self.journal.write("claims_lapsed", steps=[int(step) for step, _, _ in result])
        return result

    def _judge(self, accepted: str, refused: str, call: Callable[[], Any], **facts: Any) -> Any:
        try:
            result = call()
        except ReplayBufferError as error:
            self.journal.write(refused, **facts, error=f"{type(error).__name__}: {error}")
            raise
        self.journal.write(accepted, **facts)
        return result
