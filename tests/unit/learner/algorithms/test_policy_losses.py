import math
from functools import partial
from typing import get_args, get_type_hints

import pytest
import torch

from slipstream.configs.algorithm import AlgorithmConfig
from slipstream.learner.algorithms import find, policy_losses
from slipstream.learner.algorithms.inputs import AggregationInputs, MaskInputs
from tests.cases import cases
from tests.unit.learner.inputs import POLICY_LOSSES as LOSSES
from tests.unit.learner.inputs import checked, find_idle, loss_inputs, whole, wide

every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
SEQUENCES = torch.tensor([0, 0, 1, 1, 1, 2])
"""Three sequences of 2, 3, and 1 tokens."""


def logs(*ratios: float) -> torch.Tensor:
    return wide(*ratios).log()


def of(*per_sequence: float) -> torch.Tensor:
    return wide(*per_sequence)[SEQUENCES]


def random_log_ratio() -> torch.Tensor:
    return 0.3 * torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def inputs_of(log_ratio, advantages, sequences=None, num_sequences=None, **columns):
    """All tokens are selected. Without `sequences`, each token is a sequence."""
    columns = {"is_selected": torch.ones_like(log_ratio, dtype=torch.bool)} | columns
    return loss_inputs(log_ratio, advantages, sequences, num_sequences, **columns)


def losses_of(loss, *inputs, **columns):
    return loss(inputs_of(*inputs, **columns))


def gradient_of(loss, log_ratio, *inputs, **columns):
    leaf = log_ratio.detach().requires_grad_()
    return torch.autograd.grad(losses_of(loss, leaf, *inputs, **columns).sum(), leaf)[0]


def idle(loss, *inputs, **columns):
    return find_idle(loss, inputs_of(*inputs, **columns))


def test_losses_of_tokens_by_hand():
    losses = losses_of(LOSSES["ppo_clip"], logs(1.0, 1.5, 0.5, 1.5, 0.5), wide(2, 2, 2, -2, -2))
    assert losses.tolist() == pytest.approx([-2.0, -2.6, -1.0, 3.0, 1.6])
    losses = losses_of(LOSSES["dual_clip"], logs(5.0, 2.9, 5.0, 0.5), wide(-2, -2, 2, -2))
    assert losses.tolist() == pytest.approx([6.0, 5.8, -2.6, 1.6])
    losses = losses_of(LOSSES["reinforce"], wide(0, 0), wide(1.0, -3.0), learner_logprobs=wide(-0.5, -2.0))
    assert losses.tolist() == pytest.approx([0.5, -6.0])
    negative = 4 / 1.05 / (1 + math.exp(-1.05))
    losses = losses_of(LOSSES["sapo"], logs(1, 2, 2), wide(1, 1, -1))
    assert losses.tolist() == pytest.approx([-2.0, -4 / (1 + math.exp(-1)), negative])
    losses = losses_of(partial(policy_losses.dro, beta=0.4), wide(0.5, -0.5, 0.0), wide(2, 2, -1))
    assert losses.tolist() == pytest.approx([-0.95, 1.05, 0.0])
    is_selected = torch.tensor([True, False, True])
    columns = {"log_ratio": logs(2, 2, 0.5), "advantages": wide(1, 1, -1), "is_selected": is_selected}
    penalized = losses_of(partial(policy_losses.kl_cov, beta=0.1), **columns)
    assert penalized.tolist() == pytest.approx([-2 + 0.1 * math.log(2), -2.0, 0.5 + 0.1 * math.log(2)])
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
        found = gradient_of(LOSSES[name], log_ratio, advantages)
        assert found.tolist() == pytest.approx([-advantage * factor for factor in factors])
        assert idle(LOSSES[name], log_ratio, advantages).tolist() == [factor == 0 for factor in factors]


def test_a_token_without_advantage_is_not_idle_and_cispo_without_a_lower_bound_only_truncates():
    loss = partial(policy_losses.cispo, clip_low=None, clip_high=5.0)
    assert gradient_of(loss, logs(0.01, 1, 7), wide(-1, -1, -1)).tolist() == pytest.approx([0.01, 1, 6])
    log_ratio, advantages = logs(2, 2), wide(1, 0)
    with torch.no_grad():
        found = idle(LOSSES["ppo_clip"], log_ratio, advantages)
    assert found.tolist() == [True, False]
    assert not log_ratio.requires_grad


@pytest.mark.parametrize(("divergence", "bound"), [("tv", 0.15), ("kl", 0.05)])
def test_dppo_measures_probabilities_and_not_ratios(divergence, bound):
    learner, anchor = logs(1e-3, 0.8), logs(1e-4, 0.99)
    loss = partial(policy_losses.dppo, divergence=divergence, clip_low=bound, clip_high=bound, ratio_cap=5.0)
    assert gradient_of(loss, learner - anchor, wide(1, -1), learner_logprobs=learner).tolist() == [-5.0, 0.0]


def test_dppo_stops_only_what_moves_away_and_its_kl_is_that_of_two_coins():
    log_ratio, advantages = logs(1.5, 1.5, 0.5, 0.5, 1.3, 0.9), wide(1, -1, -1, 1, 1, -1)
    for name in ("dppo_tv", "dppo_kl"):
        assert idle(LOSSES[name], log_ratio, advantages).tolist() == [True, False, True, False, False, False]
    anchor, learner = torch.distributions.Bernoulli(wide(0.5)), torch.distributions.Bernoulli(wide(0.7))
    bound = float(torch.distributions.kl_divergence(anchor, learner))
    for high, expected in ((bound * 0.999, True), (bound * 1.001, False)):
        loss = partial(policy_losses.dppo, divergence="kl", clip_low=bound, clip_high=high)
        assert idle(loss, logs(1.4), wide(1), learner_logprobs=logs(0.7)).tolist() == [expected]


@pytest.mark.parametrize("name", ["kl_cov", "sapo", "dro"])
def test_the_gradients_are_those_of_the_formulas(name):
    log_ratio = logs(0.3, 0.7, 0.9, 1.1, 1.2, 1.4, 2.0, 3.5).repeat(2).requires_grad_()
    advantages = torch.linspace(-2, 1.9, 16, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: losses_of(LOSSES[name], x, advantages), log_ratio)


def test_gspo_clips_whole_sequences_luspo_scales_with_the_length_and_the_token_form_keeps_advantages():
    log_ratio, advantages = wide(0.3, -0.1, 0.6, 0.3, 0.0, -0.5), of(2, 1, -1)
    losses = losses_of(LOSSES["gspo"], log_ratio, advantages, SEQUENCES)
    assert losses.tolist() == pytest.approx([-2 * math.exp(0.1)] * 2 + [-1.3] * 3 + [0.8])
    for name in ("gspo", "gspo_token", "luspo"):
        assert idle(LOSSES[name], log_ratio, advantages, SEQUENCES).tolist() == [False] * 2 + [True] * 4, name
    inputs = 0.1 * random_log_ratio(), of(1, -2, 3), SEQUENCES
    plain, scaled = (gradient_of(LOSSES[name], *inputs) for name in ("gspo", "luspo"))
    assert torch.allclose(scaled, of(2, 3, 1) * plain)
    for compute in (losses_of, gradient_of):
        found = (compute(LOSSES[n], random_log_ratio(), of(1, -2, 3), SEQUENCES) for n in ("gspo", "gspo_token"))
        assert torch.allclose(*found), compute
    advantages = wide(1, -2, 3)
    gradient = gradient_of(LOSSES["gspo_token"], wide(0.2, 0.0, 0.1), advantages, whole(0, 0, 0), 1)
    assert torch.allclose(gradient, -math.exp(0.1) * advantages)


def test_gmpo_clips_tokens_on_one_side_and_topr_tapers_negative_advantages():
    log_ratio, advantages = wide(1.0, -1.0, 1.0, -1.0, 0.1, 2.0), of(1, -2, 3)
    losses = losses_of(LOSSES["gmpo"], log_ratio, advantages, SEQUENCES)
    means = [(0.4 - 1.0) / 2, (1.0 - 0.4 + 0.1) / 3, 0.4]
    expected = [-math.exp(means[0])] * 2 + [2 * math.exp(means[1])] * 3 + [-3 * math.exp(means[2])]
    assert losses.tolist() == pytest.approx(expected)
    assert idle(LOSSES["gmpo"], log_ratio, advantages, SEQUENCES).tolist() == [True, False, False, True, False, True]
    log_ratio = wide(-2.0, 0.5, 0.3, -0.2, -0.6, 1.0)
    positive = gradient_of(LOSSES["topr"], log_ratio, of(1, 2, 3), SEQUENCES)
    negative = gradient_of(LOSSES["topr"], log_ratio, of(-1, -2, -3), SEQUENCES)
    assert positive.tolist() == pytest.approx((-of(1, 2, 3)).tolist())
    assert negative.tolist() == pytest.approx(of(math.exp(-1.5), 2 * math.exp(-0.5), 3).tolist())


def test_vespo_and_sppo_by_hand():
    def phi(ratio, power, decay):
        return ratio**power * math.exp(decay * (1 - ratio))

    log_ratio = wide(0.5, 0.2, -0.3, -0.2, 0.1, 0.0)
    gradient = gradient_of(LOSSES["vespo"], log_ratio, of(1, -2, 3), SEQUENCES)
    expected = of(-phi(math.exp(0.7), 2, 3), 2 * phi(math.exp(-0.4), 3, 2), -3)
    assert gradient.tolist() == pytest.approx(expected.tolist())
    for advantage, peak in ((1.0, 2 / 3), (-1.0, 3 / 2)):
        log_ratio = (peak + wide(-0.01, 0, 0.01)).log()
        weights = gradient_of(LOSSES["vespo"], log_ratio, wide(*[advantage] * 3))
        assert weights.abs().argmax() == 1, advantage
    assert sppo(wide(0, 1, -2), wide(0.5, 1, 0.25), eta=4.0).tolist() == [0, 1, 1]
    losses = policy_losses.sppo(loss_inputs(wide(0.5, 1, -1), wide(0.5, 0.5, -0.5), whole(0, 0, 1)), eta=2.0)
    assert losses.tolist() == [0.25, 0.25, 0]
    log_ratio, win_rates = torch.zeros(4, dtype=torch.float64, requires_grad=True), wide(0, 0.5, 0.75, 1)
    (gradient,) = torch.autograd.grad(sppo(log_ratio, win_rates, eta=3.0).sum(), log_ratio)
    assert gradient.tolist() == (-2 * 3.0 * (win_rates - 0.5)).tolist()


@every_loss
def test_at_ratio_one_no_token_is_idle_and_sequences_without_tokens_change_nothing(loss):
    log_ratio, advantages = random_log_ratio(), of(1, -2, 3)
    assert not idle(loss, torch.zeros_like(advantages), advantages, SEQUENCES).any()
    with_hole = losses_of(loss, log_ratio, advantages, SEQUENCES + (SEQUENCES > 0), 5)
    assert with_hole.equal(losses_of(loss, log_ratio, advantages, SEQUENCES))
    nothing = torch.zeros(0, dtype=torch.int64)
    assert losses_of(loss, wide(), wide(), nothing, 0).shape == (0,)
    assert idle(loss, wide(), wide(), nothing, 0).shape == (0,)


@every_loss
@pytest.mark.parametrize("value", [20.0, -20.0])
def test_ratios_at_the_bounds_of_the_clamp_are_finite(loss, value):
    log_ratio, sequences = torch.full((1000,), value), torch.arange(2).repeat_interleave(500)
    advantages = torch.tensor([1.0, -1.0])[sequences]
    assert losses_of(loss, log_ratio, advantages, sequences, 2).isfinite().all()
    assert gradient_of(loss, log_ratio, advantages, sequences, 2).isfinite().all()


def sppo(log_ratio, win_rates, *, eta):
    return checked(policy_losses.sppo)(loss_inputs(log_ratio, win_rates - 0.5), eta=eta)


COUNTS = torch.tensor([2, 0, 6])
LENGTH = 4


def weighing(name):
    """Two trajectories per prompt, unless `groups` says otherwise."""

    def weigh(counts, groups=None):
        groups = torch.arange(len(counts)) // 2 if groups is None else groups
        return checked(find(f"policy_losses.{name}"))(AggregationInputs(counts, groups, LENGTH))

    return weigh


WEIGH = {name: weighing(name) for name in get_args(get_type_hints(AlgorithmConfig)["loss_aggregation"])}


def test_aggregation_weights_by_hand_and_prompts_count_the_same():
    weights = {name: weigh(COUNTS).tolist() for name, weigh in WEIGH.items()}
    assert weights["token_mean"] == pytest.approx([1 / 8, 0, 1 / 8])
    assert weights["token_sum"] == [1, 0, 1]
    assert weights["seq_mean_token_mean"] == pytest.approx([1 / 4, 0, 1 / 12])
    assert weights["seq_mean_token_sum"] == pytest.approx([1 / 2, 0, 1 / 2])
    assert weights["seq_mean_token_sum_norm"] == pytest.approx([1 / 8, 0, 1 / 8])
    assert weights["prompt_mean"] == pytest.approx([1 / 4, 0, 1 / 12])
    counts, groups = torch.tensor([1, 3, 5, 1, 0]), torch.tensor([2, 2, 0, 2, 3])
    weights = WEIGH["prompt_mean"](counts, groups)
    assert weights.tolist() == pytest.approx([1 / 10, 1 / 10, 1 / 10, 1 / 10, 0])
    per_prompt = torch.zeros(4, dtype=torch.float64).index_add(0, groups, weights * counts)
    assert per_prompt.tolist() == pytest.approx([1 / 2, 0, 1 / 2, 0])


@pytest.mark.parametrize("weigh", WEIGH.values(), ids=WEIGH)
def test_without_a_token_an_update_weighs_nothing_and_a_sequence_changes_no_weight(weigh):
    assert weigh(torch.tensor([0, 0])).tolist() == [0.0, 0.0]
    assert weigh(torch.zeros(0, dtype=torch.int64)).shape == (0,)
    with_empty = weigh(torch.tensor([2, 3, 1, 6, 0, 0]))
    assert with_empty[:4].equal(weigh(torch.tensor([2, 3, 1, 6])))


def mask_inputs(log_ratio, advantages, *, sequences=None, learner_logprobs=None, is_counted=None, seed=0):
    sequences = torch.zeros(len(log_ratio), dtype=torch.int64) if sequences is None else sequences
    is_counted = torch.ones(len(log_ratio), dtype=torch.bool) if is_counted is None else is_counted
    learner_logprobs = log_ratio if learner_logprobs is None else learner_logprobs
    num_sequences = int(sequences.max()) + 1 if len(sequences) else 0
    return MaskInputs(log_ratio, advantages, learner_logprobs, sequences, num_sequences, is_counted, seed)


def m2po(log_ratio, advantages, *, threshold, **columns):
    return checked(policy_losses.m2po)(mask_inputs(log_ratio, advantages, **columns), threshold=threshold)


def opsm(log_ratio, advantages, sequences, *, delta):
    return checked(policy_losses.opsm)(mask_inputs(log_ratio, advantages, sequences=sequences), delta=delta)


def covariance(advantages, logprobs, **columns):
    inputs = mask_inputs(torch.zeros_like(logprobs), advantages, learner_logprobs=logprobs, **columns)
    return checked(policy_losses.covariance)(inputs)


def rising(count, **columns):
    """Tokens with covariances 0, 1, 4, 9, ... and a last token that makes both means 0."""
    values = torch.arange(count).double()
    values = torch.cat([values, -values.sum()[None]])
    return mask_inputs(torch.zeros_like(values), values, learner_logprobs=values, **columns)


def dropped(mask: torch.Tensor) -> list[int]:
    return (~mask).nonzero().flatten().tolist()


@cases(
    "log_ratio, advantages, threshold, expected",
    ((3, -2, 1, 0), (1, -1, -1, 1), math.inf, []),
    ((3, -2, 1, 0), (1, -1, -1, 1), 0.0, [0, 1]),
    # Only tokens that move away with their advantage are candidates.
    ((3, -3, 3, -3, 3), (1, 1, -1, -1, 0), 0.04, [0, 3]),
    # The mean is over the candidates left. Squares .25, .01, .16, .01: means of the smallest .01, .01, .06, .1075.
    *(
        ((0.5, 0.1, 0.4, 0.1), (1, 1, 1, 1), threshold, expected)
        for threshold, expected in ((0.11, []), (0.1, [0]), (0.07, [0]), (0.05, [0, 2]), (0.005, [0, 1, 2, 3]))
    ),
    # A mean equal to the threshold is kept.
    ((0.5, 0.5), (1, 1), 0.25, []),
)
def test_m2po_by_hand(log_ratio, advantages, threshold, expected):
    assert dropped(m2po(wide(*log_ratio), wide(*advantages), threshold=threshold)) == expected


def test_covariances_are_zero_where_not_finite():
    generator = torch.Generator().manual_seed(0)
    advantages, logprobs = torch.randn(2, 100, generator=generator, dtype=torch.float64).unbind()
    expected = torch.cov(torch.stack([advantages, logprobs]), correction=0)[0, 1]
    assert float(covariance(advantages, logprobs).mean()) == pytest.approx(float(expected))
    values = covariance(wide(1, -1, 5, -5), wide(-1, -3, -math.inf, math.nan))
    assert values.tolist() == [1.0, 1.0, 0.0, 0.0]


def test_opsm_drops_drifted_sequences_of_negative_advantage():
    sequences = torch.tensor([0, 0, 1, 1, 2, 2, 3])
    log_ratio = wide(-1.0, -0.2, -1.0, -0.2, -1.0, 0.1, 9.0)
    advantages = wide(-1, -1, 1, 1, -1, -1, -1)
    mask = opsm(log_ratio, advantages, sequences, delta=0.5)
    assert dropped(mask) == [0, 1]
    assert dropped(opsm(log_ratio, advantages, sequences, delta=0.4)) == [0, 1, 4, 5]


def clip_cov_mask(inputs, *, fraction, low, high):
    return checked(policy_losses.clip_cov_mask)(inputs, fraction=fraction, covariance_low=low, covariance_high=high)


def test_clip_cov_draws_its_share_within_the_bounds_repeatably_and_leaves_the_global_random_state_alone():
    # The covariances are 0, 1, 4, 9, ... of the first hundred tokens, and one very large.
    mask = clip_cov_mask(rising(100), fraction=0.05, low=100.0, high=2500.0)
    assert len(dropped(mask)) == 5
    assert all(10 <= i <= 50 for i in dropped(mask))
    assert dropped(clip_cov_mask(rising(4), fraction=0.9, low=1.0, high=4.0)) == [1, 2]
    before = torch.get_rng_state()
    masks = [clip_cov_mask(rising(100, seed=seed), fraction=0.1, low=0.0, high=1e4) for seed in (0, 0, 1)]
    assert masks[0].equal(masks[1])
    assert not masks[0].equal(masks[2])
    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize("fraction", [2e-4, 0.19])
def test_clip_cov_and_kl_cov_take_one_token_where_their_share_is_less_than_one(fraction):
    assert len(dropped(clip_cov_mask(rising(4), fraction=fraction, low=1.0, high=4.0))) == 1
    assert checked(policy_losses.kl_cov_mask)(rising(4), fraction=fraction).nonzero().flatten().tolist() == [4]


def test_kl_cov_takes_the_top_share_and_the_earlier_of_equals_and_none_of_no_candidates():
    assert dropped(clip_cov_mask(rising(4), fraction=2e-4, low=500.0, high=600.0)) == []
    assert dropped(clip_cov_mask(rising(4), fraction=0.0, low=1.0, high=4.0)) == []
    assert not checked(policy_losses.kl_cov_mask)(rising(4), fraction=0.0).any()
    none_counted = mask_inputs(wide(1, 2), wide(1, 2), is_counted=torch.tensor([False, False]))
    assert not checked(policy_losses.kl_cov_mask)(none_counted, fraction=0.5).any()
    kl_cov_mask = checked(policy_losses.kl_cov_mask)
    assert kl_cov_mask(rising(4), fraction=0.4).nonzero().flatten().tolist() == [3, 4]
    equal = mask_inputs(wide(3, 3, -6), wide(3, 3, -6), learner_logprobs=wide(3, 3, -6))
    assert kl_cov_mask(equal, fraction=0.7).tolist() == [True, False, True]
    assert kl_cov_mask(equal, fraction=0.3).tolist() == [False, False, True]


def test_tokens_that_the_correction_rejects_take_no_share_and_move_no_mean():
    is_counted = torch.tensor([True, False, True, True])
    assert dropped(m2po(wide(0.1, 9, 0.1, 0.3), wide(1, 1, 1, 1), threshold=0.02, is_counted=is_counted)) == [3]
    values = covariance(wide(1, 50, -1, 0), wide(-1, 70, -3, -2), is_counted=is_counted)
    assert values[[0, 2, 3]].tolist() == [1.0, 1.0, 0.0]
    values = wide(1, 50, -1, 0)
    inputs = mask_inputs(wide(0, 0, 0, 0), values, learner_logprobs=values, is_counted=is_counted)
    assert policy_losses.kl_cov_mask(inputs, fraction=0.4).tolist() == [True, False, False, False]
