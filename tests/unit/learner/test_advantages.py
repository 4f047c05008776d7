import pytest
import torch
from beartype import beartype
from jaxtyping import jaxtyped

from learner.algorithms import advantages

grpo = jaxtyped(advantages.grpo, typechecker=beartype)
dr_grpo = jaxtyped(advantages.dr_grpo, typechecker=beartype)
rloo = jaxtyped(advantages.rloo, typechecker=beartype)

EPSILON = 1e-6


def group_normalised(rewards, groups):
    return grpo(rewards, groups, epsilon=EPSILON)


ESTIMATORS = [group_normalised, dr_grpo, rloo]


def wide(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_hand_computed_values():
    rewards, groups = wide(1, 2, 3, 10, 20), torch.tensor([0, 0, 0, 1, 1])
    assert dr_grpo(rewards, groups).tolist() == [-1, 0, 1, -5, 5]
    assert rloo(rewards, groups).tolist() == [-1.5, 0, 1.5, -10, 10]
    expected = wide(-(1.5**0.5), 0, 1.5**0.5, -1, 1)
    assert torch.allclose(group_normalised(rewards, groups), expected, atol=2e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_rewards_give_exactly_zero(estimator):
    rewards = torch.full((7,), 0.1, dtype=torch.float64)
    assert estimator(rewards, torch.tensor([0, 0, 0, 1, 1, 1, 1])).eq(0).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_group_of_one_gives_zero(estimator):
    assert estimator(wide(3.0), torch.tensor([0])).tolist() == [0.0]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_no_rewards_give_no_advantages(estimator):
    assert estimator(wide(), torch.zeros(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_advantages_of_a_group_sum_to_zero(estimator):
    torch.manual_seed(0)
    rewards, groups = torch.rand(12, dtype=torch.float64), torch.arange(12) % 3
    sums = torch.zeros(3, dtype=torch.float64).index_add(0, groups, estimator(rewards, groups))
    assert sums.abs().max() < 1e-12


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_members_of_a_group_may_stand_anywhere(estimator):
    torch.manual_seed(0)
    rewards, groups, order = torch.rand(12, dtype=torch.float64), torch.arange(12) % 3, torch.randperm(12)
    assert torch.allclose(estimator(rewards, groups)[order], estimator(rewards[order], groups[order]), atol=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_another_groups_rewards_change_nothing(estimator):
    groups = torch.tensor([0, 0, 0, 1, 1])
    before = estimator(wide(1, 2, 4, 5, 6), groups)
    after = estimator(wide(1, 2, 4, -70, 1e6), groups)
    assert before[:3].equal(after[:3])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_group_without_members_is_skipped(estimator):
    assert estimator(wide(1, 2, 5, 9), torch.tensor([0, 0, 2, 2])).isfinite().all()


def test_rloo_is_the_mean_of_the_others():
    rewards = wide(3, 5, 10, 2)
    others = torch.stack([rewards[i] - (rewards.sum() - rewards[i]) / 3 for i in range(4)])
    assert torch.allclose(rloo(rewards, torch.zeros(4, dtype=torch.int64)), others)


def test_rloo_of_two_is_their_difference():
    assert rloo(wide(0.9, 0.2), torch.tensor([0, 0])).tolist() == pytest.approx([0.7, -0.7])


def test_grpo_uses_the_population_standard_deviation():
    assert group_normalised(wide(0, 1), torch.tensor([0, 0])).tolist() == pytest.approx([-1, 1], abs=1e-5)


def test_grpo_of_binary_rewards_has_the_closed_form():
    share = 3 / 8
    rewards = wide(1, 1, 1, 0, 0, 0, 0, 0)
    values = group_normalised(rewards, torch.zeros(8, dtype=torch.int64))
    assert values[0] == pytest.approx(((1 - share) / share) ** 0.5, abs=1e-5)
    assert values[-1] == pytest.approx(-((share / (1 - share)) ** 0.5), abs=1e-5)


def test_grpo_ignores_scale_and_shift_and_follows_the_sign():
    rewards, groups = wide(1, 2, 4, 8), torch.zeros(4, dtype=torch.int64)
    values = group_normalised(rewards, groups)
    assert torch.allclose(group_normalised(30 * rewards - 7, groups), values, atol=1e-5)
    assert torch.allclose(group_normalised(-rewards, groups), -values, atol=1e-12)


def test_dr_grpo_and_rloo_are_linear_and_ignore_a_shift():
    rewards, groups = wide(1, 2, 4, 8), torch.zeros(4, dtype=torch.int64)
    for estimator in (dr_grpo, rloo):
        assert torch.allclose(estimator(3 * rewards + 5, groups), 3 * estimator(rewards, groups))
