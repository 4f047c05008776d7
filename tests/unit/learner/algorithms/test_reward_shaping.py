import pytest
import torch

from slipstream.learner.algorithms import advantages
from tests.unit.learner.inputs import checked, whole, wide

overlong_penalty, mix = checked(advantages.overlong_penalty), checked(advantages.mix)
kl_in_reward = checked(advantages.kl_in_reward)

SEQUENCES = torch.tensor([0, 0, 0, 1, 3, 3])
"""Lengths 3, 1, 0 and 2."""


def test_the_penalty_falls_over_the_buffer():
    lengths = whole(0, 79, 80, 85, 90, 99, 100, 101, 5000)
    expected = [0, 0, 0, -0.25, -0.5, -0.95, -1, -1, -1]
    assert overlong_penalty(lengths, max_length=100, buffer=20).tolist() == pytest.approx(expected)


def test_the_buffer_may_be_one_token_or_everything():
    assert overlong_penalty(whole(8, 9, 10, 11), max_length=10, buffer=1).tolist() == [0, 0, -1, -1]
    assert overlong_penalty(whole(0, 5, 10), max_length=10, buffer=10).tolist() == [0, -0.5, -1]


def test_parts_are_added_up_by_weight():
    parts = torch.stack([wide(1, 2), wide(10, -10)], dim=1)
    assert mix(parts, weights=wide(2, 0.5)).tolist() == [7, -1]
    assert mix(parts, weights=wide(1, 0)).tolist() == [1, 2]
    assert mix(parts[:0], weights=wide(1, 0)).shape == (0,)


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


def test_a_turn_is_paid_at_its_end_and_the_rest_at_the_end_of_all():
    turns = wide(0, 0.5, 0, 2, 1, 0)
    totals, tokens = kl_in_reward(
        wide(10, 20, 30, 40), wide(0, 0, 0, 0, 1, 0), SEQUENCES, coefficient=0.5, turn_rewards=turns
    )
    assert tokens.tolist() == [0, 0.5, 9.5, 20, 0.5, 39]
    assert totals.tolist() == [10, 20, 30, 39.5]


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
