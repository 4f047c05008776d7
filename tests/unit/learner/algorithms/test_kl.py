import itertools
import math

import pytest
import torch
from beartype import beartype
from jaxtyping import jaxtyped

from slipstream.learner.algorithms import distillation, kl
from slipstream.learner.algorithms.inputs import KlInputs
from tests.unit.learner.inputs import checked

POLICY = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
GENERATOR = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
TRUTH = float((POLICY * (POLICY / REFERENCE).log()).sum())


def of_two(estimator):
    estimator = checked(estimator)
    return lambda ours, theirs: estimator(KlInputs(ours, theirs))


ESTIMATORS = {name: of_two(f) for name, f in kl.KL_ESTIMATORS.items() if name != "k3_off_policy"}
k3, exact = ESTIMATORS["k3"], checked(kl.exact)


def k3_off_policy(ours, theirs, generator):
    return checked(kl.k3_off_policy)(KlInputs(ours, theirs, generator))


each_estimator = pytest.mark.parametrize("name", ESTIMATORS)


def policy() -> tuple[torch.Tensor, torch.Tensor]:
    logits = POLICY.log().clone().requires_grad_()
    return logits, logits.log_softmax(0)


def divergence(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return (first.exp() * (first - second)).sum()


def expected_gradient(name: str) -> torch.Tensor:
    """Gradient of the estimator as a loss on tokens sampled from the policy."""
    logits, logprobs = policy()
    return gradient((POLICY * ESTIMATORS[name](logprobs, REFERENCE.log())).sum(), logits)


def test_values_by_hand_and_small_ones_are_not_lost_to_rounding():
    ours, theirs = torch.tensor([-1.0]), torch.tensor([-3.0])
    values = {name: estimator(ours, theirs).item() for name, estimator in ESTIMATORS.items()}
    assert values["k1"] == values["abs"] == values["k2"] == 2.0
    assert values["k3"] == pytest.approx(math.exp(-2) + 1)
    assert ESTIMATORS["k1"](theirs, ours).item() == -2.0
    assert ESTIMATORS["abs"](theirs, ours).item() == 2.0
    ours = torch.full((9,), -1.0)
    theirs = ours - torch.arange(1, 10) * 1.1e-4
    differences = (theirs - ours).double()
    assert torch.allclose(k3(ours, theirs).double(), differences.expm1() - differences, rtol=1e-2, atol=0)


@each_estimator
def test_which_estimators_have_the_expectation_and_the_gradient_of_the_divergence(name):
    error = float((POLICY * ESTIMATORS[name](POLICY.log(), REFERENCE.log())).sum()) - TRUTH
    if name in ("k1", "k3", "k1_st", "k3_st"):
        assert abs(error) < 1e-9
    else:
        assert abs(error) > 1e-2
    logits, logprobs = policy()
    truth = gradient(divergence(logprobs, REFERENCE.log()), logits)
    is_right = torch.allclose(expected_gradient(name), truth, atol=1e-9)
    assert is_right == (name in ("k2", "k1_st", "abs_st", "k3_st"))


def test_the_gradients_of_k1_k3_and_off_policy_k3():
    logits, logprobs = policy()
    assert expected_gradient("k1").abs().max() < 1e-12
    other = gradient(divergence(REFERENCE.log(), logprobs), logits)
    assert torch.allclose(expected_gradient("k3"), other, atol=1e-9)
    logits, logprobs = policy()
    expectation = (GENERATOR * k3_off_policy(logprobs, REFERENCE.log(), GENERATOR.log())).sum()
    assert expectation.item() == pytest.approx(TRUTH, abs=1e-9)
    truth = gradient(divergence(logprobs, REFERENCE.log()), logits)
    assert torch.allclose(gradient(expectation, logits), truth, atol=1e-9)


@each_estimator
def test_the_gradient_of_a_token_is_that_of_its_formula(name):
    torch.manual_seed(0)
    ours, theirs = (-torch.rand(6, dtype=torch.float64).requires_grad_() - i for i in range(2))
    if name.endswith("_st"):
        got = torch.autograd.grad(ESTIMATORS[name](ours, theirs).sum(), ours)[0]
        assert torch.allclose(got, (ours - theirs).detach())
    else:
        assert torch.autograd.gradcheck(ESTIMATORS[name], (ours, theirs))


@each_estimator
def test_estimates_are_finite_zero_for_equal_policies_and_negative_only_for_k1(name):
    torch.manual_seed(0)
    ours, theirs = -torch.rand(100) * 5, -torch.rand(100) * 5
    values = ESTIMATORS[name](ours, theirs)
    assert (values >= 0).all() == (name not in ("k1", "k1_st"))
    assert values.equal(ESTIMATORS[name.removesuffix("_st")](ours, theirs))
    assert ESTIMATORS[name](POLICY.log(), POLICY.log()).tolist() == [0.0, 0.0, 0.0]
    assert ESTIMATORS[name](torch.zeros(0), torch.zeros(0)).shape == (0,)
    broken = torch.tensor([float("nan"), float("-inf"), -1.0], requires_grad=True)
    values = ESTIMATORS[name](broken, torch.tensor([-1.0, -1.0, float("-inf")]))
    assert values.tolist() == [0.0, 0.0, 0.0]
    assert torch.autograd.grad(values.sum(), broken)[0].isfinite().all()
    values = ESTIMATORS[name](torch.tensor([-1e4, 0.0]), torch.tensor([0.0, -1e4]))
    assert values.isfinite().all()
    assert values.abs().max() <= math.exp(20)


def test_the_exact_divergence_is_the_sum_over_possible_tokens_and_has_its_gradient():
    rows = exact(torch.stack([POLICY, REFERENCE]).log(), torch.stack([REFERENCE, REFERENCE]).log())
    assert rows.tolist() == pytest.approx([TRUTH, 0.0])
    torch.manual_seed(0)
    logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(4, 5, dtype=torch.float64).log_softmax(-1)
    assert torch.autograd.gradcheck(lambda x: exact(x.log_softmax(-1), reference), logits)
    logits = torch.tensor([[0.0, 0.0, float("-inf")]], requires_grad=True)
    value = exact(logits.log_softmax(-1), torch.tensor([[0.25, 0.75, 0.0]]).log())
    assert value.item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert torch.autograd.grad(value.sum(), logits)[0].isfinite().all()


@pytest.mark.parametrize(
    ("measured", "num_sequences", "factor"),
    [
        *((6.6, 100, 1.01), (5.4, 100, 0.99), (6.0, 100, 1.0)),
        # No measurement moves it further than a fifth of its share, and no number of sequences to zero.
        *((600.0, 100, 1.02), (math.inf, 100, 1.02), (0.0, 100, 0.98), (-50.0, 100, 0.98), (0.0, 1_000_000, 0.8)),
        (math.nan, 100, 1.0),
    ],
)
def test_the_adaptive_coefficient_by_hand(measured, num_sequences, factor):
    settings = {"target": 6.0, "num_sequences": num_sequences, "horizon": 1000}
    found = kl.adaptive_coefficient(0.1, kl=measured, **settings)
    assert found == (0.1 if factor == 1 else pytest.approx(0.1 * factor))


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
    logits = LOGITS.clone().requires_grad_()
    return logits, logits.log_softmax(0)


def gradient(loss: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss.sum(), logits, retain_graph=True)[0]


def kl_of(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p * (p.log() - q.log())).sum()


def test_the_advantage_is_how_much_more_the_teacher_likes_a_token_with_the_gradient_of_the_reverse_kl():
    values = teacher_advantages(torch.tensor([-1.0, -2.0, -9.0]), torch.tensor([-1.5, -0.5, -1.0]), bound=5.0)
    assert values.tolist() == [-0.5, 1.5, 5.0]
    logits, logprobs = learner()
    advantages = teacher_advantages(logprobs, TEACHER.log(), bound=20.0)
    assert not advantages.requires_grad
    loss = -(logprobs.detach().exp() * advantages * logprobs)
    assert torch.allclose(gradient(loss, logits), gradient(kl_of(logprobs.exp(), TEACHER), logits), atol=1e-6)


def test_k3_has_the_reverse_kl_as_expectation_a_capped_token_no_gradient_and_a_broken_teacher_no_effect():
    logits, logprobs = learner()
    loss = logprobs.detach().exp() * sampled_k3(logprobs, TEACHER.log(), max_loss=10.0)
    assert loss.sum().item() == pytest.approx(kl_of(logprobs.exp(), TEACHER).item(), abs=1e-6)
    assert torch.allclose(gradient(loss, logits), gradient(kl_of(TEACHER, logprobs.exp()), logits), atol=1e-6)
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
    exact = kl_of(TEACHER, logprobs.exp())
    assert loss.item() == pytest.approx(exact.item(), abs=1e-12)
    assert torch.allclose(gradient(loss, logits), gradient(exact, logits), atol=1e-12)


def test_the_top_two_and_the_jensen_shannon_divergence_by_hand():
    ours, theirs = torch.tensor([[0.25, 0.25]]).double().log(), torch.tensor([[0.5, 0.3]]).double().log()
    with_rest = forward_kl_topk(ours, theirs, renormalize=False)
    assert with_rest.item() == pytest.approx(0.5 * math.log(2) + 0.3 * math.log(1.2) + 0.2 * math.log(0.4))
    renormalized = forward_kl_topk(ours, theirs, renormalize=True)
    assert renormalized.item() == pytest.approx(5 / 8 * math.log(1.25) + 3 / 8 * math.log(0.75))
    ours, theirs = LOGITS.softmax(0), TEACHER
    middle = 0.3 * theirs + 0.7 * ours
    expected = 0.3 * kl_of(theirs, middle) + 0.7 * kl_of(ours, middle)
    for renormalize in (False, True):
        loss = jsd(ours.log()[None], theirs.log()[None], renormalize=renormalize)
        assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    ours, theirs = LOGITS.softmax(0), TEACHER
    logs, tiny = (ours.log()[None], theirs.log()[None]), 1e-6
    forward = generalized_jsd(*logs, beta=tiny, renormalize=True).item() / tiny
    reverse = generalized_jsd(*logs, beta=1 - tiny, renormalize=True).item() / tiny
    assert forward == pytest.approx(kl_of(theirs, ours).item(), abs=1e-5)
    assert reverse == pytest.approx(kl_of(ours, theirs).item(), abs=1e-5)


@each_form
@each_divergence
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equal_policies_have_no_loss_and_no_gradient(divergence, size, renormalize):
    logits, logprobs = learner()
    loss = divergence(logprobs[None, :size], logprobs.detach()[None, :size], renormalize=renormalize)
    assert loss.abs().item() < 1e-12
    assert gradient(loss, logits).abs().max() < 1e-12


@each_divergence
def test_divergences_are_never_negative_grow_with_more_ids_and_widen_half_precision(divergence):
    torch.manual_seed(0)
    ours, theirs = (3 * torch.randn(2, 200, 10, dtype=torch.float64)).log_softmax(-1)
    assert (divergence(ours[:, :4], theirs[:, :4], renormalize=True) >= -1e-12).all()
    losses = [divergence(ours[:, :size], theirs[:, :size], renormalize=False) for size in range(1, 11)]
    assert (losses[3] >= -1e-12).all()
    assert all((more >= fewer - 1e-9).all() for fewer, more in itertools.pairwise(losses))
    ours, theirs = LOGITS.log_softmax(0)[None, :3].bfloat16(), TEACHER.log()[None, :3].bfloat16()
    loss = divergence(ours, theirs, renormalize=False)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(divergence(ours.double(), theirs.double(), renormalize=False).item(), abs=1e-5)


@each_form
@each_divergence
def test_the_gradients_are_those_of_the_formulas(divergence, renormalize):
    torch.manual_seed(0)
    logits, theirs = torch.randn(2, 5, 6, dtype=torch.float64)
    logits.requires_grad_()

    def loss(values: torch.Tensor) -> torch.Tensor:
        return divergence(values.log_softmax(-1)[:, :3], theirs.log_softmax(-1)[:, :3], renormalize=renormalize)

    assert torch.autograd.gradcheck(loss, logits)


@each_form
@each_divergence
def test_an_id_the_teacher_finds_impossible_is_no_trouble_and_only_the_learner_learns(divergence, renormalize):
    logits, logprobs = learner()
    theirs = torch.tensor([[0.6, 0.4, 0.0]], dtype=torch.float64).log()
    loss = divergence(logprobs[None, :3], theirs, renormalize=renormalize)
    assert loss.isfinite().all()
    assert gradient(loss, logits).isfinite().all()
    ours, theirs = (torch.full((1, 2), -1.0).requires_grad_() for _ in range(2))
    divergence(ours * 2, theirs * 3, renormalize=renormalize).sum().backward()
    assert ours.grad is not None
    assert theirs.grad is None
