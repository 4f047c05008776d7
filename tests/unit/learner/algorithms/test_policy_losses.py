import math
from functools import partial

import pytest
import torch

from slipstream.learner.algorithms import importance, policy_losses
from tests.unit.learner.inputs import checked, find_idle, loss_inputs, wide

BOUNDS = {"clip_low": 0.2, "clip_high": 0.3}
LOSSES = {
    "ppo_clip": partial(checked(policy_losses.ppo_clip), **BOUNDS),
    "dual_clip": partial(checked(policy_losses.ppo_clip), **BOUNDS, dual_clip=3.0),
    "reinforce": checked(policy_losses.reinforce),
    "unclipped": checked(policy_losses.unclipped),
    "clip_cov": partial(checked(policy_losses.clip_cov), **BOUNDS),
    "kl_cov": partial(checked(policy_losses.kl_cov), coefficient=0.5),
    "cispo": partial(checked(policy_losses.cispo), **BOUNDS),
    "sapo": partial(checked(policy_losses.sapo), tau_positive=1.0, tau_negative=1.05),
    "dro": partial(checked(policy_losses.dro), beta=0.1),
    "aspo": partial(checked(policy_losses.aspo), **BOUNDS, cap=3.0),
    "dppo_tv": partial(checked(policy_losses.dppo), divergence="tv", low=0.1, high=0.2),
    "dppo_kl": partial(checked(policy_losses.dppo), divergence="kl", low=0.02, high=0.05),
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def logs(*ratios: float) -> torch.Tensor:
    return wide(*ratios).log()


def inputs_of(log_ratio, advantages, **columns):
    """All tokens are selected."""
    return loss_inputs(
        log_ratio, advantages, **({"is_selected": torch.ones_like(log_ratio, dtype=torch.bool)} | columns)
    )


def losses_of(loss, log_ratio, advantages, **columns):
    return loss(inputs_of(log_ratio, advantages, **columns))


def gradient_of(loss, log_ratio, advantages, **columns):
    leaf = log_ratio.detach().requires_grad_()
    return torch.autograd.grad(losses_of(loss, leaf, advantages, **columns).sum(), leaf)[0]


def idle(loss, log_ratio, advantages, **columns):
    return find_idle(loss, inputs_of(log_ratio, advantages, **columns))


def test_ppo_clip_by_hand():
    losses = losses_of(LOSSES["ppo_clip"], logs(1.0, 1.5, 0.5, 1.5, 0.5), wide(2, 2, 2, -2, -2))
    assert losses.tolist() == pytest.approx([-2.0, -2.6, -1.0, 3.0, 1.6])


def test_dual_clip_bounds_the_loss_of_negative_advantages_only():
    losses = losses_of(LOSSES["dual_clip"], logs(5.0, 2.9, 5.0, 0.5), wide(-2, -2, 2, -2))
    assert losses.tolist() == pytest.approx([6.0, 5.8, -2.6, 1.6])


def test_the_two_sided_clip_is_the_dual_clip():
    torch.manual_seed(0)
    log_ratio, advantages, delta = 2 * torch.randn(200), -torch.rand(200), 4.0
    ratio = log_ratio.exp()
    two_sided = -torch.minimum(ratio.clamp(max=delta) * advantages, ratio.clamp(0.8, 1.3) * advantages)
    loss = partial(policy_losses.ppo_clip, **BOUNDS, dual_clip=delta)
    assert losses_of(loss, log_ratio, advantages).equal(two_sided)


@pytest.mark.parametrize("dual_clip", [None, 1.9])
@pytest.mark.parametrize("sign", [1.0, 0.0, -1.0])
def test_ppo_clip_has_no_gradient_exactly_where_it_is_clipped(sign, dual_clip):
    ratio = torch.tensor([0.5, 0.79, 0.81, 1.0, 1.29, 1.31, 2.0])
    found = idle(
        partial(policy_losses.ppo_clip, **BOUNDS, dual_clip=dual_clip), ratio.log(), torch.full_like(ratio, sign)
    )
    is_too_high, is_too_low = ratio > 1.3, (ratio < 0.8) | (ratio > (dual_clip or torch.inf))
    assert found.equal(is_too_high if sign > 0 else is_too_low & (sign < 0))
    assert found.any() == (sign != 0)


def test_reinforce_by_hand():
    losses = losses_of(LOSSES["reinforce"], wide(0, 0), wide(1.0, -3.0), learner_logprobs=wide(-0.5, -2.0))
    assert losses.tolist() == pytest.approx([0.5, -6.0])


def test_sapo_by_hand():
    losses = losses_of(LOSSES["sapo"], logs(1, 2, 2), wide(1, 1, -1))
    negative = 4 / 1.05 / (1 + math.exp(-1.05))
    assert losses.tolist() == pytest.approx([-2.0, -4 / (1 + math.exp(-1)), negative])


def test_dro_by_hand():
    losses = losses_of(partial(policy_losses.dro, beta=0.4), wide(0.5, -0.5, 0.0), wide(2, 2, -1))
    assert losses.tolist() == pytest.approx([-0.95, 1.05, 0.0])


def test_the_covariance_losses_treat_the_selected_tokens_alone():
    is_selected = torch.tensor([True, False, True])
    columns = {"log_ratio": logs(2, 2, 0.5), "advantages": wide(1, 1, -1), "is_selected": is_selected}
    penalised = losses_of(partial(policy_losses.kl_cov, coefficient=0.1), **columns)
    assert penalised.tolist() == pytest.approx([-2 + 0.1 * math.log(2), -2.0, 0.5 + 0.1 * math.log(2)])
    assert losses_of(LOSSES["clip_cov"], **columns).tolist() == pytest.approx([-1.3, 0.0, 0.8])


# The factor in front of A * grad log pi, at ratios 0.25, 0.7, 1, 1.25, 1.5 and 25, for A > 0 and A < 0.
FACTORS = {
    "ppo_clip": [(0.25, 0.7, 1, 1.25, 0, 0), (0, 0, 1, 1.25, 1.5, 25)],
    "dual_clip": [(0.25, 0.7, 1, 1.25, 0, 0), (0, 0, 1, 1.25, 1.5, 0)],
    "reinforce": [(1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 1, 1)],
    "unclipped": [(0.25, 0.7, 1, 1.25, 1.5, 25), (0.25, 0.7, 1, 1.25, 1.5, 25)],
    "cispo": [(0.8, 0.8, 1, 1.25, 1.3, 1.3), (0.8, 0.8, 1, 1.25, 1.3, 1.3)],
    "aspo": [(3, 1 / 0.7, 1, 0.8, 0, 0), (0, 0, 1, 1.25, 1.5, 0)],
}


@pytest.mark.parametrize("name", FACTORS)
def test_the_gradient_is_the_advantage_times_the_factor_of_the_table(name):
    log_ratio = logs(0.25, 0.7, 1, 1.25, 1.5, 25)
    for advantage, factors in zip((2.0, -2.0), FACTORS[name], strict=True):
        advantages = torch.full_like(log_ratio, advantage)
        assert gradient_of(LOSSES[name], log_ratio, advantages).tolist() == pytest.approx(
            [-advantage * f for f in factors]
        )
        assert idle(LOSSES[name], log_ratio, advantages).tolist() == [factor == 0 for factor in factors]


def test_cispo_without_a_lower_bound_only_truncates():
    loss = partial(policy_losses.cispo, clip_low=None, clip_high=5.0)
    assert gradient_of(loss, logs(0.01, 1, 7), wide(-1, -1, -1)).tolist() == pytest.approx([0.01, 1, 6])


@pytest.mark.parametrize(("divergence", "bound"), [("tv", 0.15), ("kl", 0.05)])
def test_dppo_measures_probabilities_and_not_ratios(divergence, bound):
    learner, anchor = logs(1e-3, 0.8), logs(1e-4, 0.99)
    loss = partial(policy_losses.dppo, divergence=divergence, low=bound, high=bound, ratio_cap=5.0)
    assert gradient_of(loss, learner - anchor, wide(1, -1), learner_logprobs=learner).tolist() == [-5.0, 0.0]


def test_dppo_stops_only_what_moves_away():
    log_ratio, advantages = logs(1.5, 1.5, 0.5, 0.5, 1.3, 0.9), wide(1, -1, -1, 1, 1, -1)
    for name in ("dppo_tv", "dppo_kl"):
        assert idle(LOSSES[name], log_ratio, advantages).tolist() == [True, False, True, False, False, False]


def test_the_binary_kl_is_that_of_two_coins():
    anchor, learner = torch.distributions.Bernoulli(wide(0.5)), torch.distributions.Bernoulli(wide(0.7))
    bound = float(torch.distributions.kl_divergence(anchor, learner))
    for high, expected in ((bound * 0.999, True), (bound * 1.001, False)):
        loss = partial(policy_losses.dppo, divergence="kl", low=bound, high=high)
        assert idle(loss, logs(1.4), wide(1), learner_logprobs=logs(0.7)).tolist() == [expected]


@every_loss
def test_at_ratio_one_the_gradient_is_that_of_reinforce(loss):
    torch.manual_seed(0)
    advantages = torch.randn(50, dtype=torch.float64)
    gradient = gradient_of(loss, torch.zeros_like(advantages), advantages)
    assert torch.allclose(gradient, -advantages, atol=1e-12)
    assert not idle(loss, torch.zeros_like(advantages), advantages).any()


def test_at_ratio_one_ppo_is_reinforce_bit_for_bit():
    torch.manual_seed(0)
    logprobs, advantages = (-torch.rand(8)).requires_grad_(), torch.randn(8)
    inputs = inputs_of(importance.token_log_ratio(logprobs, logprobs.detach()), advantages)
    ppo, score = (
        torch.autograd.grad(LOSSES[name](inputs).sum(), logprobs, retain_graph=True)[0]
        for name in ("ppo_clip", "reinforce")
    )
    assert ppo.equal(score)


@pytest.mark.parametrize("name", ["ppo_clip", "dual_clip", "reinforce", "unclipped", "kl_cov", "sapo", "dro"])
def test_the_gradients_are_those_of_the_formulas(name):
    # Away from the kinks at ratios 0.8, 1, 1.3 and 3.
    log_ratio = logs(0.3, 0.7, 0.9, 1.1, 1.2, 1.4, 2.0, 3.5).repeat(2).requires_grad_()
    advantages = torch.linspace(-2, 1.9, 16, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: losses_of(LOSSES[name], x, advantages), log_ratio)


@every_loss
def test_another_token_changes_nothing(loss):
    advantages, log_ratio = wide(1, -1, 2, -2), logs(1.1, 0.9, 0.7, 1.2)
    poisoned_ratio, poisoned_advantages = log_ratio.clone(), advantages.clone()
    poisoned_ratio[3], poisoned_advantages[3] = 20.0, 1e30
    poisoned = losses_of(loss, poisoned_ratio, poisoned_advantages)
    assert losses_of(loss, log_ratio, advantages)[:3].equal(poisoned[:3])
    before, after = gradient_of(loss, log_ratio, advantages), gradient_of(loss, poisoned_ratio, poisoned_advantages)
    assert before[:3].equal(after[:3])


@every_loss
def test_a_ratio_at_the_bounds_of_the_clamp_is_finite(loss):
    log_ratio, advantages = torch.tensor([20.0, 20.0, -20.0, -20.0]), torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert losses_of(loss, log_ratio, advantages).isfinite().all()
    assert gradient_of(loss, log_ratio, advantages).isfinite().all()


@every_loss
def test_no_tokens_have_no_losses(loss):
    assert losses_of(loss, wide(), wide()).shape == (0,)
    assert idle(loss, wide(), wide()).shape == (0,)


def test_a_token_without_advantage_is_not_idle_and_no_gradient_mode_is_overridden():
    log_ratio, advantages = logs(2, 2), wide(1, 0)
    with torch.no_grad():
        found = idle(LOSSES["ppo_clip"], log_ratio, advantages)
    assert found.tolist() == [True, False]
    assert not log_ratio.requires_grad
