import json
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.buffer.accounting import Snapshot, audit
from slipstream.buffer.errors import RunConflictError
from slipstream.buffer.pacing import Pacer
from slipstream.buffer.records import Claim, StepEntry, make_entry
from slipstream.buffer.role_reports import describe_times, make_step_times, time_counters
from slipstream.buffer.sampling import (
    Candidate,
    FileShare,
    NotReady,
    Queue,
    Sample,
    SamplingRules,
    evict,
    look_ahead,
    priority,
    row_of,
    sample,
    sample_fresh,
)
from slipstream.buffer.store_rules import MAY_CHANGE, check_same_run
from slipstream.configs.buffer import FreshestConfig, PrioritizedConfig, ReuseConfig, StalenessConfig, UniformConfig
from slipstream.configs.data import CurriculumConfig
from slipstream.runtime.clock import Growth
from tests.builders import make_packed, make_run
from tests.cases import cases

HALF = CurriculumConfig(low=0.25, high=0.75, min_answers=4)
GROUPS = 4


@given(num_rows=st.integers(1, 50), seed=st.integers(0, 2**31 - 1), epoch=st.integers(0, 100))
def test_every_row_comes_exactly_once_per_epoch(num_rows, seed, epoch):
    ordinals = range(epoch * num_rows, (epoch + 1) * num_rows)
    assert sorted(row_of(n, num_rows=num_rows, seed=seed) for n in ordinals) == list(range(num_rows))


def test_the_sequences_of_one_file_and_of_several_are_fixed_for_good_and_files_are_shuffled_differently():
    sequence = [row_of(n, num_rows=7, seed=3) for n in range(14)]
    assert sequence == [0, 4, 1, 5, 6, 3, 2, 0, 6, 2, 1, 3, 4, 5]
    files = [FileShare(3, 0.5), FileShare(2, 0.3), FileShare(4, 0.2)]
    assert [row_of(n, num_rows=files, seed=3) for n in range(12)] == [0, 4, 1, 6, 2, 3, 0, 5, 2, 3, 1, 4]
    files = [FileShare(50, 1.0), FileShare(50, 1.0)]
    found = [file_of(row_of(n, num_rows=files, seed=0), files) for n in range(100)]
    first, second = ([row for each, row in found if each == number] for number in (0, 1))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    with pytest.raises(ValueError, match="ordinal must be >= 0"):
        row_of(-1, num_rows=7, seed=3)
    with pytest.raises(ValueError, match="num_rows >= 1"):
        row_of(0, num_rows=0, seed=3)


MIXTURES = st.lists(
    st.builds(FileShare, num_rows=st.integers(1, 12), weight=st.sampled_from([0.01, 0.3, 0.7, 1.0, 2.0, 5.0])),
    min_size=2,
    max_size=5,
)


def file_of(row: int, files: list[FileShare]) -> tuple[int, int]:
    for number, file in enumerate(files):
        if row < file.num_rows:
            return number, row
        row -= file.num_rows
    raise AssertionError("no such row")


@given(files=MIXTURES, seed=st.integers(0, 2**31 - 1))
@settings(max_examples=40)
def test_every_row_of_a_file_comes_before_any_comes_again(files: list[FileShare], seed: int) -> None:
    found = [file_of(row_of(n, num_rows=files, seed=seed), files) for n in range(120)]
    for number, file in enumerate(files):
        rows = [row for each, row in found if each == number]
        for start in range(0, len(rows), file.num_rows):
            epoch = rows[start : start + file.num_rows]
            assert len(set(epoch)) == len(epoch)


@given(files=MIXTURES, start=st.integers(0, 10**6), length=st.integers(1, 400))
@settings(max_examples=60)
def test_every_window_holds_the_share_of_each_file(files: list[FileShare], start: int, length: int) -> None:
    found = [file_of(row_of(n, num_rows=files, seed=0), files)[0] for n in range(start, start + length)]
    total = sum(file.weight for file in files)
    for number, file in enumerate(files):
        assert abs(found.count(number) - length * file.weight / total) <= len(files)


def test_the_look_ahead_is_a_function_of_seed_and_ordinal():
    seen = look_ahead(0, 100, curriculum=HALF, seed=1, may_skip=True)
    later = look_ahead(40, 100, curriculum=HALF, seed=1, may_skip=True)
    drawn = seen.explored[:1600]
    assert drawn[40:] == later.explored[: 1600 - 40]
    assert drawn != look_ahead(0, 100, curriculum=HALF, seed=2, may_skip=True).explored[:1600]
    assert 0.07 < sum(drawn) / len(drawn) < 0.13, "the share is explore"
    assert seen.explored[1600:] == [True] * 100, "the last are leased whatever their rows"


@pytest.mark.parametrize(("explore", "expected"), [(0.0, [False] * 16 + [True]), (1.0, [True] * 17)])
def test_nothing_or_everything_is_explored(explore: float, expected: list[bool]):
    curriculum = CurriculumConfig(explore=explore)
    assert look_ahead(5, 1, curriculum=curriculum, seed=0, may_skip=True).explored == expected
    assert look_ahead(5, 1, curriculum=curriculum, seed=0, may_skip=False).explored == [True]
    assert look_ahead(5, 0, curriculum=curriculum, seed=0, may_skip=True).explored == []


def candidate(number: int, *, oldest_version: int = 0, rewards: tuple[float, ...] = (0.0, 1.0)) -> Candidate:
    squares = sum(reward * reward for reward in rewards)
    return Candidate(str(number), number, oldest_version, len(rewards), sum(rewards), squares)


TWELVE = [candidate(number) for number in range(12)]
REWARDS = [(0.0, 2.0), (0.0, 1.0), (0.0, 0.5), (0.5, 0.5)]
MIXED = [candidate(number, rewards=rewards) for number, rewards in enumerate(REWARDS)]


def fresh(candidates, sampler, num_groups, *, step=4):
    return sample_fresh(candidates, sampler, num_groups=num_groups, seed=3, step=step)


def test_uniform_is_fixed_by_seed_and_step_and_samples_all_with_the_same_probability():
    assert fresh(TWELVE, UniformConfig(), 5)[0] == ["8", "5", "9", "10", "3"]
    assert fresh(TWELVE, UniformConfig(), 5, step=5)[0] != ["8", "5", "9", "10", "3"]
    queue = Queue(ready=[], reusable=TWELVE, num_arrived=12, num_uses=0)
    used = sample(queue, SamplingRules(sampler=UniformConfig()), num_groups=5, seed=3, step=4)
    assert used.group_ids != ["8", "5", "9", "10", "3"], "drawn independently"
    versions = [candidate(0, oldest_version=1), candidate(1, oldest_version=3), candidate(2, oldest_version=3)]
    assert fresh(versions, FreshestConfig(), 3)[0] == ["1", "2", "0"], "equals by arrival"
    counts = Counter(name for step in range(4000) for name in fresh(TWELVE, UniformConfig(), 3, step=step)[0])
    # 1000 expected each, standard deviation 27: five of them.
    assert all(abs(counts[str(number)] - 1000) < 137 for number in range(12))
    assert sorted(fresh(TWELVE, UniformConfig(), 12)[0], key=int) == [str(number) for number in range(12)]


@cases(
    "rewards, expected",
    ((0.0, 2.0), 1.0),
    ((0.0, 1.0), 0.5),
    ((0.0, 0.7), 0.25),
    ((0.5, 0.5), 1 / 256),
    ((), 1 / 256),
    ((0.0, 9.0), 4.0),
)
def test_a_priority_is_the_deviation_of_the_rewards_rounded_to_a_power_of_two(rewards, expected):
    assert priority(candidate(0, rewards=rewards)) == expected


def test_an_exponent_of_one_samples_single_groups_in_proportion_to_their_priorities():
    sampler = PrioritizedConfig(exponent=1.0)
    counts = Counter(fresh(MIXED, sampler, 1, step=step)[0][0] for step in range(4000))
    priorities = np.array([priority(each) for each in MIXED])
    expected = 4000 * priorities / priorities.sum()
    assert all(abs(counts[str(index)] - expected[index]) < 5 * np.sqrt(expected[index]) + 5 for index in range(4))


@pytest.mark.parametrize("num_groups", [1, 2, 3])
def test_weights_make_a_prioritized_mean_the_mean_over_all_groups(num_groups):
    values = {"0": 1.0, "1": -2.0, "2": 5.0, "3": 3.0}
    sampler = PrioritizedConfig(exponent=0.5)
    samples = [fresh(MIXED, sampler, num_groups, step=step) for step in range(6000)]
    means = [sum(weight * values[name] for name, weight in zip(*each, strict=True)) / num_groups for each in samples]
    assert fresh(MIXED, UniformConfig(), num_groups)[1] == [1.0] * num_groups
    error = np.std(means) / np.sqrt(len(means))
    assert abs(np.mean(means) - np.mean(list(values.values()))) < 4 * error


def candidates(*versions: int, first: int = 0) -> list[Candidate]:
    return [Candidate(str(number), number, version, 2, 1.0, 1.0) for number, version in enumerate(versions, first)]


def queue(ready=(), reusable=(), *, num_arrived=100, num_uses=0) -> Queue:
    return Queue(candidates(*ready), candidates(*reusable, first=50), num_arrived, num_uses)


def rules(on_stale="mask", max_lag=2, **reuse) -> SamplingRules:
    return SamplingRules(reuse=ReuseConfig(**reuse), staleness=StalenessConfig(max_lag, on_stale))


def select(groups: Queue, how: SamplingRules, num_groups: int) -> Sample | NotReady:
    return sample(groups, how, num_groups=num_groups, seed=0, step=1)


def test_only_plain_rules_may_skip_reading_the_queue_and_groups_too_old_or_too_many_are_released():
    assert rules().only_oldest
    others = [rules("drop"), rules(max_uses=2), SamplingRules(UniformConfig())]
    assert not any(other.only_oldest for other in [*others, rules(samples_per_insert=1.0)])
    groups = queue(reusable=[3, 1, 4, 5])
    assert evict(groups, rules(max_uses=2, max_age=3), version=5).released == ["51"]
    assert evict(groups, rules(max_uses=2, max_groups=2), version=5).released == ["50", "51"]


@pytest.mark.parametrize(("on_stale", "expired"), [("mask", []), ("drop", ["0"])])
def test_a_group_beyond_the_bound_leaves_the_queue_as_the_policy_says(on_stale, expired):
    evictions = evict(queue(ready=[2, 3, 5]), rules(on_stale), version=5)
    assert evictions.expired == expired
    assert bool(evictions.expired or evictions.released) == bool(expired)


@cases(
    "num_ready, num_reusable, num_fresh, num_reused",
    (9, 9, 2, 2),
    (9, 1, 3, 1),
    (1, 9, 1, 3),
    (9, 0, 4, 0),
    (0, 9, 0, 4),
)
def test_used_groups_fill_the_places_left_by_fresh_ones(num_ready, num_reusable, num_fresh, num_reused):
    groups = queue(ready=[5] * num_ready, reusable=[4] * num_reusable)
    claim = select(groups, rules(max_uses=4, fresh_fraction=0.5), 4)
    assert isinstance(claim, Sample)
    assert claim.reused == [False] * num_fresh + [True] * num_reused
    assert len(set(claim.group_ids)) == 4


def test_a_refusal_says_how_many_groups_are_needed_and_uses_are_limited_by_samples_per_insert():
    found = select(queue(ready=[5], reusable=[4]), rules(max_uses=2), 4)
    assert found == NotReady("1 of 4 groups are ready, 1 may be used again", ready_needed=3)
    limited = rules(max_uses=4, samples_per_insert=2.0)
    assert isinstance(select(queue(ready=[5] * 4, num_arrived=10, num_uses=16), limited, 4), Sample)
    reason = "17 + 4 uses are more than samples_per_insert (2) x 10 groups that arrived"
    assert select(queue(ready=[5] * 4, num_arrived=10, num_uses=17), limited, 4) == NotReady(reason, ready_needed=5)


def make_pacer(target_lag="auto", *, max_lag: int = 4, **settings) -> Pacer:
    staleness = {"max_lag": max_lag, "target_lag": target_lag}
    return Pacer(make_run(staleness=staleness, learner={"prompts_per_step": GROUPS}, **settings))


def record(pacer: Pacer, steps: int, *, waited_s: float = 0.0, num_spare: int = 0) -> list[float]:
    """Return the lag after every step of one second."""
    lags = []
    for _ in range(steps):
        pacer.record_step(waited_s=waited_s, step_s=1.0, num_spare=num_spare)
        lags.append(pacer.lag)
    return lags


@cases(
    "waited_s, expected",
    # Two steps have prompts from before the first choice. A step without the wait takes 0.5 s, so a version more.
    (0.5, [1, 1, 2, 2, 2, 2, 3]),
    (0.15, [1, 1, 1.25, 1.25, 1.25, 1.25, 1.5]),
    # Less than 1 % of eight steps.
    (0.009, [1] * 40),
)
def test_the_lag_grows_by_the_mean_wait_of_a_step(waited_s, expected):
    assert record(make_pacer(), len(expected), waited_s=waited_s) == expected


def test_a_learner_that_always_waits_ends_at_the_largest_lag_and_a_short_wait_changes_nothing():
    pacer = make_pacer(max_lag=3)
    assert record(pacer, 40, waited_s=0.4)[-1] == 3
    assert max(record(pacer, 40, waited_s=0.4)) == 3
    pacer = make_pacer()
    for _ in range(3):
        record(pacer, 15)
        record(pacer, 1, waited_s=0.07)
    assert pacer.lag == 1


@pytest.mark.parametrize(("num_spare", "expected"), [(0, 3), (1, 3), (2, 2.75), (4, 2.25), (40, 1)])
def test_groups_that_no_step_needed_lower_the_lag_but_for_a_reserve(num_spare, expected):
    pacer = make_pacer()
    record(pacer, 7, waited_s=0.5)
    assert pacer.lag == 3
    assert record(pacer, 4 + 16, num_spare=num_spare)[-2:] == [3, expected]


def test_one_step_that_needed_all_groups_keeps_the_lag_and_a_version_of_several_steps_counts_as_one():
    pacer = make_pacer()
    record(pacer, 7, waited_s=0.5)
    for _ in range(5):
        record(pacer, 15, num_spare=8)
        record(pacer, 1)
    assert pacer.lag == 3
    pacer = make_pacer(weights={"publish_every_steps": 2})
    assert record(pacer, 5, waited_s=0.5) == [1, 1, 1, 1, 2]
    record(pacer, 6)
    assert record(pacer, 16, num_spare=GROUPS)[-1] == 1.75


@cases(
    "pacer, lag",
    (make_pacer(2.5), 2.5),
    (make_pacer(mode="serial", weights={"transport": "memory"}), 4),
    (make_pacer(max_lag=0), 0),
)
def test_a_given_lag_a_serial_run_and_a_synchronous_run_keep_theirs(pacer, lag):
    assert record(pacer, 60, waited_s=0.5) == [lag] * 60
    assert record(pacer, 60, num_spare=40) == [lag] * 60


def check(before: dict, now: dict) -> None:
    check_same_run("r", stored=(json.dumps(before), 5, 0), opened=(json.dumps(now), 5, 0))


def test_an_entry_lists_the_fetched_trajectories():
    payloads = [[make_packed("4", index)[1] for index in (0, 1)], [make_packed("2", 0)[1]]]
    claim = Claim(step=3, fence=9, group_ids=["4", "2"])
    entry = make_entry(claim, payloads, version=2, seed=7, config_hash="abc")
    assert entry == StepEntry(3, 2, 9, 7, "abc", ["4", "2"], [["4-0-0", "4-0-1"], ["2-0-0"]])


@cases(
    "before, now, message",
    ({"a": {"b": 1}}, {"a": {"b": 2}}, "a.b must stay 1 .* got 2"),
    ({"a": {"b": 1}}, {"a": {}}, "a must stay 'absent' .* got {}"),
    ({"a": 1}, {"a": 1, "b": 2}, "b must stay 'absent' .* got 2"),
    ({"a": [1, 2]}, {"a": [2, 1]}, r"a must stay \[1, 2\]"),
    ({"z": 1, "b": 1}, {"z": 2, "b": 2}, "b must stay 1"),
    ({"learner": {"max_steps_more": 1}}, {"learner": {"max_steps_more": 2}}, "learner.max_steps_more"),
)
def test_the_first_key_that_differs_is_named(before, now, message):
    with pytest.raises(RunConflictError, match=message):
        check(before, now)


@pytest.mark.parametrize("key", MAY_CHANGE)
def test_settings_that_a_resumed_run_may_change_are_not_compared(key):
    def nested(value: object) -> dict:
        for name in reversed(key.split(".")):
            value = {name: value}
        return value  # type: ignore[return-value]

    check(nested(None), nested({"deep": 1}))
    check({"a": 1, "b": {"c": 2, "d": []}}, {"b": {"d": [], "c": 2}, "a": 1})


def entry(step: int, *groups: str) -> StepEntry:
    names = [[f"{group}-0-0", f"{group}-0-1"] for group in groups]
    return StepEntry(step, step - 1, step, 0, "hash", list(groups), names)


SOUND = Snapshot(
    next_ordinal=6,
    max_uses=1,
    accepted=9,
    groups={"leased": ["5"], "returned": ["4"], "ready": ["3"], "claimed": ["2"], "used": ["1"]},
    members={"5": (1, 1), "4": (0, 0), "3": (2, 2), "2": (2, 2), "1": (2, 2)},
    done=[0],
    outcome_members={"retired": 2},
    ledger=[entry(1, "0"), entry(2, "1")],
)


TWO_STATES = "in more than one state: 2 (ready and claimed)"
TOO_OFTEN = "trained on more often than allowed: 0-0-0, 0-0-1"


def audit_with(**fields: object):
    return audit(msgspec.structs.replace(SOUND, **fields))


def test_a_sound_store_reconciles_and_a_group_is_trained_on_as_often_as_the_run_says():
    found = audit(SOUND)
    assert found.is_sound, found
    assert (found.buffered, found.claimed, found.used, found.retired) == (3, 2, 2, 2)
    assert found.accepted == 9
    twice = [entry(1, "0"), entry(2, "1", "0")]
    assert audit_with(ledger=twice, max_uses=2).is_sound
    assert audit_with(ledger=[entry(1, "0"), entry(2, "1", "1")], max_uses=2).duplicated == 2


@cases(
    "fields, found, problems",
    ({"accepted": 10}, {"lost": 1}, None),
    ({"members": SOUND.members | {"3": (2, 1)}}, {"lost": 1}, None),
    ({"next_ordinal": 7}, {"skipped_prompts": 1}, ["in no state: 6"]),
    ({"next_ordinal": 20}, {"skipped_prompts": 14}, ["in no state: 6, 7, 8, 9, 10 and 9 more"]),
    ({"groups": SOUND.groups | {"ready": ["3", "2"]}, "accepted": 11}, {"duplicated": 1}, [TWO_STATES]),
    ({"ledger": [entry(1, "0"), entry(2, "1", "0")]}, {"duplicated": 2}, [TOO_OFTEN]),
    ({"ledger": [entry(1, "0")]}, {}, ["used, but not in the ledger: 1"]),
    ({"ledger": [*SOUND.ledger, entry(3, "3")]}, {}, ["in the ledger, but neither used nor over: 3"]),
)
def test_lost_skipped_duplicated_and_contradicting_trajectories_are_found(fields, found, problems):
    audited = audit_with(**fields)
    assert {name: getattr(audited, name) for name in found} == found
    assert problems is None or audited.problems == problems


ROLES: dict[str, dict[str, Any]] = {
    "learner": {"role": "learner", "cpu_s": 1.0, "time/waiting": 6.0, "time/compute": 3.0, "time/rest": 1.0},
    "a": {"role": "generator", "cpu_s": 2.0, "time/starting": 50.0, "time/working": 8.0, "time/prompts": 2.0},
    "b": {"role": "generator", "cpu_s": 3.0, "time/working": 10.0, "time/prompts": "many"},
    "broker": {"role": "broker", "cpu_s": 0.5, "store_cpu_s": 0.25, "time/waiting": 9.5, "time/routing": 0.5},
    "launcher": {"role": "launcher", "cpu_s": 9.0},
}


def test_shares_are_those_of_a_role_and_time_before_the_training_or_a_restart_is_counted_rightly() -> None:
    times = make_step_times(time_counters(ROLES), steps=20)
    assert (times.steps, times.step_s) == (20, 0.5)
    found = {each.role: each for each in times.roles}
    assert list(found) == ["learner", "generator", "broker", "store"]
    assert found["learner"].shares["waiting"] == 0.6
    assert sum(found["learner"].shares.values()) == pytest.approx(1.0)
    # Excludes 50 s of loading.
    assert (found["generator"].count, found["generator"].shares["working"]) == (2, 0.9)
    assert [each.cpu_s for each in times.roles] == [0.05, 0.25, 0.025, 0.0125]
    assert found["store"].shares == {"busy": 0.025}
    growth = Growth(time_counters(ROLES))
    later = {"role": "generator", "time/working": 11.0, "time/prompts": 1.0}
    growth.update(time_counters({"b": later}))
    growth.update(time_counters({"b": later | {"time/working": 0.5}}))
    assert growth.each == {("generator", "b", "time/working"): 1.5, ("generator", "b", "time/prompts"): 1.0}


@cases("prompts, side", (2.0, "generating is the slower side"), (90.0, "training is the slower side"))
def test_the_table_says_which_side_waits_for_which(prompts: float, side: str) -> None:
    roles = ROLES | {"a": ROLES["a"] | {"time/prompts": prompts}}
    lines = describe_times(msgspec.to_builtins(make_step_times(time_counters(roles), steps=20)))
    assert lines[0] == "where the wall time went: 20 steps of 0.5 s"
    assert lines[2].split(maxsplit=3) == [
        "learner", "0.050", "s", "60% waiting for trajectories, 30% forward and backward, 10% rest",
    ]  # fmt: skip
    assert lines[3].startswith("2 generators")
    assert lines[-1].startswith("the learner waits 60% of its time for trajectories, the generators")
    assert lines[-1].endswith(side)
    assert len(lines) <= 15
    assert (describe_times(None), make_step_times({}, steps=0).roles) == ([], []), "without a step"
