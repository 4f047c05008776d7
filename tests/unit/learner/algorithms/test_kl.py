import math

import pytest
import torch

from slipstream.learner.algorithms import kl
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
    """Logits of POLICY with a gradient, and their log-probabilities."""
    logits = POLICY.log().clone().requires_grad_()
    return logits, logits.log_softmax(0)


def divergence(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return (first.exp() * (first - second)).sum()


def gradient(value: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(value, logits, retain_graph=True)[0]


def expected_gradient(name: str) -> torch.Tensor:
    """Gradient of the estimator as a loss on tokens sampled from the policy."""
    logits, logprobs = policy()
    return gradient((POLICY * ESTIMATORS[name](logprobs, REFERENCE.log())).sum(), logits)


def test_values_by_hand():
    ours, theirs = torch.tensor([-1.0]), torch.tensor([-3.0])
    values = {name: estimator(ours, theirs).item() for name, estimator in ESTIMATORS.items()}
    assert values["k1"] == values["abs"] == values["k2"] == 2.0
    assert values["k3"] == pytest.approx(math.exp(-2) + 1)
    assert ESTIMATORS["k1"](theirs, ours).item() == -2.0
    assert ESTIMATORS["abs"](theirs, ours).item() == 2.0


@pytest.mark.parametrize("name", ["k1", "k3", "k1+", "k3+"])
def test_k1_and_k3_have_the_divergence_as_their_expectation(name):
    values = ESTIMATORS[name](POLICY.log(), REFERENCE.log())
    assert float((POLICY * values).sum()) == pytest.approx(TRUTH, abs=1e-9)


@pytest.mark.parametrize("name", ["abs", "k2", "abs+"])
def test_the_others_have_not(name):
    values = ESTIMATORS[name](POLICY.log(), REFERENCE.log())
    assert abs(float((POLICY * values).sum()) - TRUTH) > 1e-2


@each_estimator
def test_only_k2_and_the_straight_through_forms_have_the_gradient_of_the_divergence(name):
    logits, logprobs = policy()
    truth = gradient(divergence(logprobs, REFERENCE.log()), logits)
    is_right = torch.allclose(expected_gradient(name), truth, atol=1e-9)
    assert is_right == (name in ("k2", "k1+", "abs+", "k3+"))


def test_the_gradient_of_k1_vanishes_and_that_of_k3_is_the_other_divergence():
    logits, logprobs = policy()
    assert expected_gradient("k1").abs().max() < 1e-12
    other = gradient(divergence(REFERENCE.log(), logprobs), logits)
    assert torch.allclose(expected_gradient("k3"), other, atol=1e-9)


@pytest.mark.parametrize("base", ["k1", "abs", "k3"])
def test_a_straight_through_form_has_the_value_of_its_base_exactly(base):
    torch.manual_seed(0)
    ours, theirs = -torch.rand(50) * 5, -torch.rand(50) * 5
    assert ESTIMATORS[f"{base}+"](ours, theirs).equal(ESTIMATORS[base](ours, theirs))


@each_estimator
def test_the_gradient_of_a_token_is_that_of_its_formula(name):
    torch.manual_seed(0)
    ours, theirs = (-torch.rand(6, dtype=torch.float64).requires_grad_() - i for i in range(2))
    if name.endswith("+"):
        got = torch.autograd.grad(ESTIMATORS[name](ours, theirs).sum(), ours)[0]
        assert torch.allclose(got, (ours - theirs).detach())
    else:
        assert torch.autograd.gradcheck(ESTIMATORS[name], (ours, theirs))


@pytest.mark.parametrize("name", ["abs", "k2", "k3", "abs+", "k3+"])
def test_these_are_never_negative(name):
    torch.manual_seed(0)
    ours, theirs = -torch.rand(100) * 5, -torch.rand(100) * 5
    assert (ESTIMATORS[name](ours, theirs) >= 0).all()


@each_estimator
def test_equal_policies_have_divergence_zero(name):
    assert ESTIMATORS[name](POLICY.log(), POLICY.log()).tolist() == [0.0, 0.0, 0.0]


@each_estimator
def test_what_is_not_finite_counts_as_no_divergence(name):
    broken = torch.tensor([float("nan"), float("-inf"), -1.0], requires_grad=True)
    values = ESTIMATORS[name](broken, torch.tensor([-1.0, -1.0, float("-inf")]))
    assert values.tolist() == [0.0, 0.0, 0.0]
    assert torch.autograd.grad(values.sum(), broken)[0].isfinite().all()


@each_estimator
def test_extreme_log_ratios_stay_finite(name):
    values = ESTIMATORS[name](torch.tensor([-1e4, 0.0]), torch.tensor([0.0, -1e4]))
    assert values.isfinite().all()
    assert values.abs().max() <= math.exp(20)


@each_estimator
def test_no_tokens_have_no_divergence(name):
    assert ESTIMATORS[name](torch.zeros(0), torch.zeros(0)).shape == (0,)


def test_small_k3_are_not_lost_to_rounding():
    ours = torch.full((9,), -1.0)
    theirs = ours - torch.arange(1, 10) * 1.1e-4
    differences = (theirs - ours).double()
    assert torch.allclose(k3(ours, theirs).double(), differences.expm1() - differences, rtol=1e-2, atol=0)


def test_off_policy_k3_has_value_and_gradient_of_the_divergence_under_the_generator():
    logits, logprobs = policy()
    expectation = (GENERATOR * k3_off_policy(logprobs, REFERENCE.log(), GENERATOR.log())).sum()
    assert expectation.item() == pytest.approx(TRUTH, abs=1e-9)
    truth = gradient(divergence(logprobs, REFERENCE.log()), logits)
    assert torch.allclose(gradient(expectation, logits), truth, atol=1e-9)


def test_the_exact_divergence_is_the_sum_over_the_vocabulary():
    rows = exact(torch.stack([POLICY, REFERENCE]).log(), torch.stack([REFERENCE, REFERENCE]).log())
    assert rows.tolist() == pytest.approx([TRUTH, 0.0])


def test_the_exact_divergence_has_the_gradient_of_its_formula():
    torch.manual_seed(0)
    logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(4, 5, dtype=torch.float64).log_softmax(-1)
    assert torch.autograd.gradcheck(lambda x: exact(x.log_softmax(-1), reference), logits)


def test_a_token_that_neither_policy_can_write_adds_nothing():
    logits = torch.tensor([[0.0, 0.0, float("-inf")]], requires_grad=True)
    value = exact(logits.log_softmax(-1), torch.tensor([[0.25, 0.75, 0.0]]).log())
    assert value.item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert torch.autograd.grad(value.sum(), logits)[0].isfinite().all()


# --- the adaptive coefficient ---------------------------------------------------------------------------------------
def step(coefficient: float, measured: float, *, num_sequences: int = 100) -> float:
    return kl.adaptive_coefficient(coefficient, kl=measured, target=6.0, num_sequences=num_sequences, horizon=1000)


def test_the_coefficient_by_hand():
    assert step(0.1, 6.6) == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert step(0.1, 5.4) == pytest.approx(0.1 * (1 - 0.1 * 0.1))


def test_on_target_the_coefficient_stays():
    assert step(0.1, 6.0) == 0.1


@pytest.mark.parametrize(("kl", "error"), [(600.0, 0.2), (math.inf, 0.2), (0.0, -0.2), (-50.0, -0.2)])
def test_no_measurement_moves_it_further_than_a_fifth_of_its_share(kl, error):
    assert step(0.1, kl) == pytest.approx(0.1 * (1 + error * 0.1))


def test_a_step_larger_than_the_horizon_keeps_it_positive():
    assert step(0.1, 0.0, num_sequences=1_000_000) == pytest.approx(0.08)


def test_a_kl_that_is_no_number_leaves_it_as_it_is():
    assert step(0.1, math.nan) == 0.1
