from itertools import combinations
from math import comb
from statistics import fmean, pstdev

import pytest
import torch

from slipstream.learner.algorithms import advantages
from tests.unit.learner.inputs import advantage_inputs, checked, whole, wide


def grpo_passk(rewards, groups, **settings):
    return checked(advantages.grpo_passk)(advantage_inputs(rewards, groups), **settings)


def pass_at_k_analytic(is_correct, groups, *, k):
    return checked(advantages.pass_at_k)(advantage_inputs(is_correct.double(), groups), k=k)


def grpo(rewards, groups, *, epsilon):
    return advantages.grpo(advantage_inputs(rewards, groups), epsilon=epsilon)


def ragged() -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards and groups of 1, 2, 4 and 5 members in a random order."""
    torch.manual_seed(3)
    groups = whole(0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3)[torch.randperm(12)]
    return torch.rand(12, dtype=torch.float64), groups


def enumerated(correct: list[bool], k: int) -> list[float]:
    """Every k-subset is one sample of reward any(correct), normalised over all subsets; a member gets its mean."""
    subsets = list(combinations(range(len(correct)), k))
    rewards = [float(any(correct[i] for i in subset)) for subset in subsets]
    mean, deviation = fmean(rewards), pstdev(rewards)
    if deviation == 0:
        return [0.0] * len(correct)
    normalised = [(reward - mean) / deviation for reward in rewards]
    return [fmean(a for a, s in zip(normalised, subsets, strict=True) if i in s) for i in range(len(correct))]


@pytest.mark.parametrize("poison", [True, False])
def test_another_groups_answers_change_not_one_bit_of_the_analytic_form(poison):
    rewards, groups = ragged()
    correct, other = rewards > 0.5, groups == 3
    before, after = (pass_at_k_analytic(values, groups, k=2) for values in (correct, correct.where(~other, poison)))
    assert before[~other].equal(after[~other])
    assert before.ne(0).any()


def test_only_the_best_gets_its_lead():
    assert grpo_passk(wide(1, 5, 3, 2, 9), whole(0, 0, 0, 1, 1)).tolist() == [0, 2, 0, 0, 7]


def test_the_lead_is_the_fall_of_the_maximum_without_the_best():
    rewards = wide(4, 1, 7, 5)
    without = [max(r for j, r in enumerate(rewards.tolist()) if j != i) for i in range(4)]
    assert grpo_passk(rewards, whole(0, 0, 0, 0)).tolist() == [7 - other for other in without]


def test_two_that_are_best_get_nothing():
    assert grpo_passk(wide(5, 5, 1, 0), whole(0, 0, 0, 0)).tolist() == [0, 0, 0, 0]


def test_at_most_one_of_a_group_gets_something():
    torch.manual_seed(0)
    groups = torch.arange(200) // 5
    given = grpo_passk(torch.randint(0, 4, (200,)).double(), groups) != 0
    assert torch.bincount(groups[given], minlength=40).max() == 1


def test_the_lead_may_be_divided_by_the_deviation():
    rewards, groups = wide(0, 0, 3), whole(0, 0, 0)
    assert grpo_passk(rewards, groups, epsilon=1e-12).tolist() == pytest.approx([0, 0, 3 / 2**0.5])
    scaled = grpo_passk(10 * rewards + 4, groups, epsilon=1e-12)
    assert torch.allclose(scaled, grpo_passk(rewards, groups, epsilon=1e-12))


@pytest.mark.parametrize("size", range(1, 8))
def test_the_analytic_form_is_the_mean_over_all_subsets(size):
    for k in range(1, size + 1):
        for num_correct in range(size + 1):
            correct = [i < num_correct for i in range(size)]
            values = pass_at_k_analytic(torch.tensor(correct), torch.zeros(size, dtype=torch.int64), k=k)
            assert values.tolist() == pytest.approx(enumerated(correct, k), abs=1e-6)


def test_pass_at_one_is_grpo():
    rewards, groups = ragged()
    correct = rewards > 0.5
    expected = grpo(correct.double(), groups, epsilon=1e-12)
    assert torch.allclose(pass_at_k_analytic(correct, groups, k=1).double(), expected, atol=1e-6)


def test_the_penalty_of_a_wrong_answer_falls_with_k():
    correct = torch.tensor([True] + [False] * 7)
    penalty = [pass_at_k_analytic(correct, torch.zeros(8, dtype=torch.int64), k=k)[-1].item() for k in range(1, 8)]
    assert penalty == sorted(penalty)
    assert max(penalty) < 0


@pytest.mark.parametrize("k", [2, 3, 9, 100])
def test_a_group_no_larger_than_k_has_no_signal(k):
    assert pass_at_k_analytic(torch.tensor([True, False]), whole(0, 0), k=k).tolist() == [0, 0]


def test_a_group_in_which_every_subset_succeeds_has_no_signal():
    correct = torch.tensor([True, True, True, False, False])
    assert pass_at_k_analytic(correct, torch.zeros(5, dtype=torch.int64), k=3).tolist() == [0] * 5


def test_large_groups_do_not_overflow():
    correct = torch.arange(4096) < 3
    values = pass_at_k_analytic(correct, torch.zeros(4096, dtype=torch.int64), k=512)
    assert values.isfinite().all()
    miss = comb(4093, 512) / comb(4096, 512)
    assert values[0].item() == pytest.approx((miss / (1 - miss)) ** 0.5)
