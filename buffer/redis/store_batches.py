"""RedisStore, batches: claim, fetch, reject, commit, checkpoint, roll back."""

import time

from slipstream.buffer.codec import decode, encode
from slipstream.buffer.errors import StaleFenceError
from slipstream.buffer.records import CheckpointPointer, Claim, StepEntry
from slipstream.buffer.redis.connection import text
from slipstream.buffer.redis.scripts.batches import (
    CLAIM,
    COMMIT,
    QUEUE,
    REJECT,
    RELEASE_CLAIM,
    RENEW_CLAIM,
    RETIRE_STEP,
    ROLL_BACK,
    SET_CHECKPOINT,
    SIFT,
)
from slipstream.buffer.redis.store_run import RedisRun
from slipstream.buffer.sampling import Candidate, NotReady, Queue, Sample, SamplingRules, evict, sample, sample_oldest
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

_FETCHED_AT_ONCE = 16
"""Groups whose payloads wait in the connection's buffers together."""
_LONGEST_BLOCK_S = 1.0
"""One blocking call; a second waiter may have taken the ring meant for this one, so look again after it."""
_SHORTEST_BLOCK_S = 0.01
"""Redis cuts to whole milliseconds and takes 0 for "forever": 6.2 makes 0 even of 0.001."""
_CLAIM_TRIES = 8
"""Draws before another claimer of the same groups is reported."""


class RedisBatches(RedisRun):
    """Operations on the learner's batches."""

    def claim(
        self, *, step: int, version: int, num_groups: int, rules: SamplingRules, lease_s: float
    ) -> Claim | NotReady:
        """See `Store.claim`."""
        for _ in range(_CLAIM_TRIES):
            newest, num_ready, oldest = self._run(RELEASE_CLAIM, step, num_groups if rules.only_oldest else 1)
            if step <= newest:
                raise already_committed(step, newest=newest)
            if rules.only_oldest:
                selected = sample_oldest([text(group) for group in oldest], num_groups=num_groups, num_ready=num_ready)
            else:
                selected = self._select(rules, step=step, version=version, num_groups=num_groups)
            if isinstance(selected, NotReady):
                return selected
            claimed = self._run(CLAIM, step, int(lease_s * 1000), *selected.group_ids)
            if claimed:
                fence, *sums = claimed
                return make_claim(selected, step=step, fence=fence, lag=split_lag(*sums, version=version))
        raise StaleFenceError(
            f"step {step} must have one claimer, but its groups were taken {_CLAIM_TRIES} times in a row."
        )

    def _select(self, rules: SamplingRules, *, step: int, version: int, num_groups: int) -> Sample | NotReady:
        _, seed = self._rows_and_seed()
        queue = self._queue()
        evictions = evict(queue, rules, version=version)
        if not evictions.is_empty:
            self._run(SIFT, len(evictions.expired), *evictions.expired, *evictions.released)
            queue = self._queue()
        return sample(queue, rules, num_groups=num_groups, seed=seed, step=step)

    def _queue(self) -> Queue:
        num_arrived, num_uses, ready, reusable = self._run(QUEUE)
        return Queue(
            ready=_candidates(ready),
            reusable=_candidates(reusable),
            num_arrived=num_arrived,
            num_uses=num_uses,
        )

    def wait_ready(self, *, num_groups: int, timeout_s: float) -> bool:
        """See `Store.wait_ready`. Woken by the bell that a completed (or given back) group rings."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._mapped_errors():
                if self._client.zcard(self._key("ready")) >= num_groups:
                    return True
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    return False
                self._client.blpop(
                    [self._key("bell")], timeout=min(max(remaining_s, _SHORTEST_BLOCK_S), _LONGEST_BLOCK_S)
                )

    def fetch(self, group_ids: list[str]) -> list[list[bytes]]:
        """See `Store.fetch`."""
        groups: list[list[bytes]] = []
        for start in range(0, len(group_ids), _FETCHED_AT_ONCE):
            groups += self._fetch_chunk(group_ids[start : start + _FETCHED_AT_ONCE])
        return groups

    def renew_claim(self, claim: Claim, *, lease_s: float) -> None:
        """See `Store.renew_claim`."""
        if not self._run(RENEW_CLAIM, claim.step, claim.fence, int(lease_s * 1000)):
            raise stale_claim(claim)

    def reject(self, claim: Claim, *, group_ids: list[str], reason: str) -> int:
        """See `Store.reject`."""
        num_rejected = self._run(REJECT, claim.step, claim.fence, reason, *group_ids)
        if num_rejected < 0:
            raise stale_claim(claim)
        return num_rejected

    def commit(self, claim: Claim, entry: StepEntry) -> None:
        """See `Store.commit`."""
        is_live, newest = self._run(COMMIT, claim.step, claim.fence, encode(entry))
        if not is_live:
            raise stale_claim(claim)
        if newest != claim.step:
            raise out_of_order(claim, newest=newest)

    def checkpoint(self, pointer: CheckpointPointer, *, fence: int) -> int:
        """See `Store.checkpoint`.

        The pointer first, then one script per step, so that a long checkpoint interval does not keep the server busy:
        steps that the pointer covers and that a crash left unretired are retired with the next checkpoint.
        """
        step, newest = self._run(SET_CHECKPOINT, pointer.step, fence, encode(pointer))
        if pointer.step > step:
            raise not_yet_committed(pointer, step=step)
        if fence != newest:
            raise superseded_learner(pointer, fence=fence, newest=newest)
        with self._mapped_errors():
            steps = self._client.zrangebyscore(self._key("used_steps"), "-inf", pointer.step)
        return sum(self._run(RETIRE_STEP, step) for step in steps)

    def roll_back(self, *, to_step: int, to_version: int) -> int:
        """See `Store.roll_back`."""
        return self._run(ROLL_BACK, to_step, to_version, self._max_attempts)

    def ledger(self, *, first_step: int = 1) -> list[StepEntry]:
        """See `Store.ledger`."""
        with self._mapped_errors():
            entries = self._client.hvals(self._key("ledger"))
        decoded = (decode(entry, StepEntry) for entry in entries)
        return sorted((entry for entry in decoded if entry.step >= first_step), key=lambda entry: entry.step)

    def _fetch_chunk(self, group_ids: list[str]) -> list[list[bytes]]:
        pipeline = self._client.pipeline(transaction=False)
        for group_id in group_ids:
            pipeline.hgetall(self._key(f"payloads:{group_id}"))
        with self._mapped_errors():
            stored = pipeline.execute()
        return [_in_order(group_id, members) for group_id, members in zip(group_ids, stored, strict=True)]


def _candidates(packed: bytes) -> list[Candidate]:
    return [_candidate(*facts.split()) for facts in text(packed).split(";") if facts]


def _candidate(
    group_id: str, sequence: str, oldest: str, answered: str, reward_sum: str, reward_squares: str
) -> Candidate:
    return Candidate(
        id=group_id,
        sequence=int(sequence),
        oldest_version=int(oldest),
        answered=int(answered),
        reward_sum=float(reward_sum),
        reward_squares=float(reward_squares),
    )


def _in_order(group_id: str, members: dict[bytes, bytes]) -> list[bytes]:
    if not members:
        raise not_stored(group_id)
    return [members[index] for index in sorted(members, key=int)]
