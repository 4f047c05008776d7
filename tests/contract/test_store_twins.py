"""Random operations on both twins at once: after each, answers, counts and run state must agree."""

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import msgspec
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from slipstream.buffer.errors import StaleFenceError
from slipstream.buffer.records import Claim, Lease, VersionEntry
from slipstream.buffer.sampling import SamplingRules
from slipstream.buffer.trajectory import Reward, VersionSpan
from slipstream.configs.buffer import (
    AccuracyConfig,
    DropShortConfig,
    FifoConfig,
    FreshestConfig,
    KeepAllConfig,
    PrioritizedConfig,
    RefillConfig,
    ReuseConfig,
    StalenessConfig,
    TrainShortConfig,
    UniformConfig,
    ZeroSignalConfig,
)
from tests.contract.stores import (
    GROUP_SIZE,
    answer,
    audit,
    checkpoint,
    commit,
    make_memory_store,
    make_redis_store,
    open_run,
)
from tests.fakes import FakeClock

OWNERS = st.sampled_from(["a", "b"])
LEASE_S = st.sampled_from([1.0, 5.0, 60.0])
RULES = st.builds(
    SamplingRules,
    sampler=st.sampled_from([FifoConfig(), FreshestConfig(), UniformConfig(), PrioritizedConfig()]),
    reuse=st.builds(
        ReuseConfig,
        max_uses=st.just(3),
        fresh_fraction=st.sampled_from([0.5, 1.0]),
        samples_per_insert=st.sampled_from([None, None, 1.5]),
        max_age=st.sampled_from([None, 1, 3]),
        max_groups=st.sampled_from([1, 4096]),
    ),
    staleness=st.builds(
        StalenessConfig,
        max_lag=st.sampled_from([0, 1, 2]),
        on_stale=st.sampled_from(["mask", "drop"]),
    ),
)
# One member is enough here: groups of two are never short otherwise.
FILTERS = st.sampled_from(
    [
        KeepAllConfig(),
        KeepAllConfig(),
        ZeroSignalConfig(),
        ZeroSignalConfig(0.2),
        AccuracyConfig(),
        AccuracyConfig(0.4, 1.0),
    ]
)
REWARDS = st.builds(
    Reward,
    total=st.sampled_from([0.5, 0.1, 0.25]),
    status=st.sampled_from(["ok", "ok", "ok", "timeout"]),
    is_correct=st.booleans(),
)
DEADLINES = st.sampled_from([None, RefillConfig(), TrainShortConfig(5.0, min_members=1), DropShortConfig(5.0)])


class Twins(RuleBasedStateMachine):
    """Leases and claims ever made are remembered, so that stale ones are used too."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.stores = (make_memory_store(self.clock), make_redis_store(self.clock))
        self.leases: list[Lease] = []
        self.claims: list[Claim] = []
        self.sent: list[tuple] = []
        self.has_baseline = False

    @initialize(
        keeps_finished=st.booleans(),
        max_uses=st.sampled_from([1, 1, 2, 3]),
        group_filter=FILTERS,
        has_baseline=st.sampled_from([False, False, True]),
    )
    def open(self, keeps_finished: bool, max_uses: int, group_filter: Any, has_baseline: bool) -> None:
        self.has_baseline = has_baseline
        for store in self.stores:
            open_run(store, keeps_finished=keeps_finished, max_uses=max_uses, group_filter=group_filter)

    def both(self, operation: Callable[[Any], Any]) -> Any:
        memory, redis = (_outcome(operation, store) for store in self.stores)
        assert memory == redis
        return memory

    def answer(self, lease: Lease, index: int = 0) -> tuple:
        return answer(
            lease, index, has_baseline=self.has_baseline, reward=Reward(total=index / 4, is_correct=index == 0)
        )

    @rule(owner=OWNERS, count=st.integers(0, 4), lease_s=LEASE_S, limit=st.sampled_from([3, 40]))
    def lease(self, owner: str, count: int, lease_s: float, limit: int) -> None:
        wanted = {"owner": owner, "max_groups": count, "group_size": GROUP_SIZE, "lease_s": lease_s}
        wanted |= {"has_baseline": self.has_baseline}
        self.leases += self.both(lambda store: store.lease(admission_limit=limit, **wanted))

    @rule(data=st.data(), version=st.sampled_from([0, 0, 0, 0, 1]), knows=st.sampled_from([True, True, True, False]))
    def insert(self, data: st.DataObject, version: int, knows: bool) -> None:
        """A generator that does not know of the baseline is refused where one is wanted."""
        if not self.leases:
            return
        lease = data.draw(st.sampled_from(self.leases))
        spans, rewards = [VersionSpan(6, version)], st.shared(REWARDS, key="same") | REWARDS
        packed = [
            answer(
                lease, index, version_spans=spans, reward=data.draw(rewards), has_baseline=self.has_baseline is knows
            )
            for index in data.draw(st.permutations(lease.indices))
        ]
        self.sent += packed
        self.both(lambda store: store.insert(packed))

    @rule(owner=OWNERS, count=st.integers(1, 3), leave_out=st.sampled_from([0, 0, 1]))
    def lease_then_answer(self, owner: str, count: int, leave_out: int) -> None:
        wanted = {"owner": owner, "max_groups": count, "group_size": GROUP_SIZE, "lease_s": 5.0}
        wanted |= {"has_baseline": self.has_baseline}
        leases = self.both(lambda store: store.lease(admission_limit=40, **wanted))
        packed = [self.answer(lease, index) for lease in leases for index in lease.indices]
        packed = packed[: len(packed) - leave_out]
        self.leases += leases
        self.sent += packed
        self.both(lambda store: store.insert(packed))

    @rule(data=st.data())
    def send_again(self, data: st.DataObject) -> None:
        if self.sent:
            again = data.draw(st.lists(st.sampled_from(self.sent), max_size=4))
            self.both(lambda store: store.insert(again))

    @rule(owner=OWNERS, lease_s=LEASE_S, newest=st.sampled_from([5, 5, 100]))
    def renew(self, owner: str, lease_s: float, newest: int) -> None:
        ids = [lease.id for lease in self.leases[-newest:]]
        self.both(lambda store: store.renew_leases(owner=owner, lease_s=lease_s, lease_ids=ids))

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if self.leases:
            ids = [lease.id for lease in data.draw(st.lists(st.sampled_from(self.leases), max_size=4))]
            self.both(lambda store: store.return_leases(lease_ids=ids, reason="drain"))

    @rule(owner=OWNERS)
    def give_everything_back(self, owner: str) -> None:
        self.both(lambda store: store.return_leases_of(owner=owner, reason="gone"))

    @rule(seconds=st.sampled_from([0.5, 5.0, 60.0]), deadline=DEADLINES)
    def reap(self, seconds: float, deadline: Any) -> None:
        self.clock.now += seconds
        self.both(lambda store: store.reap(group_deadline=deadline))

    @rule(step=st.integers(1, 6), version=st.integers(0, 5), count=st.integers(1, 3), rules=RULES, lease_s=LEASE_S)
    def claim(self, step: int, version: int, count: int, rules: SamplingRules, lease_s: float) -> None:
        wanted = {"step": step, "version": version, "num_groups": count, "rules": rules, "lease_s": lease_s}
        claimed = self.both(lambda store: store.claim(**wanted))
        if isinstance(claimed, Claim):
            self.claims.append(claimed)
            self.both(lambda store: store.fetch(claimed.group_ids))

    @rule(data=st.data(), lease_s=LEASE_S)
    def renew_claim(self, data: st.DataObject, lease_s: float) -> None:
        if self.claims:
            claim = data.draw(st.sampled_from(self.claims))
            self.both(lambda store: store.renew_claim(claim, lease_s=lease_s))

    @rule(count=st.integers(1, 3), rules=RULES)
    def take_a_step(self, count: int, rules: SamplingRules) -> None:
        state = self.stores[0].run_state()
        wanted = {"step": state.step + 1, "version": state.version, "num_groups": count, "rules": rules}
        claimed = self.both(lambda store: store.claim(lease_s=60.0, **wanted))
        if isinstance(claimed, Claim):
            self.claims.append(claimed)
            self.both(lambda store: commit(store, claimed))

    @rule(count=st.integers(1, 2), times=st.integers(1, 3))
    def die_in_a_step(self, count: int, times: int) -> None:
        for _ in range(times):
            self.claim(step=9, version=1, count=count, rules=SamplingRules(), lease_s=1.0)
            self.reap(seconds=1.0, deadline=None)

    @rule(owner=OWNERS, times=st.integers(1, 3))
    def die_in_a_lease(self, owner: str, times: int) -> None:
        for _ in range(times):
            self.lease(owner=owner, count=2, lease_s=1.0, limit=40)
            self.both(lambda store: store.insert([self.answer(lease) for lease in self.leases[-1:]]))
            self.reap(seconds=1.0, deadline=None)

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        if self.claims:
            claim = data.draw(st.sampled_from(self.claims))
            self.both(lambda store: commit(store, claim))

    @rule(behind=st.integers(-1, 3))
    def checkpoint(self, behind: int) -> None:
        newest = self.stores[0].run_state().step
        self.both(lambda store: checkpoint(store, newest - behind))
        oldest = self.sent[:4]
        self.both(lambda store: store.insert(oldest))

    @rule()
    def checkpoint_at_the_end(self) -> None:
        self.both(lambda store: store.set_phase("finishing"))
        self.checkpoint(behind=0)
        self.both(lambda store: store.set_phase("training"))

    @rule(data=st.data())
    def reject(self, data: st.DataObject) -> None:
        if self.claims:
            claim = data.draw(st.sampled_from(self.claims))
            group_ids = data.draw(st.lists(st.sampled_from([*claim.group_ids, "0", "no-such"]), max_size=2))
            self.both(lambda store: store.reject(claim, group_ids=group_ids, reason="unfit"))

    @rule(limit=st.integers(0, 3))
    def archive(self, limit: int) -> None:
        finished = self.both(lambda store: store.finished(limit=limit))
        self.both(lambda store: store.forget([group.id for group in finished]))

    @rule(behind=st.integers(0, 3), version=st.integers(0, 2))
    def roll_back(self, behind: int, version: int) -> None:
        newest = self.stores[0].run_state().step
        self.both(lambda store: store.roll_back(to_step=max(0, newest - behind), to_version=version))

    @rule(version=st.integers(0, 3), committed=st.booleans())
    def raise_version(self, version: int, committed: bool) -> None:
        self.both(lambda store: store.commit_version(version) if committed else store.announce_version(version))

    @rule(version=st.integers(0, 1))
    def record_version(self, version: int) -> None:
        self.both(lambda store: store.record_version(VersionEntry(version, version, "sum")))
        self.both(lambda store: store.versions())

    @rule(name=st.sampled_from(["e", "f"]), rows=st.lists(st.integers(0, 3), max_size=3))
    def open_evaluation(self, name: str, rows: list[int]) -> None:
        self.both(lambda store: store.open_evaluation(name, purpose="sampled", version=0, rows=rows))
        self.both(lambda store: store.evaluation(name))

    @rule(phase=st.sampled_from(["training", "finishing", "finished"]))
    def lease_in_phase(self, phase: str) -> None:
        self.both(lambda store: store.set_phase(phase, detail=phase))
        self.lease(owner="a", count=3, lease_s=5.0, limit=40)
        self.both(lambda store: store.set_phase("training"))

    @invariant()
    def agree_and_reconcile(self) -> None:
        audit(self.both(lambda store: store.counts()))
        books = self.both(lambda store: store.audit())
        assert books.is_sound, books
        self.both(lambda store: store.ledger(first_step=2))
        self.both(lambda store: store.ready_versions())
        for name in ("e", "f"):
            self.both(lambda store, name=name: store.evaluation(name))
        memory, redis = (store.run_state() for store in self.stores)
        assert memory == msgspec.structs.replace(redis, run_id=memory.run_id)

    def teardown(self) -> None:
        for store in self.stores:
            store.close()


def _outcome(operation: Callable[[Any], Any], store: Any) -> Any:
    try:
        return operation(store)
    except StaleFenceError as error:
        return str(error)


TestTwins = Twins.TestCase
TestTwins.settings = settings(
    max_examples=50, stateful_step_count=45, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
