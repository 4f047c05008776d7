"""Siege: attacks a broker with mutated frames while it serves a regular peer, then checks its state."""

import random
import time
from pathlib import Path

import msgspec

from slipstream.buffer.accounting import StoreCounts
from slipstream.buffer.codec import Packed
from slipstream.buffer.records import FRAMES_KEPT
from slipstream.buffer.redis.store import RedisStore
from tests.hostile.attacker import Attacker
from tests.hostile.good_peer import GROUP_SIZE, NUM_GROUPS, GoodPeer, Target
from tests.hostile.mutator import Mutator, some_valid
from tests.memory_store.store import MemoryStore

_FRAMES_PER_ROUND = 250
_STORED_BEFORE = 64
_SHARE_UNCHANGED = 0.05
_MAX_GROWTH_MIB = 8.0
"""Limit per process after the warm-up; allocators round up by about half of it."""


class Siege:
    """One attack. `run` raises AssertionError if the broker was harmed."""

    def __init__(self, folder: Path, *, seed: int) -> None:
        self._randomness = random.Random(seed)
        self._mutator = Mutator(self._randomness)
        self._target = Target(folder)
        self._num_sent = 0

    def run(self, *, num_frames: int) -> dict[str, object]:
        """Send about `num_frames`, then check broker and store; returns figures to print."""
        store = self._target.start()
        try:
            good, attacker = GoodPeer(self._target.address), Attacker(self._target.address)
            good.join()
            good.answer(_STORED_BEFORE)
            started_at = time.monotonic()
            growth = self._attack(store, good, attacker, num_frames=num_frames)
            seconds = time.monotonic() - started_at
            self._check(store, good, attacker)
            good.close()
            attacker.close()
            return {
                "frames": self._num_sent,
                "frames/s": round(self._num_sent / seconds),
                "sent as": dict(attacker.kinds.most_common()),
                "refused": store.counts().refused,
                "slowest ack of the good peer, s": round(good.slowest_ack_s, 3),
                "growth, MiB (broker, store)": [round(each, 2) for each in growth],
            }
        finally:
            store.close()
            self._target.stop()

    def _attack(self, store: RedisStore, good: GoodPeer, attacker: Attacker, *, num_frames: int) -> tuple[float, float]:
        """Send the frames; returns the growth in MiB of broker and store over the last three quarters."""
        self._send(good, attacker, until=num_frames // 4)
        before = self._target.broker_mib, self._target.store_mib
        self._send(good, attacker, until=num_frames)
        growth = self._target.broker_mib - before[0], self._target.store_mib - before[1]
        assert max(growth) < _MAX_GROWTH_MIB, f"broker and store must not grow, got {growth} MiB"
        return growth

    def _send(self, good: GoodPeer, attacker: Attacker, *, until: int) -> None:
        while self._num_sent < until:
            stored = list(good.stored.values())
            for _ in range(_FRAMES_PER_ROUND):
                valid = some_valid(self._randomness, stored)
                is_kept = self._randomness.random() < _SHARE_UNCHANGED
                attacker.send(valid if is_kept else self._mutator.mutate(valid))
            attacker.send_far_oversized()
            self._num_sent += _FRAMES_PER_ROUND + 1
            # The last group stays unanswered: some frames claim to answer its lease.
            if good.num_owed > GROUP_SIZE:
                good.answer(1)
            attacker.await_answers(good.step)
            assert self._target.is_alive, "the broker must survive"

    def _check(self, store: RedisStore, good: GoodPeer, attacker: Attacker) -> None:
        counts = store.counts()
        assert sum(counts.refused.values()) == attacker.expected_refusals, (counts.refused, attacker.expected_refusals)
        assert "internal_error" not in counts.refused, "no check may raise an unforeseen exception"
        assert attacker.acknowledged <= good.stored.keys()
        assert len(store.quarantined_frames()) <= FRAMES_KEPT
        without_attack = _counts_of(list(good.stored.values()))
        own = {"refused": counts.refused, "duplicates": counts.duplicates}
        assert counts == msgspec.structs.replace(without_attack, **own)
        audit = store.audit()
        assert audit.is_sound, audit
        assert audit.accepted == audit.buffered == len(good.stored)
        for group_id in {header.group_id for header, _ in good.stored.values()}:
            members = sorted((h.index, p) for h, p in good.stored.values() if h.group_id == group_id)
            assert store.fetch([group_id]) == [[payload for _, payload in members]]


def _counts_of(stored: list[Packed]) -> StoreCounts:
    """Counts of a store that received the regular peer's trajectories only."""
    twin = MemoryStore()
    twin.open_run("twin", config_json="{}", num_rows=NUM_GROUPS, seed=0)
    twin.lease(
        owner="good/good-1", max_groups=NUM_GROUPS, group_size=GROUP_SIZE, lease_s=60, admission_limit=NUM_GROUPS
    )
    twin.insert(stored)
    return twin.counts()
