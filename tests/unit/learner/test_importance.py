import math

import pytest
import torch
from beartype import beartype
from jaxtyping import jaxtyped

from learner.algorithms import importance

token_ratio = jaxtyped(importance.token_ratio, typechecker=beartype)
token_tis = jaxtyped(importance.token_tis, typechecker=beartype)
token_mask = jaxtyped(importance.token_mask, typechecker=beartype)
effective_sample_size = jaxtyped(importance.effective_sample_size, typechecker=beartype)


def test_the_ratio_is_that_of_the_probabilities():
    numerator, denominator = torch.tensor([0.5, 0.1]).log(), torch.tensor([0.25, 0.4]).log()
    assert token_ratio(numerator, denominator).tolist() == pytest.approx([2.0, 0.25])


def test_the_ratio_of_equal_policies_is_exactly_one():
    logprobs = torch.tensor([-0.3, -17.0, -1e-9])
    assert token_ratio(logprobs, logprobs).tolist() == [1.0, 1.0, 1.0]


def test_the_log_ratio_is_clamped():
    ratio = token_ratio(torch.tensor([0.0, -90.0]), torch.tensor([-90.0, 0.0]))
    assert ratio.tolist() == pytest.approx([math.exp(20), math.exp(-20)])


def test_what_is_not_finite_becomes_neutral_and_is_counted():
    numerator = torch.tensor([float("nan"), -1.0, float("-inf"), -1.0])
    denominator = torch.tensor([-1.0, float("inf"), -1.0, -1.0])
    assert token_ratio(numerator, denominator).tolist() == [1.0] * 4
    assert importance.nonfinite(numerator, denominator).tolist() == [True, True, True, False]


def test_half_precision_is_widened_before_the_subtraction():
    ratio = token_ratio(torch.tensor([-1.0]).bfloat16(), torch.tensor([-1.5]).bfloat16())
    assert ratio.dtype == torch.float32


def test_token_tis_truncates_from_above_only():
    assert token_tis(torch.tensor([0.01, 1.0, 5.0]), cap=2.0).tolist() == pytest.approx([0.01, 1.0, 2.0])


def test_token_mask_drops_both_tails_and_keeps_the_bounds():
    assert token_mask(torch.tensor([0.4, 0.5, 3.0, 5.0, 5.1]), low=0.5, high=5.0).tolist() == [0, 0.5, 3, 5, 0]


@pytest.mark.parametrize("weigh", [lambda r: token_tis(r, cap=2.0), lambda r: token_mask(r, low=0.5, high=5.0)])
def test_weights_have_no_gradient(weigh):
    assert not weigh(torch.ones(2, requires_grad=True)).requires_grad


def test_the_effective_sample_size_lies_between_one_over_n_and_one():
    assert effective_sample_size(torch.full((5,), 0.3)).item() == pytest.approx(1.0)
    assert effective_sample_size(torch.tensor([1.0, 0, 0, 0])).item() == pytest.approx(0.25)
    assert 0.25 < effective_sample_size(torch.tensor([1.0, 2.0, 3.0, 4.0])).item() < 1
