import math

import pytest
import torch

from slipstream.learner.algorithms import importance
from slipstream.learner.algorithms.inputs import RatioInputs
from tests.unit.learner.inputs import checked, over_ratios

token_ratio = checked(importance.token_ratio)
token_log_ratio = checked(importance.token_log_ratio)
truncate = checked(importance.truncate)
mask = checked(importance.mask)
normalize = checked(importance.normalize)
effective_sample_size = checked(importance.effective_sample_size)
interpolation, loglinear = checked(importance.interpolation), checked(importance.loglinear)
LEVELS = {name: over_ratios(level) for name, level in importance.LEVELS.items()}

LOG_RATIO = torch.tensor([math.log(2), math.log(3), math.log(0.5), 0.0])
SEQUENCES = torch.tensor([0, 0, 2, 2])
NO_TOKENS = torch.zeros(0), torch.zeros(0, dtype=torch.int64)


def one_per_sequence(weights, sequences, *, num_sequences):
    return checked(importance.one_per_sequence)(weights, RatioInputs(weights, sequences, num_sequences))


def test_the_ratio_is_that_of_the_probabilities():
    numerator, denominator = torch.tensor([0.5, 0.1]).log(), torch.tensor([0.25, 0.4]).log()
    assert token_ratio(numerator, denominator).tolist() == pytest.approx([2.0, 0.25])


def test_the_ratio_of_equal_policies_is_exactly_one():
    logprobs = torch.tensor([-0.3, -17.0, -1e-9])
    assert token_ratio(logprobs, logprobs).tolist() == [1.0, 1.0, 1.0]


def test_the_log_ratio_is_clamped():
    ratio = token_ratio(torch.tensor([0.0, -90.0]), torch.tensor([-90.0, 0.0]))
    assert ratio.tolist() == pytest.approx([math.exp(20), math.exp(-20)])


def test_the_clamp_bounds_the_value_and_not_the_gradient():
    learner = torch.tensor([-90.0, -25.0, -3.0, 0.0], requires_grad=True)
    log_ratio = token_log_ratio(learner, torch.tensor([0.0, 0.0, -1.0, -90.0]))
    log_ratio.sum().backward()
    assert log_ratio.tolist() == [-20.0, -20.0, -2.0, 20.0]
    assert learner.grad.tolist() == [1.0] * 4


def test_what_is_not_finite_becomes_neutral_and_is_counted():
    numerator = torch.tensor([float("nan"), -1.0, float("-inf"), -1.0])
    denominator = torch.tensor([-1.0, float("inf"), -1.0, -1.0])
    assert token_ratio(numerator, denominator).tolist() == [1.0] * 4
    assert importance.nonfinite(numerator, denominator).tolist() == [True, True, True, False]


def test_what_is_not_finite_has_no_gradient_and_spoils_no_other():
    numerator = torch.tensor([float("nan"), -1.0], requires_grad=True)
    token_log_ratio(numerator, torch.tensor([-1.0, -2.0])).sum().backward()
    assert numerator.grad.tolist() == [0.0, 1.0]


def test_half_precision_is_widened_before_the_subtraction_and_double_is_kept():
    half, double = torch.tensor([-1.0]).bfloat16(), torch.tensor([-1.0], dtype=torch.float64)
    assert token_ratio(half, torch.tensor([-1.5]).bfloat16()).dtype == torch.float32
    assert token_ratio(double, double).dtype == torch.float64


def test_the_log_ratio_has_the_gradient_of_its_difference():
    torch.manual_seed(0)
    first, second = (-torch.rand(5, dtype=torch.float64).requires_grad_() for _ in range(2))
    assert torch.autograd.gradcheck(token_log_ratio, (first, second))


def test_levels_by_hand():
    values = {name: level(LOG_RATIO, SEQUENCES, num_sequences=3).tolist() for name, level in LEVELS.items()}
    assert values["token"] == pytest.approx([2, 3, 0.5, 1])
    assert values["sequence"] == pytest.approx([6, 6, 0.5, 0.5])
    assert values["geometric"] == pytest.approx([6**0.5, 6**0.5, 0.5**0.5, 0.5**0.5])


@pytest.mark.parametrize("level", LEVELS.values())
def test_every_level_of_equal_policies_weighs_exactly_one(level):
    assert level(torch.zeros(4), SEQUENCES, num_sequences=3).tolist() == [1.0] * 4


@pytest.mark.parametrize("level", LEVELS.values())
def test_no_tokens_have_no_weights(level):
    assert level(*NO_TOKENS, num_sequences=2).shape == (0,)


def test_the_product_of_many_ratios_is_clamped_and_their_mean_is_not():
    log_ratio, sequences = torch.full((1000,), math.log(1.1)), torch.zeros(1000, dtype=torch.int64)
    product = LEVELS["sequence"](log_ratio, sequences, num_sequences=1)
    mean = LEVELS["geometric"](log_ratio, sequences, num_sequences=1)
    assert product.tolist() == pytest.approx([math.exp(20)] * 1000)
    assert mean.tolist() == pytest.approx([1.1] * 1000, rel=1e-4)


def test_another_sequence_changes_no_weight():
    spoiled = torch.cat([LOG_RATIO[:2], torch.tensor([20.0, -7.0])])
    for level in LEVELS.values():
        before, after = (level(x, SEQUENCES, num_sequences=3)[:2] for x in (LOG_RATIO, spoiled))
        assert before.equal(after)


def test_truncation_is_from_above_by_default():
    weights = torch.tensor([0.01, 1.0, 5.0])
    assert truncate(weights, high=2.0).tolist() == pytest.approx([0.01, 1.0, 2.0])
    assert truncate(weights, high=2.0, low=0.5).tolist() == pytest.approx([0.5, 1.0, 2.0])


def test_a_mask_drops_both_tails_and_keeps_the_bounds():
    weights = torch.tensor([0.4, 0.5, 3.0, 5.0, 5.1])
    assert mask(weights, low=0.5, high=5.0).tolist() == [0, 0.5, 3, 5, 0]
    assert mask(weights).equal(weights)


def test_a_sequence_counts_once_and_an_empty_one_not_at_all():
    weights = torch.tensor([6.0, 6.0, 0.5, 0.5])
    assert one_per_sequence(weights, SEQUENCES, num_sequences=4).tolist() == [6, 0.5]
    assert one_per_sequence(*NO_TOKENS, num_sequences=3).shape == (0,)


def test_normalized_weights_have_the_mean_one_over_tokens_or_over_sequences():
    weights, sequences = torch.tensor([2.0, 2.0, 2.0, 1.0]), torch.tensor([0, 0, 0, 1])
    by_token = normalize(weights, mean=weights.mean())
    assert by_token.mean().item() == pytest.approx(1.0)
    by_sequence = normalize(weights, mean=one_per_sequence(weights, sequences, num_sequences=2).mean())
    assert by_sequence.tolist() == pytest.approx([4 / 3, 4 / 3, 4 / 3, 2 / 3])


def test_weights_that_are_all_zero_stay_as_they_are():
    assert normalize(torch.zeros(3), mean=torch.tensor(0.0)).tolist() == [0, 0, 0]
    assert normalize(torch.zeros(0), mean=torch.zeros(0).mean()).shape == (0,)


WEIGHERS = {
    **{name: lambda x, level=level: level(x, SEQUENCES, num_sequences=3) for name, level in LEVELS.items()},
    "truncate": lambda x: truncate(x, high=2.0, low=0.5),
    "mask": lambda x: mask(x, low=0.5, high=5.0),
    "normalize": lambda x: normalize(x, mean=x.mean()),
    "loglinear": lambda x: loglinear(x, x, alpha=torch.full((4,), 0.5)),
}


@pytest.mark.parametrize("name", WEIGHERS)
def test_weights_have_no_gradient(name):
    assert not WEIGHERS[name](torch.ones(4, requires_grad=True)).requires_grad


def test_the_effective_sample_size_lies_between_one_over_n_and_one():
    assert effective_sample_size(torch.full((5,), 0.3)).item() == pytest.approx(1.0)
    assert effective_sample_size(torch.tensor([1.0, 0, 0, 0])).item() == pytest.approx(0.25)
    assert effective_sample_size(torch.tensor([1.0, 2.0, 3.0, 4.0])).item() == pytest.approx(100 / 120)


@pytest.mark.parametrize("weights", [torch.zeros(4), torch.zeros(0)])
def test_the_effective_sample_size_of_nothing_is_zero(weights):
    assert effective_sample_size(weights).item() == 0.0


def test_the_effective_sample_size_of_sequences_does_not_depend_on_their_lengths():
    weights, sequences = torch.tensor([3.0] * 9 + [1.0]), torch.tensor([0] * 9 + [1])
    of_sequences = one_per_sequence(weights, sequences, num_sequences=2)
    assert effective_sample_size(of_sequences).item() == pytest.approx(16 / 20)
    assert effective_sample_size(weights).item() == pytest.approx(28**2 / (10 * 82))


def test_the_learning_rate_follows_the_root_of_the_sample_size():
    assert importance.ess_learning_rate_scale(1.0, floor=0.1) == 1.0
    assert importance.ess_learning_rate_scale(0.25, floor=0.1) == 0.5
    assert importance.ess_learning_rate_scale(0.25, power=1.0, floor=0.1) == 0.25


@pytest.mark.parametrize("ess", [0.0, 1e-9, -1.0, math.nan])
def test_the_learning_rate_never_falls_below_its_floor(ess):
    assert importance.ess_learning_rate_scale(ess, floor=0.1) == 0.1


def test_a_share_rounded_above_one_raises_nothing():
    assert importance.ess_learning_rate_scale(1.0000001, floor=0.0) == 1.0


# --- a proximal policy between generator and learner -----------------------------------------------------------------
GENERATOR, LEARNER = torch.tensor([0.2, 0.5, 0.9]).log(), torch.tensor([0.8, 0.4, 0.9]).log()


def test_the_share_by_hand():
    versions = torch.tensor([6, 7, 8, 9])
    assert interpolation(versions, proximal_version=9, learner_version=10).tolist() == pytest.approx(
        [3 / 4, 2 / 3, 1 / 2, 0]
    )
    assert interpolation(versions, proximal_version=8, learner_version=10).tolist() == pytest.approx(
        [2 / 4, 1 / 3, 0, 0]
    )


def test_both_ends_are_exact():
    assert loglinear(GENERATOR, LEARNER, alpha=torch.zeros(3)).equal(GENERATOR)
    assert loglinear(GENERATOR, LEARNER, alpha=torch.ones(3)).equal(LEARNER)


def test_the_middle_by_hand():
    half = torch.full((3,), 0.5)
    geometric = loglinear(GENERATOR, LEARNER, alpha=half).exp()
    assert geometric.tolist() == pytest.approx([0.4, 0.2**0.5, 0.9])


def test_drift_and_ratio_share_the_whole_log_ratio():
    alpha = torch.tensor([0.25, 0.5, 0.75])
    between = loglinear(GENERATOR, LEARNER, alpha=alpha)
    whole = importance.token_log_ratio(LEARNER, GENERATOR)
    assert torch.allclose(importance.token_log_ratio(between, GENERATOR), alpha * whole, atol=1e-6)
    assert torch.allclose(importance.token_log_ratio(LEARNER, between), (1 - alpha) * whole, atol=1e-6)


def test_what_is_not_finite_ends_as_a_neutral_ratio():
    broken = torch.tensor([float("nan"), float("-inf"), math.log(0.9)])
    between = loglinear(broken, LEARNER, alpha=torch.tensor([0.0, 0.0, 0.5]))
    assert importance.token_ratio(between, broken).isfinite().all()
    assert importance.token_ratio(between, broken).tolist() == pytest.approx([1, 1, 1])
