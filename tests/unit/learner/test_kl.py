import pytest
import torch
from beartype import beartype
from jaxtyping import jaxtyped

from learner.algorithms import kl

k1, k2, k3 = (jaxtyped(f, typechecker=beartype) for f in (kl.k1, kl.k2, kl.k3))
POLICY = torch.tensor([0.6, 0.3, 0.1])
REFERENCE = torch.tensor([0.2, 0.5, 0.3])
TRUTH = float((POLICY * (POLICY / REFERENCE).log()).sum())


@pytest.mark.parametrize("estimator", [k1, k3])
def test_k1_and_k3_have_the_divergence_as_their_expectation(estimator):
    values = estimator(POLICY.log(), REFERENCE.log())
    assert float((POLICY * values).sum()) == pytest.approx(TRUTH, abs=1e-6)


def test_k2_has_the_gradient_of_the_divergence():
    logits = torch.tensor([0.3, -0.2, 0.9], requires_grad=True)
    logprobs = logits.log_softmax(0)
    (expected,) = torch.autograd.grad((logprobs.exp() * (logprobs - REFERENCE.log())).sum(), logits, retain_graph=True)
    (got,) = torch.autograd.grad((logprobs.detach().exp() * k2(logprobs, REFERENCE.log())).sum(), logits)
    assert torch.allclose(got, expected, atol=1e-6)


def test_k2_and_k3_are_never_negative():
    torch.manual_seed(0)
    ours, theirs = -torch.rand(100) * 5, -torch.rand(100) * 5
    assert (k2(ours, theirs) >= 0).all()
    assert (k3(ours, theirs) >= -1e-6).all()


@pytest.mark.parametrize("estimator", [k1, k2, k3])
def test_equal_policies_have_divergence_zero(estimator):
    assert estimator(POLICY.log(), POLICY.log()).tolist() == [0.0, 0.0, 0.0]
