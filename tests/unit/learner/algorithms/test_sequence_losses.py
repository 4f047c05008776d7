import math
from functools import partial

import pytest
import torch

from slipstream.learner.algorithms import policy_losses
from tests.unit.learner.inputs import checked, find_idle, loss_inputs, whole, wide

BOUNDS = {"clip_low": 0.2, "clip_high": 0.3}
gspo = checked(policy_losses.gspo)
FORMULAS = {
    "gspo": partial(gspo, **BOUNDS),
    "gspo_token": partial(gspo, **BOUNDS, form="token"),
    "luspo": partial(gspo, **BOUNDS, form="length_scaled"),
    "gmpo": partial(checked(policy_losses.gmpo), clip_low=0.4, clip_high=0.4),
    "topr": checked(policy_losses.topr),
    "topr_token": partial(checked(policy_losses.topr), level="token"),
    "vespo": checked(policy_losses.vespo),
}


def over_tokens(formula):
    return lambda log_ratio, advantages, sequences=None, num_sequences=3: formula(
        loss_inputs(log_ratio, advantages, SEQUENCES if sequences is None else sequences, num_sequences)
    )


LOSSES = {name: over_tokens(formula) for name, formula in FORMULAS.items()}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)

# Three sequences of 2, 3 and 1 tokens.
SEQUENCES = torch.tensor([0, 0, 1, 1, 1, 2])


def of(*per_sequence: float) -> torch.Tensor:
    return wide(*per_sequence)[SEQUENCES]


def random_log_ratio(scale: float = 0.3) -> torch.Tensor:
    return scale * torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def gradient_of(loss, log_ratio, advantages, sequences=SEQUENCES, num_sequences=3, weights=1.0):
    leaf = log_ratio.detach().requires_grad_()
    losses = loss(leaf, advantages, sequences, num_sequences)
    return torch.autograd.grad((weights * losses).sum(), leaf)[0]


def idle(name, log_ratio, advantages):
    return find_idle(FORMULAS[name], loss_inputs(log_ratio, advantages, SEQUENCES, 3)).tolist()


def test_gspo_by_hand():
    log_ratio = wide(0.3, -0.1, 0.6, 0.3, 0.0, -0.5)
    losses = LOSSES["gspo"](log_ratio, of(2, 1, -1))
    ratios = [math.exp(0.1), 1.3, 0.8]
    assert losses.tolist() == pytest.approx([-2 * ratios[0]] * 2 + [-1.3] * 3 + [ratios[2]])


def test_gspo_clips_a_whole_sequence_or_none_of_it():
    log_ratio, advantages = wide(0.3, -0.1, 0.6, 0.3, 0.0, -0.5), of(2, 1, -1)
    for name in ("gspo", "gspo_token", "luspo"):
        assert idle(name, log_ratio, advantages) == [False] * 2 + [True] * 4


def test_gspo_does_not_change_when_a_sequence_is_said_twice():
    log_ratio = wide(0.3, -0.1, 0.05)
    single = LOSSES["gspo"](log_ratio, wide(1, 1, 1), whole(0, 0, 0), 1)
    double = LOSSES["gspo"](log_ratio.repeat(2), wide(1, 1, 1, 1, 1, 1), whole(0, 0, 0, 0, 0, 0), 1)
    assert torch.allclose(double, single[:1].expand(6))


def test_luspo_has_the_gradient_of_gspo_times_the_length():
    advantages = of(1, -2, 3)
    lengths = of(2, 3, 1)
    plain = gradient_of(LOSSES["gspo"], 0.1 * random_log_ratio(), advantages)
    scaled = gradient_of(LOSSES["luspo"], 0.1 * random_log_ratio(), advantages)
    assert torch.allclose(scaled, lengths * plain)


def test_gspo_token_is_gspo_where_advantages_are_equal():
    log_ratio, advantages = random_log_ratio(), of(1, -2, 3)
    values = [LOSSES[name](log_ratio, advantages) for name in ("gspo", "gspo_token")]
    gradients = [gradient_of(LOSSES[name], log_ratio, advantages) for name in ("gspo", "gspo_token")]
    assert torch.allclose(*values)
    assert torch.allclose(*gradients)


def test_gspo_token_gives_each_token_its_own_advantage():
    log_ratio, advantages = wide(0.2, 0.0, 0.1), wide(1, -2, 3)
    gradient = gradient_of(LOSSES["gspo_token"], log_ratio, advantages, torch.zeros(3, dtype=torch.int64), 1)
    assert torch.allclose(gradient, -math.exp(0.1) * advantages)


def test_gmpo_clips_each_token_on_one_side_before_the_mean():
    log_ratio, advantages = wide(1.0, -1.0, 1.0, -1.0, 0.1, 2.0), of(1, -2, 3)
    losses = LOSSES["gmpo"](log_ratio, advantages)
    means = [(0.4 - 1.0) / 2, (1.0 - 0.4 + 0.1) / 3, 0.4]
    expected = [-math.exp(means[0])] * 2 + [2 * math.exp(means[1])] * 3 + [-3 * math.exp(means[2])]
    assert losses.tolist() == pytest.approx(expected)
    assert idle("gmpo", log_ratio, advantages) == [True, False, False, True, False, True]


def test_topr_tapers_sequences_of_negative_advantage_by_their_whole_ratio():
    log_ratio = wide(-2.0, 0.5, 0.3, -0.2, -0.6, 1.0)
    positive = gradient_of(LOSSES["topr"], log_ratio, of(1, 2, 3))
    negative = gradient_of(LOSSES["topr"], log_ratio, of(-1, -2, -3))
    assert positive.tolist() == pytest.approx((-of(1, 2, 3)).tolist())
    assert negative.tolist() == pytest.approx(of(math.exp(-1.5), 2 * math.exp(-0.5), 3).tolist())


def test_topr_of_tokens_tapers_each_by_its_own_ratio():
    log_ratio, ratios = wide(0.25, 0.7, 1, 1.25, 1.5, 25).log(), wide(0.25, 0.7, 1, 1, 1, 1)
    assert torch.allclose(gradient_of(LOSSES["topr_token"], log_ratio, of(2, 2, 2)), torch.full_like(ratios, -2))
    assert torch.allclose(gradient_of(LOSSES["topr_token"], log_ratio, of(-2, -2, -2)), 2 * ratios)


def phi(ratio: float, power: float, decay: float) -> float:
    return ratio**power * math.exp(decay * (1 - ratio))


def test_vespo_by_hand():
    log_ratio = wide(0.5, 0.2, -0.3, -0.2, 0.1, 0.0)
    gradient = gradient_of(LOSSES["vespo"], log_ratio, of(1, -2, 3))
    expected = of(-phi(math.exp(0.7), 2, 3), 2 * phi(math.exp(-0.4), 3, 2), -3)
    assert gradient.tolist() == pytest.approx(expected.tolist())


@pytest.mark.parametrize(("advantage", "peak"), [(1.0, 2 / 3), (-1.0, 3 / 2)])
def test_the_weight_of_vespo_peaks_at_power_over_decay(advantage, peak):
    log_ratio = (peak + wide(-0.01, 0, 0.01)).log()
    weights = gradient_of(LOSSES["vespo"], log_ratio, torch.full_like(log_ratio, advantage), torch.arange(3)).abs()
    assert weights.argmax() == 1


@every_loss
def test_at_ratio_one_the_gradient_is_that_of_reinforce(loss):
    advantages, lengths = of(1, -2, 3), of(2, 3, 1)
    # LUSPO is the one that undoes a mean over the sequence's tokens.
    weights = 1 / lengths if loss is LOSSES["luspo"] else 1.0
    gradient = gradient_of(loss, torch.zeros_like(advantages), advantages, weights=weights)
    assert torch.allclose(gradient, -advantages, atol=1e-12)


@pytest.mark.parametrize("name", ["gspo", "luspo", "gmpo"])
def test_the_gradients_are_those_of_the_formulas(name):
    log_ratio = random_log_ratio().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: LOSSES[name](x, of(1, -2, 3)), log_ratio)


@every_loss
def test_another_sequences_tokens_change_nothing(loss):
    log_ratio, advantages = random_log_ratio(), of(1, -2, 3)
    poisoned_ratio, poisoned_advantages = log_ratio.clone(), advantages.clone()
    poisoned_ratio[2:5], poisoned_advantages[2:5] = wide(20, -20, 20), 1e30
    others = torch.tensor([0, 1, 5])
    before = loss(log_ratio, advantages)
    after = loss(poisoned_ratio, poisoned_advantages)
    assert before[others].equal(after[others])
    gradients = gradient_of(loss, log_ratio, advantages), gradient_of(loss, poisoned_ratio, poisoned_advantages)
    assert gradients[0][others].equal(gradients[1][others])


@every_loss
def test_a_split_between_sequences_changes_nothing(loss):
    log_ratio, advantages = random_log_ratio(), of(1, -2, 3)
    whole = gradient_of(loss, log_ratio, advantages)
    first = gradient_of(loss, log_ratio[:2], advantages[:2], SEQUENCES[:2], 1)
    rest = gradient_of(loss, log_ratio[2:], advantages[2:], SEQUENCES[2:] - 1, 2)
    assert torch.allclose(whole, torch.cat([first, rest]), atol=1e-14)


@every_loss
def test_a_sequence_without_tokens_and_an_empty_batch_are_harmless(loss):
    log_ratio, advantages = random_log_ratio(), of(1, -2, 3)
    with_hole = loss(log_ratio, advantages, SEQUENCES + (SEQUENCES > 0), 5)
    assert with_hole.equal(loss(log_ratio, advantages))
    nothing = torch.zeros(0, dtype=torch.int64)
    assert loss(wide(), wide(), nothing, 0).shape == (0,)


@every_loss
@pytest.mark.parametrize("value", [20.0, -20.0])
def test_ratios_at_the_bounds_of_the_clamp_are_finite(loss, value):
    log_ratio, sequences = torch.full((1000,), value), torch.arange(2).repeat_interleave(500)
    advantages = torch.tensor([1.0, -1.0])[sequences]
    assert loss(log_ratio, advantages, sequences, 2).isfinite().all()
    assert gradient_of(loss, log_ratio, advantages, sequences, 2).isfinite().all()


# --- sppo: one number per sequence, from its win rate ----------------------------------------------------------------
def sppo(log_ratio, win_rates, *, eta):
    """Losses of sequences of one token."""
    return checked(policy_losses.sppo)(loss_inputs(log_ratio, win_rates - 0.5), eta=eta)


def test_sppo_by_hand():
    assert sppo(wide(0, 1, -2), wide(0.5, 1, 0.25), eta=4.0).tolist() == [0, 1, 1]


def test_sppo_compares_the_ratio_of_the_whole_sequence_at_each_of_its_tokens():
    losses = policy_losses.sppo(loss_inputs(wide(0.5, 1, -1), wide(0.5, 0.5, -0.5), whole(0, 0, 1)), eta=2.0)
    assert losses.tolist() == [0.25, 0.25, 0]


def test_sppo_at_ratio_one_has_the_gradient_of_reinforce_with_the_win_rate():
    log_ratio, win_rates = torch.zeros(4, dtype=torch.float64, requires_grad=True), wide(0, 0.5, 0.75, 1)
    (gradient,) = torch.autograd.grad(sppo(log_ratio, win_rates, eta=3.0).sum(), log_ratio)
    assert gradient.tolist() == (-2 * 3.0 * (win_rates - 0.5)).tolist()


def test_the_hard_form_of_sppo_pulls_chosen_and_rejected_to_either_side():
    beta, log_ratio = 0.1, wide(0.7, -0.3)
    hard = (log_ratio - torch.tensor([0.5, -0.5]) / beta).square()
    assert torch.allclose(sppo(log_ratio, wide(1, 0), eta=1 / beta), hard)
