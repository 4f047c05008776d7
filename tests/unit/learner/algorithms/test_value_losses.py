import pytest
import torch

from slipstream.learner.algorithms import token_advantages
from tests.unit.learner.inputs import checked, wide

clipped_value_loss = checked(token_advantages.clipped_value_loss)
explained_variance = checked(token_advantages.explained_variance)


def test_clipped_value_loss_by_hand():
    values, returns, before = wide(1, 2, 2, 0, 5), wide(1.5, 3, 1, 3, 2), wide(1, 1, 1, 1, 1)
    loss, clipped = clipped_value_loss(values, returns, before, clip=0.5)
    # within the bound; past it towards R, twice R away from it, below it away from R
    assert loss.tolist() == [0.125, 1.125, 0.5, 4.5, 4.5]
    assert clipped.tolist() == [False, True, False, False, False]


def test_without_a_clip_it_is_half_the_squared_error():
    loss, clipped = clipped_value_loss(wide(1, 9), wide(3, 9), wide(100, 100), clip=None)
    assert loss.tolist() == [2, 0]
    assert not clipped.any()


def test_exactly_the_clipped_tokens_have_no_gradient():
    torch.manual_seed(0)
    values, returns, before = torch.randn(3, 200, dtype=torch.float64)
    values.requires_grad_()
    loss, clipped = clipped_value_loss(values, returns, before, clip=0.3)
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    assert clipped.equal(gradient == 0)
    assert 0 < clipped.sum() < 200
    assert torch.allclose(gradient[~clipped], (values - returns)[~clipped])


@pytest.mark.parametrize("clip", [None, 0.3])
def test_the_gradient_is_that_of_the_formula(clip):
    torch.manual_seed(0)
    values, returns, before = torch.randn(3, 20, dtype=torch.float64)
    values.requires_grad_()
    assert torch.autograd.gradcheck(lambda v: clipped_value_loss(v, returns, before, clip=clip)[0], values)


def test_only_the_critic_learns():
    values, returns, before = (torch.ones(3, requires_grad=True) for _ in range(3))
    loss, _ = clipped_value_loss(values * 2, returns * 3, before * 1, clip=5.0)
    loss.sum().backward()
    assert values.grad is not None
    assert returns.grad is None
    assert before.grad is None


def test_explained_variance_by_hand():
    returns = wide(1, 2, 3)
    assert explained_variance(returns, returns) == 1
    assert explained_variance(returns + 5, returns) == pytest.approx(1)
    assert explained_variance(wide(7, 7, 7), returns) == pytest.approx(0)
    assert explained_variance(-returns, returns) == pytest.approx(-3)
    assert explained_variance(returns / 2, returns) == pytest.approx(0.75)


def test_returns_that_do_not_vary_have_no_variance_to_explain():
    assert explained_variance(wide(1, 2, 3), torch.full((3,), 0.1, dtype=torch.float64)) == 0
    assert explained_variance(wide(1), wide(4)) == 0
    assert explained_variance(wide(), wide()) == 0
