import math
from functools import partial

import pytest
import torch
from beartype import beartype
from jaxtyping import jaxtyped

from slipstream.learner.algorithms import importance, policy_losses

NAMES = "idle_tokens ppo_clip reinforce unclipped kl_cov cispo sapo dro topr_token aspo dppo_tv dppo_kl"
checked = {name: jaxtyped(getattr(policy_losses, name), typechecker=beartype) for name in NAMES.split()}
ppo_clip, reinforce, idle_tokens = (checked[name] for name in ("ppo_clip", "reinforce", "idle_tokens"))

BOUNDS = {"clip_low": 0.2, "clip_high": 0.3}
ANCHOR = math.log(0.5)


def of_ratio(loss, **settings):
    return lambda log_ratio, advantages: loss(log_ratio.exp(), advantages, **settings)


def of_probability(loss, **settings):
    """The anchor gives every token the probability 0.5."""
    return lambda log_ratio, advantages: loss(log_ratio, advantages, ANCHOR + log_ratio, **settings)


def all_penalised(log_ratio, advantages):
    return checked["kl_cov"](log_ratio, advantages, torch.ones_like(advantages, dtype=torch.bool), coefficient=0.5)


LOSSES = {
    "ppo_clip": of_ratio(ppo_clip, **BOUNDS),
    "dual_clip": of_ratio(ppo_clip, **BOUNDS, dual_clip=3.0),
    "reinforce": reinforce,
    "unclipped": checked["unclipped"],
    "kl_cov": all_penalised,
    "cispo": partial(checked["cispo"], **BOUNDS),
    "sapo": partial(checked["sapo"], tau_positive=1.0, tau_negative=1.05),
    "dro": partial(checked["dro"], beta=0.1),
    "topr_token": checked["topr_token"],
    "aspo": partial(checked["aspo"], **BOUNDS, cap=3.0),
    "dppo_tv": of_probability(checked["dppo_tv"], low=0.1, high=0.2),
    "dppo_kl": of_probability(checked["dppo_kl"], low=0.02, high=0.05),
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def wide(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def logs(*ratios: float) -> torch.Tensor:
    return wide(*ratios).log()


def gradient_of(loss, log_ratio, advantages):
    leaf = log_ratio.detach().requires_grad_()
    return torch.autograd.grad(loss(leaf, advantages).sum(), leaf)[0]


def test_ppo_clip_by_hand():
    ratio, advantage = torch.tensor([1.0, 1.5, 0.5, 1.5, 0.5]), torch.tensor([2.0, 2.0, 2.0, -2.0, -2.0])
    assert ppo_clip(ratio, advantage, **BOUNDS).tolist() == pytest.approx([-2.0, -2.6, -1.0, 3.0, 1.6])


def test_dual_clip_bounds_the_loss_of_negative_advantages_only():
    ratio, advantage = torch.tensor([5.0, 2.9, 5.0, 0.5]), torch.tensor([-2.0, -2.0, 2.0, -2.0])
    assert ppo_clip(ratio, advantage, **BOUNDS, dual_clip=3.0).tolist() == pytest.approx([6.0, 5.8, -2.6, 1.6])


@pytest.mark.parametrize("dual_clip", [1.0, 0.5, float("nan")])
def test_a_dual_clip_that_is_not_above_one_is_refused(dual_clip):
    with pytest.raises(ValueError, match="dual_clip must be > 1"):
        ppo_clip(torch.ones(1), torch.ones(1), **BOUNDS, dual_clip=dual_clip)


def test_the_two_sided_clip_is_the_dual_clip():
    torch.manual_seed(0)
    ratio, advantage, delta = (2 * torch.randn(200)).exp(), -torch.rand(200), 4.0
    two_sided = -torch.minimum(ratio.clamp(max=delta) * advantage, ratio.clamp(0.8, 1.3) * advantage)
    assert ppo_clip(ratio, advantage, **BOUNDS, dual_clip=delta).equal(two_sided)


@pytest.mark.parametrize("dual_clip", [None, 1.9])
@pytest.mark.parametrize("sign", [1.0, 0.0, -1.0])
def test_ppo_clip_has_no_gradient_exactly_where_it_is_clipped(sign, dual_clip):
    ratio = torch.tensor([0.5, 0.79, 0.81, 1.0, 1.29, 1.31, 2.0])
    advantages, bounds = torch.full_like(ratio, sign), {**BOUNDS, "dual_clip": dual_clip}
    idle = idle_tokens(partial(of_ratio(ppo_clip, **bounds), advantages=advantages), ratio.log(), advantages)
    is_too_high, is_too_low = ratio > 1.3, (ratio < 0.8) | (ratio > (dual_clip or torch.inf))
    assert idle.equal(is_too_high if sign > 0 else is_too_low & (sign < 0))
    assert idle.any() == (sign != 0)


def test_reinforce_by_hand():
    assert reinforce(torch.tensor([-0.5, -2.0]), torch.tensor([1.0, -3.0])).tolist() == pytest.approx([0.5, -6.0])


def test_sapo_by_hand():
    losses = LOSSES["sapo"](logs(1, 2, 2), wide(1, 1, -1))
    negative = 4 / 1.05 / (1 + math.exp(-1.05))
    assert losses.tolist() == pytest.approx([-2.0, -4 / (1 + math.exp(-1)), negative])


def test_dro_by_hand():
    log_ratio, advantages = wide(0.5, -0.5, 0.0), wide(2, 2, -1)
    assert checked["dro"](log_ratio, advantages, beta=0.4).tolist() == pytest.approx([-0.95, 1.05, 0.0])


def test_kl_cov_penalises_the_chosen_tokens_only():
    log_ratio, penalised = logs(2, 2, 0.5), torch.tensor([True, False, True])
    losses = checked["kl_cov"](log_ratio, wide(1, 1, -1), penalised, coefficient=0.1)
    assert losses.tolist() == pytest.approx([-2 + 0.1 * math.log(2), -2.0, 0.5 + 0.1 * math.log(2)])


# The factor in front of A * grad log pi, at ratios 0.25, 0.7, 1, 1.25, 1.5 and 25, for A > 0 and A < 0.
FACTORS = {
    "ppo_clip": [(0.25, 0.7, 1, 1.25, 0, 0), (0, 0, 1, 1.25, 1.5, 25)],
    "dual_clip": [(0.25, 0.7, 1, 1.25, 0, 0), (0, 0, 1, 1.25, 1.5, 0)],
    "reinforce": [(1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 1, 1)],
    "unclipped": [(0.25, 0.7, 1, 1.25, 1.5, 25), (0.25, 0.7, 1, 1.25, 1.5, 25)],
    "cispo": [(0.8, 0.8, 1, 1.25, 1.3, 1.3), (0.8, 0.8, 1, 1.25, 1.3, 1.3)],
    "topr_token": [(1, 1, 1, 1, 1, 1), (0.25, 0.7, 1, 1, 1, 1)],
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
        idle = idle_tokens(partial(LOSSES[name], advantages=advantages), log_ratio, advantages)
        assert idle.tolist() == [factor == 0 for factor in factors]


def test_cispo_without_a_lower_bound_only_truncates():
    loss = partial(checked["cispo"], clip_low=None, clip_high=5.0)
    assert gradient_of(loss, logs(0.01, 1, 7), wide(-1, -1, -1)).tolist() == pytest.approx([0.01, 1, 6])


@pytest.mark.parametrize(("name", "bound"), [("dppo_tv", 0.15), ("dppo_kl", 0.05)])
def test_dppo_measures_probabilities_and_not_ratios(name, bound):
    learner, anchor = wide(1e-3, 0.8), wide(1e-4, 0.99)
    settings = {"learner_logprobs": learner.log(), "low": bound, "high": bound, "ratio_cap": 5.0}
    gradient = gradient_of(partial(checked[name], **settings), learner.log() - anchor.log(), wide(1, -1))
    assert gradient.tolist() == [-5.0, 0.0]


def test_dppo_stops_only_what_moves_away():
    log_ratio = logs(1.5, 1.5, 0.5, 0.5, 1.3, 0.9)
    advantages = wide(1, -1, -1, 1, 1, -1)
    for name in ("dppo_tv", "dppo_kl"):
        idle = idle_tokens(partial(LOSSES[name], advantages=advantages), log_ratio, advantages)
        assert idle.tolist() == [True, False, True, False, False, False]


def test_the_binary_kl_is_that_of_two_coins():
    anchor, learner = torch.distributions.Bernoulli(wide(0.5)), torch.distributions.Bernoulli(wide(0.7))
    bound = float(torch.distributions.kl_divergence(anchor, learner))
    log_ratio, advantages, logprobs = logs(1.4), wide(1), logs(0.7)
    for high, expected in ((bound * 0.999, True), (bound * 1.001, False)):
        loss = partial(checked["dppo_kl"], advantages=advantages, learner_logprobs=logprobs, low=bound, high=high)
        assert idle_tokens(loss, log_ratio, advantages).tolist() == [expected]


@every_loss
def test_at_ratio_one_the_gradient_is_that_of_reinforce(loss):
    torch.manual_seed(0)
    advantages = torch.randn(50, dtype=torch.float64)
    gradient = gradient_of(loss, torch.zeros_like(advantages), advantages)
    assert torch.allclose(gradient, -advantages, atol=1e-12)
    assert not idle_tokens(partial(loss, advantages=advantages), torch.zeros_like(advantages), advantages).any()


def test_at_ratio_one_ppo_is_reinforce_bit_for_bit():
    torch.manual_seed(0)
    logprobs, advantage = (-torch.rand(8)).requires_grad_(), torch.randn(8)
    ratio = importance.token_ratio(logprobs, logprobs.detach())
    (ppo,) = torch.autograd.grad(ppo_clip(ratio, advantage, **BOUNDS).sum(), logprobs)
    (score,) = torch.autograd.grad(reinforce(logprobs, advantage).sum(), logprobs)
    assert ppo.equal(score)


@pytest.mark.parametrize("name", ["ppo_clip", "dual_clip", "reinforce", "unclipped", "kl_cov", "sapo", "dro"])
def test_the_gradients_are_those_of_the_formulas(name):
    # Away from the kinks at ratios 0.8, 1, 1.3 and 3.
    log_ratio = logs(0.3, 0.7, 0.9, 1.1, 1.2, 1.4, 2.0, 3.5).repeat(2).requires_grad_()
    advantages = torch.linspace(-2, 1.9, 16, dtype=torch.float64)
    assert torch.autograd.gradcheck(partial(LOSSES[name], advantages=advantages), log_ratio)


@every_loss
def test_another_token_changes_nothing(loss):
    advantages, log_ratio = wide(1, -1, 2, -2), logs(1.1, 0.9, 0.7, 1.2)
    poisoned_ratio, poisoned_advantages = log_ratio.clone(), advantages.clone()
    poisoned_ratio[3], poisoned_advantages[3] = 20.0, 1e30
    assert loss(log_ratio, advantages)[:3].equal(loss(poisoned_ratio, poisoned_advantages)[:3])
    before, after = gradient_of(loss, log_ratio, advantages), gradient_of(loss, poisoned_ratio, poisoned_advantages)
    assert before[:3].equal(after[:3])


@every_loss
def test_a_ratio_at_the_bounds_of_the_clamp_is_finite(loss):
    log_ratio, advantages = torch.tensor([20.0, 20.0, -20.0, -20.0]), torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert loss(log_ratio, advantages).isfinite().all()
    assert gradient_of(loss, log_ratio, advantages).isfinite().all()


@every_loss
def test_no_tokens_have_no_losses(loss):
    assert loss(wide(), wide()).shape == (0,)
    assert idle_tokens(partial(loss, advantages=wide()), wide(), wide()).shape == (0,)


def test_a_token_without_advantage_is_not_idle_and_no_gradient_mode_is_overridden():
    log_ratio, advantages = logs(2, 2), wide(1, 0)
    with torch.no_grad():
        idle = idle_tokens(partial(LOSSES["ppo_clip"], advantages=advantages), log_ratio, advantages)
    assert idle.tolist() == [True, False]
    assert not log_ratio.requires_grad
