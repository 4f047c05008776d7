"""Every store: groups without a signal are rejected when complete, and the greedy member of a group."""

import pytest

from slipstream.buffer.accounting import StoreCounts
from slipstream.buffer.records import Insertion, Lease
from slipstream.buffer.sampling import SamplingRules
from slipstream.buffer.trajectory import Reward
from slipstream.configs.buffer import (
    AccuracyConfig,
    DropShortConfig,
    KeepAllConfig,
    PrioritizedConfig,
    TrainShortConfig,
    ZeroAdvantageConfig,
)
from tests.cases import cases
from tests.contract.stores import GREEDY, AnyStore, answer, claim, commit, make_memory_store, open_run

SIZE = 3
INSERTED, READY = Insertion(outcome="inserted"), Insertion(outcome="inserted", group_is_ready=True)
NO_REWARD = Reward(total=0.0, status="timeout")


def rewards(*totals: float | None) -> list[Reward]:
    """One each: 1 is right, None has no reward."""
    return [NO_REWARD if total is None else Reward(total=total, is_correct=total == 1) for total in totals]


def leased(store: AnyStore, count: int = 1, *, limit: int = 10**6, has_baseline: bool = False) -> list[Lease]:
    size = SIZE + has_baseline
    asked = {"owner": "g", "max_groups": count, "group_size": size, "has_baseline": has_baseline}
    return store.lease(lease_s=60.0, admission_limit=limit, **asked)


def pack(lease: Lease, answers: list[Reward], *, greedy: Reward | None = None) -> list[tuple]:
    size = SIZE + (SIZE in lease.indices)
    packed = [answer(lease, index, reward=reward, group_size=size) for index, reward in enumerate(answers)]
    return packed + ([answer(lease, SIZE, reward=greedy, group_size=size, sampling=GREEDY)] if greedy else [])


def fate(store: AnyStore) -> str:
    counts = store.counts()
    return "ready" if counts.ready else next(iter(counts.reasons))


def assert_balanced(store: AnyStore) -> StoreCounts:
    counts = store.counts()
    held = counts.open_members + SIZE * (counts.ready + counts.claimed + counts.used) - counts.short_members
    assert counts.accepted == held + sum(counts.outcome_members.values())
    assert store.audit().is_sound, store.audit()
    return counts


@cases(
    "group_filter, answers, expected",
    (KeepAllConfig(), rewards(0, 0, 0), "ready"),
    (KeepAllConfig(), rewards(None, None, None), "ready"),
    (ZeroAdvantageConfig(), rewards(0.3, 0.3, 0.3), "rejected: zero_advantage"),
    (ZeroAdvantageConfig(), rewards(0.1 + 0.2, 0.3, 0.3), "rejected: zero_advantage"),
    (ZeroAdvantageConfig(), rewards(0.3, 0.3, 0.31), "ready"),
    (ZeroAdvantageConfig(), rewards(-1, 0, 1), "ready"),
    (ZeroAdvantageConfig(), rewards(0.5, 0.5, None), "rejected: zero_advantage"),
    (ZeroAdvantageConfig(), rewards(0.5, None, None), "rejected: zero_advantage"),
    (ZeroAdvantageConfig(), rewards(None, None, None), "rejected: no_reward"),
    (AccuracyConfig(), rewards(0, 0.9, 0.5), "rejected: too_hard"),
    (AccuracyConfig(), rewards(1, 1, 1), "rejected: too_easy"),
    (AccuracyConfig(), rewards(1, 0, 0), "ready"),
    (AccuracyConfig(), rewards(1, None, None), "rejected: too_easy"),
    (AccuracyConfig(), rewards(None, None, None), "rejected: no_reward"),
    (AccuracyConfig(min_accuracy=0.4, max_accuracy=0.6), rewards(1, 0, 0), "rejected: too_hard"),
    (AccuracyConfig(min_accuracy=0.4, max_accuracy=2 / 3), rewards(1, 1, 0), "rejected: too_easy"),
    (AccuracyConfig(min_accuracy=1 / 3, max_accuracy=0.9), rewards(1, 0, 0), "rejected: too_hard"),
    (AccuracyConfig(min_accuracy=0.3, max_accuracy=0.9), rewards(1, 0, 0), "ready"),
)
@pytest.mark.parametrize("at_once", [True, False])
def test_a_complete_group_is_ready_or_rejected_with_a_reason(fresh_store, group_filter, answers, expected, at_once):
    store = open_run(fresh_store, group_filter=group_filter)
    packed = pack(*leased(store), answers)
    insertions = store.insert(packed) if at_once else [store.insert([each])[0] for each in packed]
    assert insertions == [INSERTED, INSERTED, READY if expected == "ready" else INSERTED]
    assert fate(store) == expected
    assert_balanced(store)


def test_a_rejected_group_returns_its_admission_to_another_prompt(fresh_store):
    store = open_run(fresh_store, group_filter=ZeroAdvantageConfig())
    window = 4
    leases = leased(store, 10, limit=window)
    for _ in range(20):
        assert len(leases) == window
        for lease in leases:
            store.insert(pack(lease, rewards(1, 1, 1)))
        counts = assert_balanced(store)
        assert (counts.admitted, counts.leased, counts.ready) == (0, 0, 0)
        leases = leased(store, 10, limit=window)
        assert store.counts().admitted == window, "never more than pacing admits, however many were rejected"
    assert [int(lease.group_id) for lease in leases] == list(range(80, 84)), "no prompt is skipped"


def test_rejected_groups_are_neither_claimed_nor_waited_for(fresh_store):
    store = open_run(fresh_store, group_filter=ZeroAdvantageConfig())
    for lease, answers in zip(leased(store, 4), [rewards(1, 0, 1), rewards(0, 0, 0)] * 2, strict=True):
        store.insert(pack(lease, answers))
    assert not store.wait_ready(num_groups=3, timeout_s=0)
    taken = claim(store, 1, 2)
    assert taken.group_ids == ["0", "2"]
    commit(store, taken)
    counts = assert_balanced(store)
    assert (counts.used, counts.filtered, counts.became_ready, counts.filtered_fraction) == (2, 2, 2, 0.5)
    assert counts.wasted_tokens == 2 * SIZE * 6


@pytest.mark.parametrize("keeps_finished", [False, True])
def test_a_repeat_of_an_answer_to_a_rejected_group_is_recognized(fresh_store, keeps_finished):
    store = open_run(fresh_store, group_filter=ZeroAdvantageConfig(), keeps_finished=keeps_finished)
    first, second = leased(store, 2)
    packed = pack(first, rewards(0.5, 0.5, 0.5))
    repeat = "duplicate" if keeps_finished else "superseded"
    again = store.insert([*packed, packed[0], answer(second, group_size=SIZE), packed[2]])
    assert [each.outcome for each in again] == ["inserted"] * 3 + [repeat, "inserted", repeat]
    assert store.insert(packed[:1])[0].outcome == repeat
    counts = assert_balanced(store)
    assert (counts.open, counts.open_members, counts.accepted, counts.unarchived) == (1, 1, 4, keeps_finished)
    for group in store.finished(limit=9):
        assert (group.id, group.state, group.reason, group.steps) == ("0", "rejected", "zero_advantage", [])
        assert group.payloads == [payload for _, payload in packed]
        assert store.forget([group.id]) == 1
    assert_balanced(store)


def test_evaluations_are_never_filtered(fresh_store):
    store = open_run(fresh_store, group_filter=AccuracyConfig())
    store.open_evaluation("e", purpose="greedy", version=0, rows=[0, 1])
    for lease in leased(store, 2):
        store.insert([answer(lease, reward=Reward(total=0.0), sampling=GREEDY)])
    result = store.evaluation("e")
    assert (result.is_complete, result.accuracy) == (True, 0.0)
    assert store.counts().reasons == {}


@pytest.mark.parametrize(
    ("answers", "expected"), [(rewards(1, 0), "ready"), (rewards(1, 1), "rejected: zero_advantage")]
)
def test_a_group_made_ready_short_is_judged_by_the_members_it_has(fresh_store, clock, answers, expected):
    store = open_run(fresh_store, group_filter=ZeroAdvantageConfig())
    open_run(store)  # the filter outlives the role that opened the run
    store.insert(pack(*leased(store), answers))
    clock.now += 5
    assert len(store.reap(group_deadline=TrainShortConfig(after_s=5.0))) == 1
    assert fate(store) == expected
    is_ready = expected == "ready"
    counts = assert_balanced(store)
    assert (counts.leased, counts.open, counts.admitted, counts.short_members) == (0, 0, is_ready, is_ready)


def test_a_group_with_a_baseline_is_ready_when_its_greedy_member_is_present(fresh_store):
    store = open_run(fresh_store)
    (lease,) = leased(store, has_baseline=True)
    assert lease.indices == [0, 1, 2, 3]
    assert store.insert(pack(lease, rewards(1, 0, 0))) == [INSERTED] * 3
    assert store.counts().ready == 0
    store.return_leases(lease_ids=[lease.id], reason="drain")
    (again,) = leased(store, has_baseline=True)
    assert again.indices == [3], "it is leased by itself"
    assert store.insert([answer(again, 3, group_size=4, sampling=GREEDY)]) == [READY]


@pytest.mark.parametrize("is_greedy", [True, False])
@pytest.mark.parametrize(("has_baseline", "index"), [(True, 3), (True, 2), (False, 2)])
def test_a_greedy_answer_is_accepted_only_at_its_index(fresh_store, has_baseline, index, is_greedy):
    (lease,) = leased(open_run(fresh_store), has_baseline=has_baseline)
    sampling = {"sampling": GREEDY} if is_greedy else {}
    (insertion,) = fresh_store.insert([answer(lease, index, group_size=SIZE + has_baseline, **sampling)])
    assert insertion.reason == ("" if is_greedy == (index == 3) else "baseline")


@cases(
    "group_filter, answers, greedy, expected",
    (ZeroAdvantageConfig(), rewards(1, 1, 1), 1, "rejected: zero_advantage"),
    (ZeroAdvantageConfig(), rewards(1, 1, 1), 0, "ready"),
    (ZeroAdvantageConfig(), rewards(1, 1, 1), None, "rejected: zero_advantage"),
    (ZeroAdvantageConfig(), rewards(None, None, None), 1, "rejected: no_reward"),
    (AccuracyConfig(), rewards(1, 1, 1), 0, "rejected: too_easy"),
    (AccuracyConfig(), rewards(0, 0, 0), 1, "rejected: too_hard"),
    (AccuracyConfig(), rewards(0, 0, 1), 1, "ready"),
)
def test_the_greedy_reward_is_a_signal_and_counts_in_no_share(fresh_store, group_filter, answers, greedy, expected):
    store = open_run(fresh_store, group_filter=group_filter)
    store.insert(pack(*leased(store, has_baseline=True), answers, greedy=rewards(greedy)[0]))
    assert fate(store) == expected
    assert store.audit().is_sound


def test_groups_that_stay_open_do_not_keep_later_ones_from_their_deadline(fresh_store, clock, monkeypatch):
    monkeypatch.setattr("slipstream.buffer.redis.prompts._REAPED_AT_ONCE", 2)
    store = open_run(fresh_store)
    *too_few, enough = leased(store, 4)
    for each in too_few:
        store.insert(pack(each, rewards(1)))
    store.insert(pack(enough, rewards(1, 0)))
    clock.now += 5
    (line,) = store.reap(group_deadline=TrainShortConfig(after_s=5.0, min_members=2))
    assert line.startswith(f"group {enough.group_id} has 2 of 3 members")


def test_a_group_deadline_counts_only_sampled_members(fresh_store, clock):
    store = open_run(fresh_store)
    without, too_few, only_greedy = leased(store, 3, has_baseline=True)
    store.insert(pack(without, rewards(1, 0, 1)))
    store.insert(pack(too_few, rewards(1), greedy=rewards(0)[0]))
    store.insert(pack(only_greedy, [], greedy=rewards(0)[0]))
    clock.now += 5
    lines = store.reap(group_deadline=TrainShortConfig(after_s=5.0, min_members=2))
    assert lines == ["group 0 has 3 of 4 members after 5 s: it is trained on as it is"]
    counts = store.counts()
    assert (counts.ready, counts.open, counts.short_members) == (1, 2, 1)
    assert len(store.reap(group_deadline=DropShortConfig(after_s=5.0))) == 2
    assert store.counts().reasons == {"expired: group_deadline": 2}
    assert store.audit().is_sound


def test_a_greedy_reward_does_not_change_a_groups_priority(fresh_store, clock):
    claims = []
    for store, greedy in ((fresh_store, (0.5, -9, 70)), (make_memory_store(clock), (0.5, 0.5, 0.5))):
        open_run(store)
        for lease, reward in zip(leased(store, 3, has_baseline=True), rewards(*greedy), strict=True):
            store.insert(pack(lease, rewards(0.5, 0.25, 0.5), greedy=reward))
        claims.append(claim(store, 1, 2, rules=SamplingRules(PrioritizedConfig())))
    assert claims[0] == claims[1]
