"""RedisStore, learner side: claims, commits, checkpoints, rollbacks, ledger."""

import time
from collections import Counter
from collections.abc import Mapping

import numpy as np

from slipstream.buffer.codec import decode, encode, pack, unpack
from slipstream.buffer.errors import StaleFenceError
from slipstream.buffer.records import CheckpointPointer, Claim, StepEntry, StoredGroup
from slipstream.buffer.redis.connection import RedisConnection, text
from slipstream.buffer.sampling import Candidate, NotReady, Queue, Sample, SamplingRules, evict, sample, sample_oldest
from slipstream.buffer.store_rules import make_claim, split_lag, stale_claim
from slipstream.buffer.trajectory import Trajectory, make_lease_id

_FETCHED_AT_ONCE = 16
"""Groups (or ledger entries) per round trip."""
_LONGEST_BLOCK_S = 1.0
"""Maximum wait, because another waiter may take the bell's only element."""
_SHORTEST_BLOCK_S = 0.01
"""Redis truncates timeouts to milliseconds (6.2 even 0.001 to 0), and 0 blocks forever."""
_CLAIM_TRIES = 8
"""Attempts before reporting another claimer."""


class RedisBatches(RedisConnection):
    """Operations on the learner's batches."""

    _planned: Mapping[int, Sample] = {}
    """Step -> its groups in a replay."""

    def load(self, groups: list[StoredGroup], *, samples: Mapping[int, Sample]) -> None:
        """Load groups of an earlier run as ready, in this order, accepted and admitted. Raises RecordRefusedError.

        Other ordinals are marked as finished. `samples`: claims of these steps, in place of the sampler's. Not atomic:
        call it before anything else uses the run.
        """
        self._planned = samples
        for start in range(0, len(groups), _FETCHED_AT_ONCE):
            pipeline = self._client.pipeline(transaction=False)
            for sequence, group in enumerate(groups[start : start + _FETCHED_AT_ONCE], start=start + 1):
                trajectories = [unpack(payload) for payload in group.payloads]
                payloads = {each.index: payload for each, payload in zip(trajectories, group.payloads, strict=True)}
                fields = {"sequence": sequence} | _record(group, trajectories)
                pipeline.hset(self._key(f"group:{group.id}"), mapping=fields)
                pipeline.hset(self._key(f"payloads:{group.id}"), mapping=payloads)
                pipeline.zadd(self._key("ready"), {group.id: sequence})
                pipeline.hincrby(self._key("counters"), "accepted", len(payloads))
                pipeline.hincrby(self._key("counters"), "payload_bytes", sum(map(len, group.payloads)))
            self._call(pipeline.execute)
        ordinals = [int(group.id) for group in groups]
        done = np.ones(max(ordinals, default=-1) + 1, dtype=np.uint8)
        done[ordinals] = 0
        uses = Counter(group_id for planned in samples.values() for group_id in planned.group_ids)
        max_uses = int(self._call(self._client.hget, self._key("run"), "max_uses") or 1)
        counts = {"next_ordinal": len(done), "admitted": len(groups), "ready_sequence": len(groups)}
        counts["max_uses"] = max([max_uses, *uses.values()])
        self._call(self._client.set, self._key("done"), np.packbits(done).tobytes())
        self._call(self._client.hset, self._key("run"), mapping=counts)

    def claim(
        self, *, step: int, version: int, num_groups: int, rules: SamplingRules, lease_s: float
    ) -> Claim | NotReady:
        """Claim `num_groups` groups for `step` of a learner at `version`, or return why it cannot yet.

        Stale groups leave the queue first. An earlier claim of the step is taken back, so a retry is safe. Raises
        StaleFenceError for a committed step.
        """
        # Sampling happens between two scripts; the second refuses groups that moved in between.
        for _ in range(_CLAIM_TRIES):
            newest, num_ready, oldest = self._run("release_claim", step, num_groups if rules.only_oldest else 1)
            if step <= newest:
                raise StaleFenceError(
                    f"a step must be claimed before it is committed, got step {step}, but step {newest} is the last "
                    "one committed: another learner has continued this run; start again with resume=true."
                )
            if step in self._planned:
                selected: Sample | NotReady = self._planned[step]
            elif rules.only_oldest:
                selected = sample_oldest([text(group) for group in oldest], num_groups=num_groups, num_ready=num_ready)
            else:
                _, seed = self._rows_and_seed()
                queue = self._read_queue()
                evictions = evict(queue, rules, version=version)
                if evictions.expired or evictions.released:
                    self._run("evict", len(evictions.expired), *evictions.expired, *evictions.released)
                    queue = self._read_queue()
                num_ready = len(queue.ready)
                selected = sample(queue, rules, num_groups=num_groups, seed=seed, step=step)
            if isinstance(selected, NotReady):
                return selected
            if claimed := self._run("claim", step, int(lease_s * 1000), *selected.group_ids):
                fence, *sums = claimed
                lag, num_spare = split_lag(*sums, version=version), num_ready - selected.reused.count(False)
                return make_claim(selected, step=step, fence=fence, lag=lag, num_spare=num_spare)
        found = f"its groups were taken {_CLAIM_TRIES} times in a row"
        raise StaleFenceError(f"step {step} must have one claimer, but {found}.")

    def _read_queue(self) -> Queue:
        num_arrived, num_uses, ready, reusable = self._run("read_queue")
        return Queue(_candidates(ready), _candidates(reusable), num_arrived, num_uses)

    def wait_ready(self, *, num_groups: int, timeout_s: float) -> bool:
        """Block until `num_groups` groups are ready; False after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self._call(self._client.zcard, self._key("ready")) < num_groups:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return False
            block_s = min(max(remaining_s, _SHORTEST_BLOCK_S), _LONGEST_BLOCK_S)
            self._call(self._client.blpop, [self._key("bell")], timeout=block_s)
        return True

    def fetch(self, group_ids: list[str]) -> list[list[bytes]]:
        """Each group's encoded trajectories by index. Raises StaleFenceError for a group without any."""
        groups: list[list[bytes]] = []
        for start in range(0, len(group_ids), _FETCHED_AT_ONCE):
            chunk = group_ids[start : start + _FETCHED_AT_ONCE]
            # Not a script: payloads never change, and reading megabytes would block all clients.
            pipeline = self._client.pipeline(transaction=False)
            for group_id in chunk:
                pipeline.hgetall(self._key(f"payloads:{group_id}"))
            for group_id, members in zip(chunk, self._call(pipeline.execute), strict=True):
                if not members:
                    found = "it is retired or has no members"
                    raise StaleFenceError(f"group {group_id} must be stored to be fetched, but {found}.")
                groups.append([members[index] for index in sorted(members, key=int)])
        return groups

    def renew_claim(self, claim: Claim, *, lease_s: float) -> None:
        if not self._run("renew_claim", claim.step, claim.fence, int(lease_s * 1000)):
            raise stale_claim(claim)

    def reject(self, claim: Claim, *, group_ids: list[str], reason: str) -> int:
        """Remove groups from a claim; return their number. Raises StaleFenceError.

        Groups trained on before are only released, not used again. Claim the step again to refill it.
        """
        num_rejected = self._run("reject", claim.step, claim.fence, reason, *group_ids)
        if num_rejected < 0:
            raise stale_claim(claim)
        return num_rejected

    def commit(self, claim: Claim, entry: StepEntry) -> None:
        """Mark the claim's groups as used, set RunState.step, and add `entry` to the ledger, atomically.

        Committing the same claim again is a no-op. Raises StaleFenceError for a lapsed claim or a step out of order.
        """
        is_live, newest = self._run("commit", claim.step, claim.fence, encode(entry))
        if not is_live:
            raise stale_claim(claim)
        if newest != claim.step:
            raise StaleFenceError(
                f"steps must be committed one after the other, got step {claim.step} after step {newest}: the store is "
                "behind the learner, or another learner is running; start again with resume=true."
            )

    def checkpoint(self, pointer: CheckpointPointer, *, fence: int) -> int:
        """Record a durable checkpoint of all steps <= pointer.step; retire their groups, and return their number.

        Reusable groups stay until the run is finishing. The ledger up to the pointer is final. Raises StaleFenceError
        if it covers uncommitted steps, or if `fence` is not RunState.fence.
        """
        # One step per script, to block the server only briefly. After a crash, the next checkpoint retires the rest.
        step, newest = self._run("set_checkpoint", pointer.step, fence, encode(pointer))
        if pointer.step > step:
            raise StaleFenceError(
                f"a checkpoint must cover committed steps only, got step {pointer.step} ({pointer.name}), but step "
                f"{step} is the last one committed: the store is behind the learner; start the learner again with "
                "resume=true."
            )
        if fence != newest:
            raise StaleFenceError(
                f"a checkpoint must come from the newest learner, got {pointer.name} with fence {fence} after fence "
                f"{newest}: another learner has continued this run; start again with resume=true."
            )
        steps = self._call(self._client.zrangebyscore, self._key("used_steps"), "-inf", pointer.step)
        return sum(self._run("retire_step", step) for step in steps)

    def roll_back(self, *, to_step: int, to_version: int) -> tuple[int, int]:
        """Resume from a checkpoint: groups that are claimed, or were used after `to_step`, return to the queue.

        Returns their number and the new RunState.fence, which locks out earlier learners. Removes later ledger entries.
        Versions stay announced, since their trajectories may arrive. A live claim counts as an attempt, so a group that
        crashes learners ends in quarantine.
        """
        num_returned, fence = self._run("roll_back", to_step, to_version, self._max_attempts)
        return num_returned, fence

    def ledger(self, *, first_step: int = 1) -> list[StepEntry]:
        """Entries of committed steps that have not moved to the archive, in order; see `whole_ledger`."""
        key, entries = self._key("ledger"), list[bytes | None]()
        # Names first: all entries may take hundreds of megabytes.
        steps = sorted(step for name in self._call(self._client.hkeys, key) if (step := int(name)) >= first_step)
        for start in range(0, len(steps), _FETCHED_AT_ONCE):
            entries += self._call(self._client.hmget, key, steps[start : start + _FETCHED_AT_ONCE])
        # A rollback may have removed some.
        return [decode(entry, StepEntry) for entry in entries if entry is not None]


def _record(group: StoredGroup, trajectories: list[Trajectory]) -> dict[str, int | float | str]:
    """Group's fields as `lease.lua` and `insert.lua` write them, without lag."""
    lease_id, size = make_lease_id(group.id, trajectories[0].attempt), len(trajectories)
    headers = [pack(each, lease_id=lease_id, purpose="train", group_size=size)[0] for each in trajectories]
    rewards = [header.reward for header in headers if header.reward_status == "ok" and not header.is_greedy]
    return {
        "attempt": trajectories[0].attempt,
        "purpose": "train",
        "size": size,
        "members": size,
        "claim_attempts": 0,
        "oldest": min(header.oldest_version for header in headers),
        "tokens": sum(header.written_tokens for header in headers),
        "bytes": sum(map(len, group.payloads)),
        "answered": len(rewards),
        "reward_sum": sum(rewards),
        "reward_squares": sum(reward * reward for reward in rewards),
    }


def _candidates(packed: bytes) -> list[Candidate]:
    rows = (fields.split() for fields in text(packed).split(";") if fields)
    return [
        Candidate(group_id, int(sequence), int(oldest), int(answered), float(reward_sum), float(reward_squares))
        for group_id, sequence, oldest, answered, reward_sum, reward_squares in rows
    ]
