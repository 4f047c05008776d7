import math

import pytest
import torch
from beartype import beartype
from jaxtyping import jaxtyped

from slipstream.learner.algorithms import importance

interpolation = jaxtyped(importance.interpolation, typechecker=beartype)
loglinear = jaxtyped(importance.loglinear, typechecker=beartype)

GENERATOR, LEARNER = torch.tensor([0.2, 0.5, 0.9]).log(), torch.tensor([0.8, 0.4, 0.9]).log()


def test_the_share_by_hand():
    versions = torch.tensor([6, 7, 8, 9])
    assert interpolation(versions, proximal_version=9, learner_version=10).tolist() == pytest.approx(
        [3 / 4, 2 / 3, 1 / 2, 0]
    )
    assert interpolation(versions, proximal_version=8, learner_version=10).tolist() == pytest.approx(
        [2 / 4, 1 / 3, 0, 0]
    )


def test_the_share_stays_between_none_and_all_for_any_versions():
    versions = torch.arange(20)
    for proximal_version in range(20):
        for learner_version in range(proximal_version, 20):
            alpha = interpolation(versions, proximal_version=proximal_version, learner_version=learner_version)
            assert ((alpha >= 0) & (alpha <= 1)).all()


def test_a_token_as_new_as_the_proximal_policy_has_gone_nowhere():
    for learner_version in (5, 6, 9):
        fresh = torch.tensor([5, 6, 7])
        assert interpolation(fresh, proximal_version=5, learner_version=learner_version).tolist() == [0, 0, 0]


def test_the_older_a_token_the_farther_its_policy_has_gone():
    alpha = interpolation(torch.arange(10), proximal_version=9, learner_version=10)
    assert (alpha.diff() < 0).all()
    assert alpha[0].item() == pytest.approx(0.9)


def test_no_tokens_have_no_share():
    assert interpolation(torch.zeros(0, dtype=torch.int64), proximal_version=1, learner_version=2).shape == (0,)


def test_both_ends_are_exact():
    assert loglinear(GENERATOR, LEARNER, alpha=torch.zeros(3)).equal(GENERATOR)
    assert loglinear(GENERATOR, LEARNER, alpha=torch.ones(3)).equal(LEARNER)


def test_the_middle_by_hand():
    half = torch.full((3,), 0.5)
    geometric = loglinear(GENERATOR, LEARNER, alpha=half).exp()
    assert geometric.tolist() == pytest.approx([0.4, 0.2**0.5, 0.9])


def test_the_result_lies_between_the_two_policies():
    torch.manual_seed(0)
    first, second, alpha = -torch.rand(50) * 5, -torch.rand(50) * 5, torch.rand(50)
    got = loglinear(first, second, alpha=alpha)
    assert ((got >= torch.minimum(first, second) - 1e-5) & (got <= torch.maximum(first, second) + 1e-5)).all()


def test_drift_and_ratio_share_the_whole_log_ratio():
    alpha = torch.tensor([0.25, 0.5, 0.75])
    between = loglinear(GENERATOR, LEARNER, alpha=alpha)
    whole = importance.token_log_ratio(LEARNER, GENERATOR)
    assert torch.allclose(importance.token_log_ratio(between, GENERATOR), alpha * whole, atol=1e-6)
    assert torch.allclose(importance.token_log_ratio(LEARNER, between), (1 - alpha) * whole, atol=1e-6)


def test_the_anchor_has_no_gradient():
    learner = LEARNER.clone().requires_grad_()
    assert not loglinear(GENERATOR, learner, alpha=torch.full((3,), 0.5)).requires_grad


def test_what_is_not_finite_ends_as_a_neutral_ratio():
    broken = torch.tensor([float("nan"), float("-inf"), math.log(0.9)])
    between = loglinear(broken, LEARNER, alpha=torch.tensor([0.0, 0.0, 0.5]))
    assert importance.token_ratio(between, broken).isfinite().all()
    assert importance.token_ratio(between, broken).tolist() == pytest.approx([1, 1, 1])
