import pytest
import torch
from beartype import beartype
from jaxtyping import jaxtyped

from learner.algorithms import importance, policy_losses

ppo_clip = jaxtyped(policy_losses.ppo_clip, typechecker=beartype)
is_clipped = jaxtyped(policy_losses.is_clipped, typechecker=beartype)
reinforce = jaxtyped(policy_losses.reinforce, typechecker=beartype)

BOUNDS = {"clip_low": 0.2, "clip_high": 0.3}


def test_ppo_clip_by_hand():
    ratio, advantage = torch.tensor([1.0, 1.5, 0.5, 1.5, 0.5]), torch.tensor([2.0, 2.0, 2.0, -2.0, -2.0])
    assert ppo_clip(ratio, advantage, **BOUNDS).tolist() == pytest.approx([-2.0, -2.6, -1.0, 3.0, 1.6])


def test_ppo_clip_has_no_gradient_exactly_where_it_is_clipped():
    ratio = torch.tensor([0.5, 0.79, 0.81, 1.0, 1.29, 1.31, 2.0], requires_grad=True)
    for sign in (1.0, -1.0):
        advantage = torch.full_like(ratio, sign)
        (gradient,) = torch.autograd.grad(ppo_clip(ratio, advantage, **BOUNDS).sum(), ratio)
        assert (gradient == 0).equal(is_clipped(ratio.detach(), advantage, **BOUNDS))
    assert not is_clipped(ratio.detach(), torch.zeros_like(ratio), **BOUNDS).any()


def test_reinforce_by_hand():
    assert reinforce(torch.tensor([-0.5, -2.0]), torch.tensor([1.0, -3.0])).tolist() == pytest.approx([0.5, -6.0])


def test_the_gradients_are_those_of_the_formulas():
    torch.manual_seed(0)
    advantage = torch.randn(6, dtype=torch.float64)
    ratio = (torch.rand(6, dtype=torch.float64) + 0.5).requires_grad_()
    assert torch.autograd.gradcheck(lambda r: policy_losses.ppo_clip(r, advantage, **BOUNDS), ratio)
    assert torch.autograd.gradcheck(lambda r: policy_losses.reinforce(r, advantage), ratio)


def test_at_ratio_one_ppo_has_the_gradient_of_reinforce():
    torch.manual_seed(0)
    logprobs, advantage = (-torch.rand(8)).requires_grad_(), torch.randn(8)
    ratio = importance.token_ratio(logprobs, logprobs.detach())
    (ppo,) = torch.autograd.grad(ppo_clip(ratio, advantage, **BOUNDS).sum(), logprobs)
    (score,) = torch.autograd.grad(reinforce(logprobs, advantage).sum(), logprobs)
    assert ppo.equal(score)
