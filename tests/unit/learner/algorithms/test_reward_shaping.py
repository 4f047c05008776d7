import pytest
import torch
from beartype import beartype
from jaxtyping import jaxtyped

from slipstream.learner.algorithms import reward_shaping


def checked(function):
    return jaxtyped(function, typechecker=beartype)


overlong_penalty, mix = checked(reward_shaping.overlong_penalty), checked(reward_shaping.mix)
kl_in_reward, returns_to_go = checked(reward_shaping.kl_in_reward), checked(reward_shaping.returns_to_go)
normalise_over_batch = checked(reward_shaping.normalise_over_batch)
normalise_within_groups = checked(reward_shaping.normalise_within_groups)

SEQUENCES = torch.tensor([0, 0, 0, 1, 3, 3])
"""Lengths 3, 1, 0 and 2."""


def wide(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def whole(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def looped(rewards: list[float], gamma: float) -> list[float]:
    returns, later = [], 0.0
    for reward in reversed(rewards):
        later = reward + gamma * later
        returns.append(later)
    return returns[::-1]


def test_the_penalty_falls_over_the_buffer():
    lengths = whole(0, 79, 80, 85, 90, 99, 100, 101, 5000)
    expected = [0, 0, 0, -0.25, -0.5, -0.95, -1, -1, -1]
    assert overlong_penalty(lengths, max_length=100, buffer=20).tolist() == pytest.approx(expected)


def test_the_penalty_has_no_jump_at_either_knot():
    penalty = overlong_penalty(torch.arange(20_000, 21_000), max_length=20_480, buffer=409)
    assert penalty.diff().abs().max() == pytest.approx(1 / 409, abs=1e-6)
    assert penalty.diff().max() <= 0
    assert (penalty[71], penalty[480]) == (0, -1)


def test_the_buffer_may_be_one_token_or_everything():
    assert overlong_penalty(whole(8, 9, 10, 11), max_length=10, buffer=1).tolist() == [0, 0, -1, -1]
    assert overlong_penalty(whole(0, 5, 10), max_length=10, buffer=10).tolist() == [0, -0.5, -1]


def test_no_answers_have_no_penalties():
    assert overlong_penalty(whole(), max_length=10, buffer=2).shape == (0,)


def test_parts_are_added_up_by_weight():
    parts = torch.stack([wide(1, 2), wide(10, -10)], dim=1)
    assert mix(parts, weights=wide(2, 0.5)).tolist() == [7, -1]
    assert mix(parts, weights=wide(1, 0)).tolist() == [1, 2]
    assert mix(parts[:0], weights=wide(1, 0)).shape == (0,)


def test_normalised_over_the_batch():
    assert normalise_over_batch(wide(1, 3, 1, 3), epsilon=1e-12).tolist() == pytest.approx([-1, 1, -1, 1])
    assert normalise_over_batch(wide(0.1, 0.1, 0.1), epsilon=1e-8).tolist() == [0, 0, 0]


def test_normalised_within_groups():
    values = normalise_within_groups(wide(1, 3, 100, 500, 9), whole(0, 0, 1, 1, 2), epsilon=1e-12)
    assert values.tolist() == pytest.approx([-1, 1, -1, 1, 0])


def test_the_reward_stands_at_the_last_token_and_kl_at_every_one():
    kl = wide(1, 2, 3, 4, 5, 6)
    totals, tokens = kl_in_reward(wide(10, 20, 30, 40), kl, SEQUENCES, coefficient=0.5)
    assert tokens.tolist() == [-0.5, -1, 8.5, 18, -2.5, 37]
    assert totals.tolist() == [7, 18, 30, 34.5]


def test_token_rewards_of_a_trajectory_add_up_to_its_total():
    torch.manual_seed(0)
    sequences = torch.arange(9).repeat_interleave(torch.randint(1, 20, (9,)))
    rewards, kl = torch.randn(9).double(), torch.randn(len(sequences)).double()
    totals, tokens = kl_in_reward(rewards, kl, sequences, coefficient=0.03)
    assert torch.allclose(torch.zeros(9).double().index_add(0, sequences, tokens), totals, atol=1e-12)


def test_without_a_coefficient_only_rewards_are_left():
    totals, tokens = kl_in_reward(wide(1, 2, 3, 4), wide(9, 9, 9, 9, 9, 9), SEQUENCES, coefficient=0.0)
    assert totals.tolist() == [1, 2, 3, 4]
    assert tokens.tolist() == [0, 0, 1, 2, 0, 4]


def test_no_gradient_flows_through_a_reward():
    kl = wide(1, 2, 3, 4, 5, 6).requires_grad_()
    totals, tokens = kl_in_reward(wide(1, 2, 3, 4), kl, SEQUENCES, coefficient=0.5)
    assert not totals.requires_grad
    assert not tokens.requires_grad


def test_no_tokens_leave_the_totals_alone():
    totals, tokens = kl_in_reward(wide(1, 2), wide(), whole(), coefficient=0.5)
    assert totals.tolist() == [1, 2]
    assert tokens.shape == (0,)
    assert returns_to_go(tokens, whole(), gamma=0.9, num_sequences=2).shape == (0,)


def test_hand_computed_returns():
    returns = returns_to_go(wide(1, 2, 4, 8, 16, 32), SEQUENCES, gamma=0.5, num_sequences=4)
    assert returns.tolist() == [3, 4, 4, 8, 32, 32]


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.99, 1.0])
def test_returns_are_what_a_loop_over_each_sequence_gives(gamma):
    torch.manual_seed(0)
    lengths = [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 100]
    sequences = torch.arange(11).repeat_interleave(torch.tensor(lengths))
    rewards = torch.randn(len(sequences), dtype=torch.float64)
    expected = [value for part in rewards.split(lengths) for value in looped(part.tolist(), gamma)]
    returns = returns_to_go(rewards, sequences, gamma=gamma, num_sequences=11)
    assert torch.allclose(returns, wide(*expected), atol=1e-12)


def test_a_final_reward_is_discounted_by_the_distance_to_the_end():
    rewards = wide(0, 0, 0, 0, 7)
    returns = returns_to_go(rewards, torch.zeros(5, dtype=torch.int64), gamma=0.9, num_sequences=1)
    assert returns.tolist() == pytest.approx([7 * 0.9**steps for steps in (4, 3, 2, 1, 0)])
    undiscounted = returns_to_go(rewards, torch.zeros(5, dtype=torch.int64), gamma=1.0, num_sequences=1)
    assert undiscounted.tolist() == [7] * 5


@pytest.mark.parametrize("length", [3, 4, 200])
def test_another_sequence_changes_not_one_bit_however_long(length):
    torch.manual_seed(0)
    mine = torch.randn(3, dtype=torch.float64)
    alone = returns_to_go(mine, whole(0, 0, 0), gamma=0.97, num_sequences=1)
    other = torch.full((length,), 1e30, dtype=torch.float64)
    sequences = whole(0, 1).repeat_interleave(whole(3, length))
    assert returns_to_go(torch.cat([mine, other]), sequences, gamma=0.97, num_sequences=2)[:3].equal(alone)


def test_returns_leave_their_input_alone():
    rewards = wide(1, 2, 3)
    returns_to_go(rewards, whole(0, 0, 0), gamma=1.0, num_sequences=1)
    assert rewards.tolist() == [1, 2, 3]
