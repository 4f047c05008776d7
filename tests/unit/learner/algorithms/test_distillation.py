import itertools
import math

import pytest
import torch
from beartype import beartype
from jaxtyping import jaxtyped

from slipstream.learner.algorithms import distillation

teacher_advantages = jaxtyped(distillation.teacher_advantages, typechecker=beartype)
sampled_k3 = jaxtyped(distillation.sampled_k3, typechecker=beartype)
forward_kl_topk = jaxtyped(distillation.forward_kl_topk, typechecker=beartype)
generalized_jsd = jaxtyped(distillation.generalized_jsd, typechecker=beartype)

TEACHER = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
LOGITS = torch.tensor([0.2, 0.9, -0.4, 0.1], dtype=torch.float64)


def jsd(learner, teacher, *, renormalize):
    return generalized_jsd(learner, teacher, beta=0.3, renormalize=renormalize)


DIVERGENCES = [forward_kl_topk, jsd]
each_divergence = pytest.mark.parametrize("divergence", DIVERGENCES)
each_form = pytest.mark.parametrize("renormalize", [False, True])


def learner():
    """Logits with a gradient and their log-probabilities."""
    logits = LOGITS.clone().requires_grad_()
    return logits, logits.log_softmax(0)


def gradient(loss: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss.sum(), logits, retain_graph=True)[0]


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p * (p.log() - q.log())).sum()


def test_the_advantage_is_how_much_more_the_teacher_likes_a_token_with_the_gradient_of_the_reverse_kl():
    values = teacher_advantages(torch.tensor([-1.0, -2.0, -9.0]), torch.tensor([-1.5, -0.5, -1.0]), bound=5.0)
    assert values.tolist() == [-0.5, 1.5, 5.0]
    logits, logprobs = learner()
    advantages = teacher_advantages(logprobs, TEACHER.log(), bound=20.0)
    assert not advantages.requires_grad
    loss = -(logprobs.detach().exp() * advantages * logprobs)
    assert torch.allclose(gradient(loss, logits), gradient(kl(logprobs.exp(), TEACHER), logits), atol=1e-6)


def test_k3_has_the_reverse_kl_as_its_expectation_and_the_gradient_of_the_forward_one():
    logits, logprobs = learner()
    loss = logprobs.detach().exp() * sampled_k3(logprobs, TEACHER.log(), max_loss=10.0)
    assert loss.sum().item() == pytest.approx(kl(logprobs.exp(), TEACHER).item(), abs=1e-6)
    assert torch.allclose(gradient(loss, logits), gradient(kl(TEACHER, logprobs.exp()), logits), atol=1e-6)


def test_a_capped_token_has_no_gradient_and_a_teacher_that_is_not_finite_counts_as_neutral():
    ours = torch.tensor([-30.0, -1.0], requires_grad=True)
    loss = sampled_k3(ours, torch.tensor([-0.1, -1.2]), max_loss=10.0)
    assert loss[0] == 10.0
    (slope,) = torch.autograd.grad(loss.sum(), ours)
    assert slope[0] == 0
    assert slope[1] == pytest.approx(1 - math.exp(-0.2), abs=1e-6)
    ours, theirs = torch.tensor([-1.0, -1.0]), torch.tensor([-math.inf, math.nan])
    assert teacher_advantages(ours, theirs, bound=5.0).tolist() == [0, 0]
    assert sampled_k3(ours, theirs, max_loss=10.0).tolist() == [0, 0]


@each_form
def test_over_the_whole_vocabulary_the_forward_kl_is_exact(renormalize):
    logits, logprobs = learner()
    loss = forward_kl_topk(logprobs[None], TEACHER.log()[None], renormalize=renormalize)
    exact = kl(TEACHER, logprobs.exp())
    assert loss.item() == pytest.approx(exact.item(), abs=1e-12)
    assert torch.allclose(gradient(loss, logits), gradient(exact, logits), atol=1e-12)


def test_the_top_two_by_hand():
    ours, theirs = torch.tensor([[0.25, 0.25]]).double().log(), torch.tensor([[0.5, 0.3]]).double().log()
    with_rest = forward_kl_topk(ours, theirs, renormalize=False)
    assert with_rest.item() == pytest.approx(0.5 * math.log(2) + 0.3 * math.log(1.2) + 0.2 * math.log(0.4))
    renormalized = forward_kl_topk(ours, theirs, renormalize=True)
    assert renormalized.item() == pytest.approx(5 / 8 * math.log(1.25) + 3 / 8 * math.log(0.75))


@each_form
@each_divergence
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equal_policies_have_no_loss_and_no_gradient(divergence, size, renormalize):
    logits, logprobs = learner()
    loss = divergence(logprobs[None, :size], logprobs.detach()[None, :size], renormalize=renormalize)
    assert loss.abs().item() < 1e-12
    assert gradient(loss, logits).abs().max() < 1e-12


@each_divergence
def test_divergences_are_never_negative_and_more_ids_never_hide_more(divergence):
    torch.manual_seed(0)
    ours, theirs = (3 * torch.randn(2, 200, 10, dtype=torch.float64)).log_softmax(-1)
    assert (divergence(ours[:, :4], theirs[:, :4], renormalize=True) >= -1e-12).all()
    losses = [divergence(ours[:, :size], theirs[:, :size], renormalize=False) for size in range(1, 11)]
    assert (losses[3] >= -1e-12).all()
    assert all((more >= fewer - 1e-9).all() for fewer, more in itertools.pairwise(losses))


@each_form
@each_divergence
def test_the_gradients_are_those_of_the_formulas(divergence, renormalize):
    torch.manual_seed(0)
    logits, theirs = torch.randn(2, 5, 6, dtype=torch.float64)
    logits.requires_grad_()

    def loss(values: torch.Tensor) -> torch.Tensor:
        return divergence(values.log_softmax(-1)[:, :3], theirs.log_softmax(-1)[:, :3], renormalize=renormalize)

    assert torch.autograd.gradcheck(loss, logits)


def test_the_jensen_shannon_divergence_by_hand_becomes_forward_and_reverse_kl():
    ours, theirs = LOGITS.softmax(0), TEACHER
    middle = 0.3 * theirs + 0.7 * ours
    expected = 0.3 * kl(theirs, middle) + 0.7 * kl(ours, middle)
    for renormalize in (False, True):
        loss = jsd(ours.log()[None], theirs.log()[None], renormalize=renormalize)
        assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    ours, theirs = LOGITS.softmax(0), TEACHER
    logs, tiny = (ours.log()[None], theirs.log()[None]), 1e-6
    forward = generalized_jsd(*logs, beta=tiny, renormalize=True).item() / tiny
    reverse = generalized_jsd(*logs, beta=1 - tiny, renormalize=True).item() / tiny
    assert forward == pytest.approx(kl(theirs, ours).item(), abs=1e-5)
    assert reverse == pytest.approx(kl(ours, theirs).item(), abs=1e-5)


@each_form
@each_divergence
def test_an_id_the_teacher_finds_impossible_is_no_trouble(divergence, renormalize):
    logits, logprobs = learner()
    theirs = torch.tensor([[0.6, 0.4, 0.0]], dtype=torch.float64).log()
    loss = divergence(logprobs[None, :3], theirs, renormalize=renormalize)
    assert loss.isfinite().all()
    assert gradient(loss, logits).isfinite().all()


@each_divergence
def test_half_precision_is_widened_before_the_rest_is_taken(divergence):
    ours, theirs = LOGITS.log_softmax(0)[None, :3].bfloat16(), TEACHER.log()[None, :3].bfloat16()
    loss = divergence(ours, theirs, renormalize=False)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(divergence(ours.double(), theirs.double(), renormalize=False).item(), abs=1e-5)


@each_form
@each_divergence
def test_only_the_learner_learns(divergence, renormalize):
    ours, theirs = (torch.full((1, 2), -1.0).requires_grad_() for _ in range(2))
    divergence(ours * 2, theirs * 3, renormalize=renormalize).sum().backward()
    assert ours.grad is not None
    assert theirs.grad is None
