import itertools
import math

import pytest
import torch

from slipstream.learner.algorithms import find, importance
from slipstream.learner.algorithms.inputs import RatioInputs
from tests.unit.learner.inputs import checked, over_ratios

names = ("token_ratio", "token_log_ratio", "truncate", "mask", "normalize", "effective_sample_size")
FUNCTIONS = [checked(getattr(importance, name)) for name in names]
token_ratio, token_log_ratio, truncate, mask, normalize, effective_sample_size = FUNCTIONS
interpolation, loglinear = checked(importance.interpolation), checked(importance.loglinear)
LEVELS = {name: over_ratios(find(f"importance.{name}_level")) for name in ("token", "sequence", "geometric")}

LOG_RATIO = torch.tensor([math.log(2), math.log(3), math.log(0.5), 0.0])
SEQUENCES = torch.tensor([0, 0, 2, 2])
NO_TOKENS = torch.zeros(0), torch.zeros(0, dtype=torch.int64)


def one_per_sequence(weights, sequences, *, num_sequences):
    return checked(importance.one_per_sequence)(weights, RatioInputs(weights, sequences, num_sequences))


def test_the_ratio_is_exact_clamped_and_widened_before_the_subtraction():
    numerator, denominator = torch.tensor([0.5, 0.1]).log(), torch.tensor([0.25, 0.4]).log()
    assert token_ratio(numerator, denominator).tolist() == pytest.approx([2.0, 0.25])
    logprobs = torch.tensor([-0.3, -17.0, -1e-9])
    assert token_ratio(logprobs, logprobs).tolist() == [1.0, 1.0, 1.0]
    ratio = token_ratio(torch.tensor([0.0, -90.0]), torch.tensor([-90.0, 0.0]))
    assert ratio.tolist() == pytest.approx([math.exp(20), math.exp(-20)])
    half, double = torch.tensor([-1.0]).bfloat16(), torch.tensor([-1.0], dtype=torch.float64)
    assert token_ratio(half, torch.tensor([-1.5]).bfloat16()).dtype == torch.float32
    assert token_ratio(double, double).dtype == torch.float64


def test_the_clamp_bounds_the_value_and_not_the_gradient_and_what_is_not_finite_becomes_neutral():
    learner = torch.tensor([-90.0, -25.0, -3.0, 0.0], requires_grad=True)
    log_ratio = token_log_ratio(learner, torch.tensor([0.0, 0.0, -1.0, -90.0]))
    log_ratio.sum().backward()
    assert log_ratio.tolist() == [-20.0, -20.0, -2.0, 20.0]
    assert learner.grad.tolist() == [1.0] * 4
    numerator = torch.tensor([float("nan"), -1.0, float("-inf"), -1.0], requires_grad=True)
    denominator = torch.tensor([-1.0, float("inf"), -1.0, -2.0])
    log_ratio = token_log_ratio(numerator, denominator)
    log_ratio.sum().backward()
    assert log_ratio.tolist() == [0.0, 0.0, 0.0, 1.0]
    assert numerator.grad.tolist() == [0.0, 0.0, 0.0, 1.0]
    assert importance.nonfinite(numerator, denominator).tolist() == [True, True, True, False]


def test_levels_by_hand_and_a_veto_takes_the_whole_sequence_of_one_bad_token():
    values = {name: level(LOG_RATIO, SEQUENCES, num_sequences=3).tolist() for name, level in LEVELS.items()}
    assert values["token"] == pytest.approx([2, 3, 0.5, 1])
    assert values["sequence"] == pytest.approx([6, 6, 0.5, 0.5])
    assert values["geometric"] == pytest.approx([6**0.5, 6**0.5, 0.5**0.5, 0.5**0.5])
    for name, level in LEVELS.items():
        assert level(torch.zeros(4), SEQUENCES, num_sequences=3).tolist() == [1.0] * 4, name
        assert level(*NO_TOKENS, num_sequences=2).shape == (0,), name
    log_ratio, sequences = torch.full((1000,), math.log(1.1)), torch.zeros(1000, dtype=torch.int64)
    product = LEVELS["sequence"](log_ratio, sequences, num_sequences=1)
    mean = LEVELS["geometric"](log_ratio, sequences, num_sequences=1)
    assert product.tolist() == pytest.approx([math.exp(20)] * 1000)
    assert mean.tolist() == pytest.approx([1.1] * 1000, rel=1e-4)
    for bad, expected in ((1e-5, False), (200.0, False), (99.0, True)):
        kept = veto(torch.tensor([1, bad, 1, 1]).log(), SEQUENCES, num_sequences=3, low=1e-4, high=100.0)
        assert kept.tolist() == [expected, expected, True, True]


def test_weights_are_truncated_from_above_by_default_and_masked_in_both_tails_beyond_the_bounds():
    weights = torch.tensor([0.01, 0.5, 1.0, 5.0, 5.1])
    assert truncate(weights, high=2.0).tolist() == pytest.approx([0.01, 0.5, 1.0, 2.0, 2.0])
    assert truncate(weights, high=2.0, low=0.5).tolist() == pytest.approx([0.5, 0.5, 1.0, 2.0, 2.0])
    assert mask(weights, low=0.5, high=5.0).tolist() == [0, 0.5, 1, 5, 0]
    assert mask(weights).equal(weights)


def test_a_sequence_counts_once_in_the_effective_sample_size_and_in_normalized_weights():
    weights = torch.tensor([6.0, 6.0, 0.5, 0.5])
    assert one_per_sequence(weights, SEQUENCES, num_sequences=4).tolist() == [6, 0.5]
    assert one_per_sequence(*NO_TOKENS, num_sequences=3).shape == (0,)
    weights, sequences = torch.tensor([3.0] * 9 + [1.0]), torch.tensor([0] * 9 + [1])
    of_sequences = one_per_sequence(weights, sequences, num_sequences=2)
    assert effective_sample_size(of_sequences).item() == pytest.approx(16 / 20)
    assert effective_sample_size(weights).item() == pytest.approx(28**2 / (10 * 82))
    weights, sequences = torch.tensor([2.0, 2.0, 2.0, 1.0]), torch.tensor([0, 0, 0, 1])
    by_token = normalize(weights, mean=weights.mean())
    assert by_token.mean().item() == pytest.approx(1.0)
    by_sequence = normalize(weights, mean=one_per_sequence(weights, sequences, num_sequences=2).mean())
    assert by_sequence.tolist() == pytest.approx([4 / 3, 4 / 3, 4 / 3, 2 / 3])
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


@pytest.mark.parametrize(
    ("weights", "expected"),
    [([0.3] * 5, 1.0), ([1, 0, 0, 0], 0.25), ([1, 2, 3, 4], 100 / 120), ([0, 0, 0, 0], 0.0), ([], 0.0)],
)
def test_the_effective_sample_size_lies_between_one_over_n_and_one(weights, expected):
    assert effective_sample_size(torch.tensor(weights, dtype=torch.float32)).item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ess", "settings", "expected"),
    [
        *((1.0, {"floor": 0.1}, 1.0), (0.25, {"floor": 0.1}, 0.5), (0.25, {"power": 1.0, "floor": 0.1}, 0.25)),
        *((ess, {"floor": 0.1}, 0.1) for ess in (0.0, 1e-9, -1.0, math.nan)),
        (1.0000001, {"floor": 0.0}, 1.0),
    ],
)
def test_the_learning_rate_follows_the_root_of_the_sample_size_from_its_floor_to_one(ess, settings, expected):
    assert importance.ess_learning_rate_scale(ess, **settings) == expected


GENERATOR, LEARNER = torch.tensor([0.2, 0.5, 0.9]).log(), torch.tensor([0.8, 0.4, 0.9]).log()


def test_the_interpolated_policy_by_hand_is_exact_at_both_ends_and_neutral_where_not_finite():
    assert interpolation(torch.tensor([3, 2, 1, 0])).tolist() == pytest.approx([3 / 4, 2 / 3, 1 / 2, 0])
    assert loglinear(GENERATOR, LEARNER, alpha=torch.zeros(3)).equal(GENERATOR)
    assert loglinear(GENERATOR, LEARNER, alpha=torch.ones(3)).equal(LEARNER)
    geometric = loglinear(GENERATOR, LEARNER, alpha=torch.full((3,), 0.5)).exp()
    assert geometric.tolist() == pytest.approx([0.4, 0.2**0.5, 0.9])
    broken = torch.tensor([float("nan"), float("-inf"), math.log(0.9)])
    between = loglinear(broken, LEARNER, alpha=torch.tensor([0.0, 0.0, 0.5]))
    assert importance.token_ratio(between, broken).tolist() == pytest.approx([1, 1, 1])


keep_k1, keep_k2, keep_k3 = (over_ratios(find(f"importance.keep_{name}")) for name in ("k1", "k2", "k3"))
veto = over_ratios(importance.veto)
OVERS = ["token", "sum", "mean"]
REJECTIONS = {
    **{
        f"k1 {over}": lambda x, s, n, over=over: keep_k1(x, s, num_sequences=n, over=over, low=0.5, high=2.0)
        for over in OVERS
    },
    **{
        f"{name} {over}": lambda x, s, n, keep=keep, over=over: keep(x, s, num_sequences=n, over=over, high=0.3)
        for name, keep in (("k2", keep_k2), ("k3", keep_k3))
        for over in (*OVERS, "max")
    },
    "veto": lambda x, s, n: veto(x, s, num_sequences=n, low=0.5, high=2.0),
}
every_rejection = pytest.mark.parametrize("name", REJECTIONS)


@pytest.mark.parametrize(
    ("over", "ratios", "kept"),
    [
        ("token", (1.5, 3, 0.6, 0.3), [True, False, True, False]),
        ("sum", (1.5, 3, 0.6, 0.3), [False] * 4),  # 4.5, 0.18
        ("mean", (1.5, 3, 0.6, 0.3), [False] * 4),  # 2.12, 0.42
        # Tokens of a sequence make up for each other.
        ("token", (4, 0.25, 1.9, 1.9), [False, False, True, True]),
        ("sum", (4, 0.25, 1.9, 1.9), [True, True, False, False]),
        ("mean", (4, 0.25, 1.9, 1.9), [True] * 4),
    ],
)
def test_k1_by_hand(over, ratios, kept):
    found = keep_k1(torch.tensor(ratios).log(), SEQUENCES, num_sequences=3, over=over, low=0.5, high=2.0)
    assert found.tolist() == kept


@pytest.mark.parametrize(
    ("log_ratio", "over", "bounds", "is_kept"),
    [
        *((math.log(3), over, {"low": 0.9, "high": 4.0}, True) for over in OVERS),
        *((math.log(3), over, {"low": 0.25, "high": 1.1}, False) for over in OVERS),
        (0.0, "mean", {"low": 1.0, "high": 1.0}, True),
        (-20.0, "sum", {"high": 2.0}, True),
        (20.0, "sum", {"low": 0.5}, True),
    ],
)
def test_the_bounds_of_a_ratio_are_inside_may_be_asymmetric_and_may_be_left_out(log_ratio, over, bounds, is_kept):
    found = keep_k1(torch.tensor([log_ratio]), torch.tensor([0]), num_sequences=1, over=over, **bounds)
    assert found.item() == is_kept


@pytest.mark.parametrize(
    ("keep", "first", "second", "highs"),
    [
        (keep_k2, 0.5, 2.0, (0.2, 0.5, 1.25, 2.0, 2.5)),
        (keep_k3, math.e - 2, 1 + math.exp(-2), (0.1, 0.5, 0.8, 1.0, 1.5, 2.0)),
    ],
    ids=["k2", "k3"],
)
def test_k2_and_k3_by_hand(keep, first, second, highs):
    log_ratio, both = torch.tensor([1.0, 0.0, -2.0, 1.0]), first + second
    values = {"token": [first, 0, second, first], "sum": [first, first, both, both]}
    values |= {"mean": [first / 2, first / 2, both / 2, both / 2], "max": [first, first, second, second]}
    for over, high in itertools.product(values, highs):
        found = keep(log_ratio, SEQUENCES, num_sequences=3, over=over, high=high)
        assert found.tolist() == [value <= high for value in values[over]], (over, high)


@every_rejection
def test_a_rejection_keeps_equal_policies_drops_extreme_drift_and_is_equal_over_a_sequence_and_blind_to_others(name):
    assert REJECTIONS[name](torch.zeros(4), SEQUENCES, 3).all()
    assert REJECTIONS[name](torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0]), SEQUENCES, 3).all()
    assert REJECTIONS[name](*NO_TOKENS, 2).shape == (0,)
    for extreme in (20.0, -20.0, 1e30, -1e30):
        kept = REJECTIONS[name](torch.tensor([0.0, 0.0, extreme, extreme]), SEQUENCES, 3)
        assert kept.tolist() == [True, True, False, False]
    torch.manual_seed(0)
    log_ratio, sequences = torch.randn(40, requires_grad=True), torch.arange(40) // 5
    kept = REJECTIONS[name](log_ratio, sequences, 8)
    assert kept.dtype == torch.bool
    assert not kept.requires_grad
    if "token" not in name:
        assert all(kept[sequences == i].unique().numel() == 1 for i in range(8))
    spoiled = torch.cat([log_ratio[:20], torch.full((20,), 19.0)])
    assert REJECTIONS[name](spoiled, sequences, 8)[:20].equal(kept[:20])
