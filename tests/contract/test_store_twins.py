"""Random operations on both stores: after each one, answers, counters, and run state must agree."""

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import msgspec
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from slipstream.buffer.errors import StaleFenceError
from slipstream.buffer.records import Claim, Lease, StepEntry, VersionEntry
from slipstream.buffer.sampling import SamplingRules, Upcoming
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
    ZeroAdvantageConfig,
)
from slipstream.configs.data import CurriculumConfig
from tests.contract.stores import (
    GROUP_SIZE,
    answer,
    audit,
    check_state,
    checkpoint,
    commit,
    make_memory_store,
    make_redis_store,
    open_run,
    renew,
)
from tests.fakes import FakeClock

pick = st.sampled_from
OWNERS, LEASE_S = pick(["a", "b"]), pick([1.0, 5.0, 60.0])
GUESTS = pick(["alice", "bob"])
RULES = st.builds(
    SamplingRules,
    sampler=pick([FifoConfig(), FreshestConfig(), UniformConfig(), PrioritizedConfig()]),
    reuse=st.builds(
        ReuseConfig,
        max_uses=st.just(3),
        fresh_fraction=pick([0.5, 1.0]),
        samples_per_insert=pick([None, None, 1.5]),
        max_age=pick([None, 1, 3]),
        max_groups=pick([1, 4096]),
    ),
    staleness=st.builds(StalenessConfig, max_lag=pick([0, 1, 2]), on_stale=pick(["mask", "drop"])),
)
KEEP, ZERO, SHARE = KeepAllConfig(), ZeroAdvantageConfig(), AccuracyConfig()
FILTERS = pick([KEEP, KEEP, ZERO, SHARE, AccuracyConfig(0.4, 1.0)])
CURRICULA = pick([None, CurriculumConfig(0.3, 0.7, min_answers=1), CurriculumConfig()])
REWARDS = st.builds(
    Reward, total=pick([0.5, 0.1, 0.25]), status=pick(["ok", "ok", "ok", "timeout"]), is_correct=st.booleans()
)
# Minimum 1, because groups of two could not be incomplete otherwise.
DEADLINES = pick([None, RefillConfig(), TrainShortConfig(5.0, 1), TrainShortConfig(0.5, 1), DropShortConfig(5.0)])


class Twins(RuleBasedStateMachine):
    """The same operations on a memory store and a Redis store, on one clock."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.stores = (make_memory_store(self.clock), make_redis_store(self.clock))
        self.leases: list[Lease] = []
        self.claims: list[Claim] = []
        self.sent: list[tuple] = []
        self.has_baseline = False
        self.archived: dict[int, StepEntry] = {}

    def both(self, operation: Callable[[Any], Any]) -> Any:
        memory, redis = (_outcome(operation, store) for store in self.stores)
        assert memory == redis
        return memory

    def answer(self, lease: Lease, index: int = 0) -> tuple:
        reward = Reward(total=index / 4, is_correct=index == 0)
        return answer(lease, index, has_baseline=self.has_baseline, reward=reward)

    @initialize(
        keeps=st.booleans(),
        uses=pick([1, 1, 2, 3]),
        group_filter=FILTERS,
        greedy=pick([False, False, True]),
        curriculum=CURRICULA,
    )
    def open(self, keeps: bool, uses: int, group_filter: Any, greedy: bool, curriculum: Any) -> None:
        self.has_baseline = greedy
        for store in self.stores:
            open_run(store, keeps_finished=keeps, max_uses=uses, group_filter=group_filter, curriculum=curriculum)

    @rule(owner=OWNERS, count=st.integers(0, 4), lease_s=LEASE_S, limit=pick([-1, 3, 40]), ahead=pick([-2, 0, 0, 1]))
    def lease(self, owner: str, count: int, lease_s: float, limit: int, ahead: int) -> None:
        self.lease_to(owner, count, lease_s, limit, ahead)

    def lease_to(self, owner: str, count: int, lease_s: float, limit: int = 40, ahead: int = 0) -> list[Lease]:
        """`ahead`: error of what is known of the next ordinal."""
        first = self.stores[0].run_state().next_ordinal + ahead
        upcoming = Upcoming(max(0, first), [ordinal % 3 == 0 for ordinal in range(first, first + 9)])
        asked = {"owner": owner, "max_groups": count, "lease_s": lease_s, "admission_limit": limit}
        asked |= {"group_size": GROUP_SIZE, "has_baseline": self.has_baseline, "upcoming": upcoming}
        leases = self.both(lambda store: store.lease(**asked))
        self.leases += leases
        return leases

    def send(self, packed: list[tuple], *, guest: str = "") -> None:
        self.sent += packed
        self.both(lambda store: store.insert(packed, guest=guest))

    @rule(guest=GUESTS)
    def quarantine_guest(self, guest: str) -> None:
        self.both(lambda store: store.quarantine_guest(guest, reason="lies"))
        self.both(lambda store: store.quarantined_guests())

    @rule(data=st.data(), version=pick([0, 0, 0, 0, 1]), knows=pick([True, True, True, False]), guest=GUESTS)
    def insert(self, data: st.DataObject, version: int, knows: bool, guest: str) -> None:
        """A generator that does not know of the baseline is refused where one is expected."""
        if not self.leases:
            return
        lease = data.draw(pick(self.leases))
        fields = {"version_spans": [VersionSpan(6, version)], "has_baseline": self.has_baseline is knows}
        rewards = st.shared(REWARDS, key="same") | REWARDS
        indices = data.draw(st.permutations(lease.indices))
        self.send([answer(lease, index, reward=data.draw(rewards), **fields) for index in indices], guest=guest)

    @rule(owner=OWNERS, count=st.integers(1, 3), leave_out=pick([0, 0, 1]), guest=pick(["", "", "alice", "bob"]))
    def lease_then_answer(self, owner: str, count: int, leave_out: int, guest: str) -> None:
        leases = self.lease_to(owner, count, lease_s=5.0)
        packed = [self.answer(lease, index) for lease in leases for index in lease.indices]
        self.send(packed[: len(packed) - leave_out], guest=guest)

    @rule(data=st.data())
    def send_again(self, data: st.DataObject) -> None:
        if self.sent:
            again = data.draw(st.lists(pick(self.sent), max_size=4))
            self.both(lambda store: store.insert(again))

    @rule(owner=OWNERS, lease_s=LEASE_S, newest=pick([5, 5, 100]))
    def renew(self, owner: str, lease_s: float, newest: int) -> None:
        ids = [lease.id for lease in self.leases[-newest:]]
        self.both(lambda store: renew(store, ids, owner=owner, lease_s=lease_s))

    @rule(data=st.data())
    def return_leases(self, data: st.DataObject) -> None:
        if self.leases:
            ids = [lease.id for lease in data.draw(st.lists(pick(self.leases), max_size=4))]
            self.both(lambda store: store.return_leases(lease_ids=ids, reason="drain"))

    @rule(owner=OWNERS)
    def return_everything(self, owner: str) -> None:
        self.both(lambda store: store.return_leases_of(owner=owner, reason="gone"))

    @rule(seconds=pick([0.5, 5.0, 60.0]), deadline=DEADLINES)
    def reap(self, seconds: float, deadline: Any) -> None:
        self.clock.now += seconds
        self.both(lambda store: store.reap(group_deadline=deadline))

    @rule(jump_s=pick([-90.0, 0.0, 90.0]))
    def set_clock(self, jump_s: float) -> None:
        self.clock.now += jump_s
        self.both(lambda store: store.follow_clock(jump_s=max(jump_s, 0.0), lease_s=5.0, claim_lease_s=60.0))

    @rule(owner=OWNERS, times=st.integers(1, 3))
    def die_in_a_lease(self, owner: str, times: int) -> None:
        for _ in range(times):
            self.lease_to(owner, 2, lease_s=1.0)
            self.both(lambda store: store.insert([self.answer(lease) for lease in self.leases[-1:]]))
            self.reap(seconds=1.0, deadline=None)

    @rule(phase=pick(["training", "finishing", "finished"]))
    def lease_in_phase(self, phase: str) -> None:
        self.both(lambda store: store.set_phase(phase, detail=phase))
        self.lease_to("a", 3, lease_s=5.0)
        self.both(lambda store: store.set_phase("training"))

    @rule(step=st.integers(1, 6), version=st.integers(0, 5), count=st.integers(1, 3), rules=RULES, lease_s=LEASE_S)
    def claim(self, step: int, version: int, count: int, rules: SamplingRules, lease_s: float) -> None:
        self.claim_for(step, version, count, rules, lease_s)

    def claim_for(self, step: int, version: int, count: int, rules: SamplingRules, lease_s: float) -> Claim | None:
        asked = {"step": step, "version": version, "num_groups": count, "rules": rules, "lease_s": lease_s}
        claimed = self.both(lambda store: store.claim(**asked))
        if not isinstance(claimed, Claim):
            return None
        self.claims.append(claimed)
        self.both(lambda store: store.fetch(claimed.group_ids))
        return claimed

    @rule(data=st.data(), lease_s=LEASE_S)
    def renew_claim(self, data: st.DataObject, lease_s: float) -> None:
        if self.claims:
            claim = data.draw(pick(self.claims))
            self.both(lambda store: store.renew_claim(claim, lease_s=lease_s))

    @rule(data=st.data())
    def reject(self, data: st.DataObject) -> None:
        if self.claims:
            claim = data.draw(pick(self.claims))
            group_ids = data.draw(st.lists(pick([*claim.group_ids, "0", "no-such"]), max_size=2))
            self.both(lambda store: store.reject(claim, group_ids=group_ids, reason="unfit"))

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        if self.claims:
            claim = data.draw(pick(self.claims))
            self.both(lambda store: commit(store, claim))

    @rule(count=st.integers(1, 3), rules=RULES)
    def take_a_step(self, count: int, rules: SamplingRules) -> None:
        state = self.stores[0].run_state()
        if claimed := self.claim_for(state.step + 1, state.version, count, rules, lease_s=60.0):
            self.both(lambda store: commit(store, claimed))

    @rule(count=st.integers(1, 2), times=st.integers(1, 3))
    def die_in_a_step(self, count: int, times: int) -> None:
        for _ in range(times):
            self.claim_for(9, 1, count, SamplingRules(), lease_s=1.0)
            self.reap(seconds=1.0, deadline=None)

    @rule(behind=st.integers(-1, 3))
    def checkpoint(self, behind: int) -> None:
        newest = self.stores[0].run_state().step
        self.both(lambda store: checkpoint(store, newest - behind))
        self.both(lambda store: store.insert(self.sent[:4]))

    @rule()
    def checkpoint_at_the_end(self) -> None:
        self.both(lambda store: store.set_phase("finishing"))
        self.checkpoint(behind=0)
        self.both(lambda store: store.set_phase("training"))

    @rule(behind=st.integers(0, 3), version=st.integers(0, 2))
    def roll_back(self, behind: int, version: int) -> None:
        newest = self.stores[0].run_state().step
        self.both(lambda store: store.roll_back(to_step=max(0, newest - behind), to_version=version))

    @rule(limit=st.integers(0, 3))
    def archive(self, limit: int) -> None:
        finished = self.both(lambda store: store.finished(limit=limit))
        self.both(lambda store: store.forget([group.id for group in finished]))

    @rule(newest=st.integers(0, 5), is_lost=pick([False, False, False, True]))
    def archive_steps(self, newest: int, is_lost: bool) -> None:
        """`is_lost`: the store lost the newest entry, and has another."""
        if entries := self.both(lambda store: store.ledger())[: newest + 1]:
            last = msgspec.structs.replace(entries[-1], fence=entries[-1].fence + 9 * is_lost)
            self.archived |= {entry.step: entry for entry in [*entries[:-1], last]}
            self.both(lambda store: store.forget_steps(last))

    @rule()
    def look_at_every_key(self) -> None:
        check_state(self.stores[1], archived=self.ledger_of_archive())

    def ledger_of_archive(self) -> list[StepEntry]:
        return [self.archived[step] for step in sorted(self.archived)]

    @rule(version=st.integers(0, 3), committed=st.booleans())
    def raise_version(self, version: int, committed: bool) -> None:
        self.both(lambda store: store.commit_version(version) if committed else store.announce_version(version))

    @rule(version=st.integers(0, 1))
    def record_version(self, version: int) -> None:
        self.both(lambda store: store.record_version(VersionEntry(version, version, "sum")))
        self.both(lambda store: store.versions())

    @rule(name=pick(["e", "f"]), rows=st.lists(st.integers(0, 3), max_size=3), samples=st.integers(1, 2))
    def open_evaluation(self, name: str, rows: list[int], samples: int) -> None:
        self.both(lambda store: store.open_evaluation(name, purpose="sampled", version=0, rows=rows, samples=samples))

    @invariant()
    def agree_and_reconcile(self) -> None:
        audit(self.both(lambda store: store.counts()))
        found = self.both(lambda store: store.audit(archived=self.ledger_of_archive))
        assert found.is_sound, found
        self.both(lambda store: (store.ledger(first_step=2), store.ready_versions()))
        self.both(lambda store: (store.evaluation("e"), store.evaluation("f")))
        memory, redis = (store.run_state() for store in self.stores)
        assert memory == msgspec.structs.replace(redis, run_id=memory.run_id)

    def teardown(self) -> None:
        check_state(self.stores[1], archived=self.ledger_of_archive())
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
