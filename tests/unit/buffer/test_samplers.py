"""In which order groups are drawn, and with which weights."""

from collections import Counter

import numpy as np
import pytest

from slipstream.buffer.sampling import Candidate, inclusion_probabilities, priority, sample_fresh, sample_reused
from slipstream.configs.buffer import FifoConfig, FreshestConfig, PrioritizedConfig, UniformConfig


def candidate(number: int, *, oldest_version: int = 0, rewards: tuple[float, ...] = (0.0, 1.0)) -> Candidate:
    squares = sum(reward * reward for reward in rewards)
    return Candidate(str(number), number, oldest_version, len(rewards), sum(rewards), squares)


TWELVE = [candidate(number) for number in range(12)]
MIXED = [
    candidate(0, rewards=(0.0, 2.0)),
    candidate(1, rewards=(0.0, 1.0)),
    candidate(2, rewards=(0.0, 0.5)),
    candidate(3, rewards=(0.5, 0.5)),
]


def fresh(candidates, sampler, num_groups, *, step=4):
    return sample_fresh(candidates, sampler, num_groups=num_groups, seed=3, step=step)


def test_fifo_takes_the_oldest_first():
    assert fresh(TWELVE[::-1], FifoConfig(), 3)[0] == ["0", "1", "2"]


def test_freshest_takes_the_newest_oldest_token_first_and_of_equals_the_first_come():
    versions = [candidate(0, oldest_version=1), candidate(1, oldest_version=3), candidate(2, oldest_version=3)]
    assert fresh(versions, FreshestConfig(), 3)[0] == ["1", "2", "0"]


def test_uniform_is_fixed_for_good_by_seed_and_step():
    assert fresh(TWELVE, UniformConfig(), 5)[0] == ["8", "5", "9", "10", "3"]
    assert fresh(TWELVE, UniformConfig(), 5, step=5)[0] != ["8", "5", "9", "10", "3"]


def test_uniform_draws_without_repetition_and_everyone_with_the_same_chance():
    counts = Counter(name for step in range(4000) for name in fresh(TWELVE, UniformConfig(), 3, step=step)[0])
    # 1000 expected each, standard deviation 27: five of them.
    assert all(abs(counts[str(number)] - 1000) < 137 for number in range(12))
    assert sorted(fresh(TWELVE, UniformConfig(), 12)[0], key=int) == [str(number) for number in range(12)]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [((0.0, 2.0), 1.0), ((0.0, 1.0), 0.5), ((0.0, 0.7), 0.25), ((0.5, 0.5), 1 / 256), ((), 1 / 256), ((0.0, 9.0), 4.0)],
)
def test_a_priority_is_the_deviation_of_the_rewards_rounded_to_a_power_of_two(rewards, expected):
    assert priority(candidate(0, rewards=rewards)) == expected


def test_an_exponent_of_one_draws_single_groups_in_proportion_to_their_priorities():
    sampler = PrioritizedConfig(exponent=1.0)
    counts = Counter(fresh(MIXED, sampler, 1, step=step)[0][0] for step in range(4000))
    chances = np.array([priority(each) for each in MIXED])
    expected = 4000 * chances / chances.sum()
    assert all(abs(counts[str(place)] - expected[place]) < 5 * np.sqrt(expected[place]) + 5 for place in range(4))


@pytest.mark.parametrize("num_groups", [1, 2, 3])
def test_weights_make_a_prioritized_mean_the_mean_over_all_groups(num_groups):
    values = {"0": 1.0, "1": -2.0, "2": 5.0, "3": 3.0}
    sampler = PrioritizedConfig(exponent=0.5)
    drawn = [fresh(MIXED, sampler, num_groups, step=step) for step in range(6000)]
    means = [sum(weight * values[name] for name, weight in zip(*each, strict=True)) / num_groups for each in drawn]
    error = np.std(means) / np.sqrt(len(means))
    assert abs(np.mean(means) - np.mean(list(values.values()))) < 4 * error


def test_weights_are_one_when_all_are_drawn_or_no_correction_is_wanted():
    assert fresh(MIXED, PrioritizedConfig(), 4)[1] == [1.0] * 4
    assert fresh(MIXED, PrioritizedConfig(correction=0.0), 2)[1] == [1.0] * 2
    assert fresh(MIXED, UniformConfig(), 2)[1] == [1.0] * 2


def test_inclusion_follows_the_exponential_race():
    probabilities = inclusion_probabilities(np.array([1.0, 2.0]), threshold=0.5)
    np.testing.assert_allclose(probabilities, [1 - np.exp(-0.5), 1 - np.exp(-1.0)])


def test_fresh_and_used_groups_are_drawn_independently():
    again = sample_reused(TWELVE, UniformConfig(), num_groups=5, seed=3, step=4)
    assert again[0] != fresh(TWELVE, UniformConfig(), 5)[0]
