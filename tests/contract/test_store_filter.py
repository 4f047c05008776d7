"""Groups that teach nothing are rejected when they are complete, and their budget is given back: both twins alike."""

import pytest

from slipstream.buffer.accounting import StoreCounts
from slipstream.buffer.records import Insertion, Lease
from slipstream.buffer.sampling import SamplingRules
from slipstream.buffer.trajectory import Reward
from slipstream.configs.buffer import (
    AccuracyConfig,
    DropShortConfig,
    FilterConfig,
    KeepAllConfig,
    PrioritizedConfig,
    TrainShortConfig,
    ZeroSignalConfig,
)
from tests.contract.stores import GREEDY, AnyStore, answer, claim, commit, make_memory_store, open_run

SIZE = 3
INSERTED, READY = Insertion(outcome="inserted"), Insertion(outcome="inserted", group_is_ready=True)
NO_REWARD = Reward(total=0.0, status="timeout")


def rewards(*totals: float) -> list[Reward]:
    """One each; 1 is right."""
    return [Reward(total=total, is_correct=total == 1) for total in totals]


def leased(store: AnyStore, count: int = 1, *, limit: int = 10**6, has_baseline: bool = False) -> list[Lease]:
    return store.lease(
        owner="g",
        max_groups=count,
        group_size=SIZE + has_baseline,
        lease_s=60.0,
        admission_limit=limit,
        has_baseline=has_baseline,
    )


def send(store: AnyStore, lease: Lease, answers: list[Reward], *, greedy: Reward | None = None) -> list[Insertion]:
    size = SIZE + (SIZE in lease.indices)
    packed = [answer(lease, index, reward=reward, group_size=size) for index, reward in enumerate(answers)]
    if greedy:
        packed.append(answer(lease, SIZE, reward=greedy, group_size=size, sampling=GREEDY))
    return store.insert(packed)


def opened(store: AnyStore, chosen: FilterConfig, **settings: object) -> AnyStore:
    return open_run(store, group_filter=chosen, **settings)


def fate(store: AnyStore) -> dict[str, int]:
    """Of the one group that was leased."""
    counts = store.counts()
    return {"ready": 1} if counts.ready else counts.reasons


@pytest.mark.parametrize(
    ("chosen", "answers", "expected"),
    [
        (KeepAllConfig(), rewards(0, 0, 0), "ready"),
        (KeepAllConfig(), [NO_REWARD] * 3, "ready"),
        (ZeroSignalConfig(), rewards(0.3, 0.3, 0.3), "rejected: zero_signal"),
        (ZeroSignalConfig(), rewards(0.1 + 0.2, 0.3, 0.3), "rejected: zero_signal"),
        (ZeroSignalConfig(), rewards(0.3, 0.3, 0.31), "ready"),
        (ZeroSignalConfig(), rewards(-1, 0, 1), "ready"),
        (ZeroSignalConfig(min_spread=0.25), rewards(0.5, 0.5, 0.75), "ready"),
        (ZeroSignalConfig(min_spread=0.25), rewards(0.5, 0.5, 0.74), "rejected: zero_signal"),
        (ZeroSignalConfig(), [*rewards(0.5, 0.5), NO_REWARD], "rejected: zero_signal"),
        (ZeroSignalConfig(), [*rewards(0.5), NO_REWARD, NO_REWARD], "rejected: zero_signal"),
        (ZeroSignalConfig(), [NO_REWARD] * 3, "rejected: no_reward"),
        (AccuracyConfig(), rewards(0, 0.9, 0.5), "rejected: too_hard"),
        (AccuracyConfig(), rewards(1, 1, 1), "rejected: too_easy"),
        (AccuracyConfig(), rewards(1, 0, 0), "ready"),
        (AccuracyConfig(), [*rewards(1), NO_REWARD, NO_REWARD], "rejected: too_easy"),
        (AccuracyConfig(), [NO_REWARD] * 3, "rejected: no_reward"),
        (AccuracyConfig(above=0.4, below=0.6), rewards(1, 0, 0), "rejected: too_hard"),
        (AccuracyConfig(above=0.4, below=2 / 3), rewards(1, 1, 0), "rejected: too_easy"),
        (AccuracyConfig(above=1 / 3, below=0.9), rewards(1, 0, 0), "rejected: too_hard"),
        (AccuracyConfig(above=0.3, below=0.9), rewards(1, 0, 0), "ready"),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_a_complete_group_is_ready_or_rejected_for_its_flaw(fresh_store, chosen, answers, expected, at_once):
    store = opened(fresh_store, chosen)
    (lease,) = leased(store)
    if at_once:
        insertions = send(store, lease, answers)
    else:
        packed = [answer(lease, index, reward=reward, group_size=SIZE) for index, reward in enumerate(answers)]
        insertions = [insertion for each in packed for insertion in store.insert([each])]
    assert insertions == [INSERTED, INSERTED, READY if expected == "ready" else INSERTED]
    assert fate(store) == {expected: 1}
    assert_balanced(store)


def assert_balanced(store: AnyStore) -> StoreCounts:
    """Every trajectory is in one place, no lease is out for what is over."""
    counts = store.counts()
    held = counts.open_members + SIZE * (counts.ready + counts.claimed + counts.used) - counts.short_members
    assert counts.accepted == held + sum(counts.outcome_members.values())
    assert store.audit().is_sound, store.audit()
    return counts


def test_a_rejected_group_gives_its_budget_back_and_another_prompt_is_admitted_for_it(fresh_store):
    store = opened(fresh_store, ZeroSignalConfig())
    window = 4
    leases = leased(store, 10, limit=window)
    for _ in range(20):
        assert len(leases) == window
        for lease in leases:
            send(store, lease, rewards(1, 1, 1))
        counts = assert_balanced(store)
        assert (counts.admitted, counts.leased, counts.ready) == (0, 0, 0)
        leases = leased(store, 10, limit=window)
        assert store.counts().admitted == window, "never more than pacing lets out, however many were rejected"
    assert [int(lease.group_id) for lease in leases] == list(range(80, 84)), "no prompt is skipped"


def test_only_what_may_be_trained_on_is_claimed(fresh_store):
    store = opened(fresh_store, ZeroSignalConfig())
    for lease, answers in zip(leased(store, 4), [rewards(1, 0, 1), rewards(0, 0, 0)] * 2, strict=True):
        send(store, lease, answers)
    assert not store.wait_ready(num_groups=3, timeout_s=0)
    taken = claim(store, 1, 2)
    assert taken.group_ids == ["0", "2"]
    commit(store, taken)
    counts = assert_balanced(store)
    assert (counts.used, counts.filtered, counts.became_ready, counts.filtered_fraction) == (2, 2, 2, 0.5)
    assert counts.wasted_tokens == 2 * SIZE * 6


def test_a_repeat_of_an_answer_to_a_rejected_group_is_recognised(fresh_store):
    store = opened(fresh_store, ZeroSignalConfig())
    first, second = leased(store, 2)
    packed = [answer(first, index, group_size=SIZE) for index in range(SIZE)]
    again = store.insert([*packed, packed[0], answer(second, group_size=SIZE), packed[2]])
    assert [each.outcome for each in again] == ["inserted"] * 3 + ["superseded", "inserted", "superseded"]
    assert store.insert(packed[:1]) == [Insertion(outcome="superseded")]
    counts = assert_balanced(store)
    assert (counts.open, counts.open_members, counts.accepted) == (1, 1, 4)


def test_the_archive_gets_rejected_groups_with_the_reason(fresh_store):
    store = opened(fresh_store, ZeroSignalConfig(), keeps_finished=True)
    (lease,) = leased(store)
    packed = [answer(lease, index, group_size=SIZE) for index in range(SIZE)]
    assert [each.outcome for each in store.insert([*packed, packed[1]])] == ["inserted"] * 3 + ["duplicate"]
    (group,) = store.finished(limit=9)
    assert (group.id, group.outcome, group.reason, group.steps) == ("0", "rejected", "zero_signal", [])
    assert group.payloads == [payload for _, payload in packed]
    assert store.counts().unarchived == 1
    assert store.forget([group.id]) == 1
    assert_balanced(store)


def test_evaluations_are_never_filtered(fresh_store):
    store = opened(fresh_store, AccuracyConfig())
    store.open_evaluation("e", purpose="greedy", version=0, rows=[0, 1])
    for lease in leased(store, 2):
        store.insert([answer(lease, reward=Reward(total=0.0), sampling=GREEDY)])
    result = store.evaluation("e")
    assert result is not None
    assert (result.is_complete, result.accuracy) == (True, 0.0)
    assert store.counts().reasons == {}


@pytest.mark.parametrize(("answers", "expected"), [(rewards(1, 0), "ready"), (rewards(1, 1), "rejected: zero_signal")])
def test_a_group_that_is_trained_short_is_judged_by_those_it_has(fresh_store, clock, answers, expected):
    store = opened(fresh_store, ZeroSignalConfig())
    (lease,) = leased(store)
    send(store, lease, answers)
    clock.now += 5
    assert len(store.reap(group_deadline=TrainShortConfig(after_s=5.0))) == 1
    assert fate(store) == {expected: 1}
    counts = assert_balanced(store)
    assert (counts.leased, counts.open, counts.admitted) == (0, 0, int(expected == "ready"))
    assert counts.short_members == (expected == "ready")


def test_the_filter_outlives_those_who_open_the_run(fresh_store):
    store = opened(fresh_store, ZeroSignalConfig())
    open_run(store)
    (lease,) = leased(store)
    send(store, lease, rewards(0, 0, 0))
    assert fate(store) == {"rejected: zero_signal": 1}


# --- the greedy baseline ---------------------------------------------------------------------------------------------
def test_a_group_with_a_baseline_is_ready_when_its_greedy_member_is_there_too(fresh_store):
    store = open_run(fresh_store)
    (lease,) = leased(store, has_baseline=True)
    assert lease.indices == [0, 1, 2, 3]
    assert send(store, lease, rewards(1, 0, 0)) == [INSERTED] * 3
    assert store.counts().ready == 0
    store.return_leases(lease_ids=[lease.id], reason="drain")
    (again,) = leased(store, has_baseline=True)
    assert again.indices == [3], "it alone is asked for"
    assert store.insert([answer(again, 3, group_size=4, sampling=GREEDY)]) == [READY]


@pytest.mark.parametrize(
    ("has_baseline", "index", "is_greedy", "outcome"),
    [
        (True, 3, True, "inserted"),
        (True, 3, False, "refused"),
        (True, 2, True, "refused"),
        (True, 2, False, "inserted"),
        (False, 2, True, "refused"),
        (False, 2, False, "inserted"),
    ],
)
def test_a_greedy_answer_has_its_place_and_no_other(fresh_store, has_baseline, index, is_greedy, outcome):
    store = open_run(fresh_store)
    (lease,) = leased(store, has_baseline=has_baseline)
    sampling = {"sampling": GREEDY} if is_greedy else {}
    (insertion,) = store.insert([answer(lease, index, group_size=SIZE + has_baseline, **sampling)])
    assert insertion == Insertion(outcome=outcome, reason="baseline" if outcome == "refused" else "")


@pytest.mark.parametrize(
    ("chosen", "answers", "greedy", "expected"),
    [
        (ZeroSignalConfig(), rewards(1, 1, 1), *rewards(1), "rejected: zero_signal"),
        (ZeroSignalConfig(), rewards(1, 1, 1), *rewards(0), "ready"),
        (ZeroSignalConfig(), rewards(1, 1, 1), NO_REWARD, "rejected: zero_signal"),
        (ZeroSignalConfig(), [NO_REWARD] * 3, *rewards(1), "rejected: no_reward"),
        (AccuracyConfig(), rewards(1, 1, 1), *rewards(0), "rejected: too_easy"),
        (AccuracyConfig(), rewards(0, 0, 0), *rewards(1), "rejected: too_hard"),
        (AccuracyConfig(), rewards(0, 0, 1), *rewards(1), "ready"),
    ],
)
def test_the_greedy_reward_is_a_signal_and_counts_in_no_share(fresh_store, chosen, answers, greedy, expected):
    store = opened(fresh_store, chosen)
    (lease,) = leased(store, has_baseline=True)
    send(store, lease, answers, greedy=greedy)
    assert fate(store) == {expected: 1}
    assert store.audit().is_sound


def test_the_deadline_of_a_group_counts_sampled_members_alone(fresh_store, clock):
    store = open_run(fresh_store)
    without, too_few, only_greedy = leased(store, 3, has_baseline=True)
    send(store, without, rewards(1, 0, 1))
    send(store, too_few, rewards(1), greedy=rewards(0)[0])
    send(store, only_greedy, [], greedy=rewards(0)[0])
    clock.now += 5
    lines = store.reap(group_deadline=TrainShortConfig(after_s=5.0, min_members=2))
    assert lines == ["group 0 has 3 of 4 members after 5 s: it is trained on as it is"]
    counts = store.counts()
    assert (counts.ready, counts.open, counts.short_members) == (1, 2, 1)
    assert len(store.reap(group_deadline=DropShortConfig(after_s=5.0))) == 2
    assert store.counts().reasons == {"expired: group_deadline": 2}
    assert store.audit().is_sound


def test_a_greedy_reward_does_not_make_a_group_likelier_to_be_drawn(fresh_store, clock):
    claims = []
    for store, greedy in ((fresh_store, (0.5, -9, 70)), (make_memory_store(clock), (0.5, 0.5, 0.5))):
        open_run(store)
        for lease, reward in zip(leased(store, 3, has_baseline=True), rewards(*greedy), strict=True):
            send(store, lease, rewards(0.5, 0.25, 0.5), greedy=reward)
        claims.append(claim(store, 1, 2, rules=SamplingRules(PrioritizedConfig())))
    assert claims[0] == claims[1]
