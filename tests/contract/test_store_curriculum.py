"""Every store: success rates of rows, and the prompts skipped because of them."""

import pytest

from slipstream.buffer.records import Lease
from slipstream.buffer.redis.store import RedisStore
from slipstream.buffer.sampling import NOTHING_SKIPPED, Upcoming, row_of
from slipstream.buffer.trajectory import Reward
from slipstream.configs.buffer import TrainShortConfig, ZeroAdvantageConfig
from slipstream.configs.data import CurriculumConfig
from tests.cases import cases
from tests.contract.stores import GREEDY, GROUP_SIZE, NUM_ROWS, SEED, AnyStore, answer, claim, commit, open_run
from tests.contract.stores import audit as check_counts

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


def test_skipped_prompts_leave_pacing_full(store: AnyStore):
    first = epoch(store)
    answer_all(store, first[:5], WRONG, WRONG)
    limit = store.counts().admitted + 2
    assert len(lease(store, 9, admission_limit=limit)) == 2
    ordinal = store.run_state().next_ordinal
    assert lease(store, 9, admission_limit=limit) == []
    assert store.run_state().next_ordinal == ordinal, "no prompt is spent while none is admitted"


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
