import pytest

from slipstream.buffer.accounting import StoreCounts
from slipstream.buffer.records import Insertion, Lease
from slipstream.buffer.redis.store import RedisStore
from slipstream.buffer.sampling import NOTHING_SKIPPED, SamplingRules, Upcoming, row_of
from slipstream.buffer.trajectory import Reward
from slipstream.configs.buffer import (
    AccuracyConfig,
    DropShortConfig,
    KeepAllConfig,
    PrioritizedConfig,
    TrainShortConfig,
    ZeroAdvantageConfig,
)
from slipstream.configs.data import CurriculumConfig
from tests.cases import cases
from tests.contract.stores import (
    GREEDY,
    GROUP_SIZE,
    NUM_ROWS,
    SEED,
    AnyStore,
    answer,
    claim,
    commit,
    make_memory_store,
    open_run,
)
from tests.contract.stores import audit as check_counts

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


BAND = CurriculumConfig(low=0.2, high=0.8, min_answers=2)
RIGHT, WRONG, FAILED = Reward(1.0, is_correct=True), Reward(0.4), Reward(0.0, status="timeout")


@pytest.fixture
def store(fresh_store: AnyStore) -> AnyStore:
    return open_run(fresh_store, curriculum=BAND)


def lease(store: AnyStore, count: int = 1, *, skips: int = 20, explored: tuple[int, ...] = (), **more: object):
    """Lease with a look ahead at `skips` prompts, of which those with these ordinals are explored."""
    first = store.run_state().next_ordinal
    upcoming = Upcoming(first, [ordinal in explored for ordinal in range(first, first + skips)])
    asked = {"owner": "g", "group_size": GROUP_SIZE, "lease_s": 60.0, "admission_limit": 10**6, "upcoming": upcoming}
    return store.lease(max_groups=count, **(asked | more))  # type: ignore[arg-type]


def answer_all(store: AnyStore, leases: list[Lease], *rewards: Reward) -> None:
    for each in leases:
        store.insert([answer(each, index, reward=reward) for index, reward in enumerate(rewards)])


def epoch(store: AnyStore) -> list[Lease]:
    return lease(store, NUM_ROWS)


def counted(store: AnyStore) -> dict[str, int]:
    check_counts(store.counts())
    assert store.audit().is_sound, store.audit()
    return {name: number for name, number in store.counts().curriculum.items() if number}


def row(ordinal: int) -> int:
    return row_of(ordinal, num_rows=NUM_ROWS, seed=SEED)


def test_rows_outside_the_band_are_skipped_and_not_admitted(store: AnyStore):
    first = epoch(store)
    answer_all(store, first[:2], RIGHT, RIGHT)
    answer_all(store, first[2:4], WRONG, WRONG)
    answer_all(store, first[4:6], RIGHT, WRONG)
    easy, hard = {each.row for each in first[:2]}, {each.row for each in first[2:4]}
    # The seventh has no answer yet.
    assert {each.row for each in lease(store, 3)} == {each.row for each in first[4:]}
    passed = range(NUM_ROWS, store.run_state().next_ordinal)
    skipped = {ordinal for ordinal in passed if row(ordinal) in easy | hard}
    assert store.counts().admitted == NUM_ROWS + 3 == NUM_ROWS + len(passed) - len(skipped)
    counts = counted(store)
    assert (counts["rows"], counts["rows_too_easy"], counts["rows_too_hard"]) == (6, 2, 2)
    assert counts["skipped_too_easy"] + counts["skipped_too_hard"] == len(skipped)
    assert "explored" not in counts
    # Skipped prompts leave pacing full, and while none is admitted, none is spent.
    limit = store.counts().admitted + 2
    assert len(lease(store, 9, admission_limit=limit)) == 2
    ordinal = store.run_state().next_ordinal
    assert lease(store, 9, admission_limit=limit) == []
    assert store.run_state().next_ordinal == ordinal


def test_explored_prompts_are_leased_and_counted(store: AnyStore):
    answer_all(store, epoch(store), WRONG, WRONG)
    (explored,) = lease(store, explored=(NUM_ROWS + 3,))
    assert (explored.ordinal, explored.row) == (NUM_ROWS + 3, row(NUM_ROWS + 3))
    assert counted(store) == {"rows": 7, "rows_too_hard": 7, "skipped_too_hard": 3, "explored": 1}
    answer_all(store, [explored], RIGHT, WRONG)
    counts = counted(store)
    assert counts["rows_too_hard"] == 6, "measured again, it is back in the band"


def test_the_look_ahead_bounds_the_skipped_prompts(store: AnyStore):
    answer_all(store, epoch(store), RIGHT, RIGHT)
    leases = lease(store, 2, skips=5)
    assert [each.ordinal for each in leases] == [NUM_ROWS + 5, NUM_ROWS + 6]
    assert counted(store)["skipped_too_easy"] == 5
    # The look-ahead may be behind or ahead of the next ordinal: other prompts are leased as they come.
    assert lease(store, upcoming=Upcoming(0, [False] * NUM_ROWS))[0].ordinal == NUM_ROWS + 7
    assert lease(store, upcoming=Upcoming(100, [False]))[0].ordinal == NUM_ROWS + 8
    assert lease(store, upcoming=NOTHING_SKIPPED)[0].ordinal == NUM_ROWS + 9


@cases(
    "groups, flaw",
    ([(RIGHT, RIGHT)], "too_easy"),
    ([(WRONG, WRONG)], "too_hard"),
    ([(RIGHT, WRONG)], ""),
    ([(RIGHT, FAILED)], ""),
    ([(FAILED, FAILED)] * 3, ""),
    ([(RIGHT, FAILED)] * 2, "too_easy"),
    # (0 * 0.5 + 2) / (2 * 0.5 + 2) = 0.67; then (2 * 0.5 + 2) / (3 * 0.5 + 2) = 0.86
    ([(WRONG, WRONG), (RIGHT, RIGHT)], ""),
    ([(WRONG, WRONG), (RIGHT, RIGHT), (RIGHT, RIGHT)], "too_easy"),
    # (2 * 0.5 + 0) / (2 * 0.5 + 2) = 0.33; then 0.5 / 3.5 = 0.14
    ([(RIGHT, RIGHT), (WRONG, WRONG)], ""),
    ([(RIGHT, RIGHT), (WRONG, WRONG), (WRONG, WRONG)], "too_hard"),
)
@pytest.mark.parametrize("group_filter", [None, ZeroAdvantageConfig()])
def test_a_row_is_measured_by_its_complete_groups_even_rejected_ones(fresh_store, groups, flaw, group_filter):
    chosen = {"group_filter": group_filter} if group_filter else {}
    store = open_run(fresh_store, num_rows=1, curriculum=BAND, **chosen)
    for rewards in groups:
        answer_all(store, lease(store, explored=tuple(range(20))), *rewards)
    counts = counted(store)
    is_measured = any(FAILED not in rewards or RIGHT in rewards for rewards in groups)
    outside = {name for name in counts if name in ("rows_too_easy", "rows_too_hard")}
    assert (counts.get("rows", 0), outside) == (is_measured, {f"rows_{flaw}"} if flaw else set())


def test_open_groups_greedy_answers_and_evaluations_are_not_measured(fresh_store):
    store = open_run(fresh_store, curriculum=BAND)
    (opened,) = lease(store)
    store.insert([answer(opened, 0, reward=WRONG)])
    (paired,) = lease(store, group_size=3, has_baseline=True)
    packed = [answer(paired, index, reward=reward, group_size=3) for index, reward in enumerate((RIGHT, WRONG))]
    store.insert([*packed, answer(paired, 2, reward=RIGHT, group_size=3, sampling=GREEDY)])
    store.open_evaluation("e", purpose="sampled", version=0, rows=[0])
    (asked,) = [each for each in lease(store) if each.purpose == "sampled"]
    store.insert([answer(asked, reward=WRONG)])
    assert store.counts().curriculum == {"rows": 1}
    assert store.counts().ready == 1


def test_a_group_made_ready_short_is_measured(store: AnyStore, clock):
    for _ in range(2):
        (short,) = lease(store, explored=tuple(range(30)))
        store.insert([answer(short, 0, reward=WRONG)])
    clock.now += 9
    assert len(store.reap(group_deadline=TrainShortConfig(5.0, 1))) == 2
    assert counted(store) == {"rows": 2}, "one answer each, and two are needed"


def test_repeats_do_not_measure_a_group_twice(fresh_store):
    store = open_run(fresh_store, num_rows=1, curriculum=BAND, keeps_finished=True)
    (only,) = lease(store)
    packed = [answer(only, index, reward=RIGHT if index else WRONG) for index in (0, 1)]
    for _ in range(3):
        store.insert(packed)
    taken = claim(store, 1, 1)
    commit(store, taken)
    store.roll_back(to_step=0, to_version=0)
    commit(store, claim(store, 1, 1))
    assert store.counts().curriculum == {"rows": 1}
    # One more wrong group: (1 * 0.5) / (2 * 0.5 + 2) = 0.17 is below the band; of a first measured twice it is 0.21.
    answer_all(store, lease(store), WRONG, WRONG)
    assert counted(store)["rows_too_hard"] == 1


def test_a_lapsed_lease_is_leased_again_though_its_row_has_left_the_band(fresh_store, clock):
    store = open_run(fresh_store, num_rows=1, curriculum=BAND)
    held, other = lease(store, 2)
    answer_all(store, [other], WRONG, WRONG)
    clock.now += 61
    store.reap()
    again = lease(store, skips=3)
    assert [each.id for each in again] == [f"{held.group_id}-1"], "a prompt that was handed out is not skipped"
    assert counted(store) == {"rows": 1, "rows_too_hard": 1}


def test_another_broker_finds_the_same_success_rates(fresh_store, clock):
    store = open_run(fresh_store, curriculum=BAND)
    answer_all(store, epoch(store)[:3], WRONG, WRONG)
    if not isinstance(store, RedisStore):
        return
    with RedisStore(store._client, store._run_id, clock=clock) as successor:
        open_run(successor, curriculum=BAND)
        assert successor.counts() == store.counts()
        leases = lease(successor, 4)
        assert {each.row for each in leases} == {row(ordinal) for ordinal in range(3, NUM_ROWS)}
        open_run(successor)
        assert counted(successor)["rows_too_hard"] == 3, "the run keeps its curriculum"
