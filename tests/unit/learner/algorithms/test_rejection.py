import math

import pytest
import torch

from slipstream.learner.algorithms import importance
from slipstream.learner.algorithms.importance import token_log_ratio
from tests.unit.learner.inputs import checked, over_ratios

keep_k1, keep_k2, keep_k3 = (over_ratios(keep) for keep in importance.STATISTICS.values())
veto, num_kept = over_ratios(importance.veto), checked(importance.num_kept)
OVERS = ["token", "sum", "mean"]
SEQUENCES = torch.tensor([0, 0, 2, 2])
NO_TOKENS = torch.zeros(0), torch.zeros(0, dtype=torch.int64)


def logs(*ratios: float) -> torch.Tensor:
    return torch.tensor(ratios).log()


def one_sequence(log_ratio: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(log_ratio), dtype=torch.int64)


@pytest.mark.parametrize(
    ("over", "kept"),
    [
        ("token", [True, False, True, False]),  # 1.5, 3, 0.6, 0.3
        ("sum", [False, False, False, False]),  # 4.5, 0.18
        ("mean", [False, False, False, False]),  # 2.12, 0.42
    ],
)
def test_k1_by_hand(over, kept):
    assert keep_k1(logs(1.5, 3, 0.6, 0.3), SEQUENCES, num_sequences=3, over=over, low=0.5, high=2.0).tolist() == kept


def test_k1_over_a_sequence_lets_tokens_make_up_for_each_other():
    log_ratio = logs(4, 0.25, 1.9, 1.9)
    kept = {
        over: keep_k1(log_ratio, SEQUENCES, num_sequences=3, over=over, low=0.5, high=2.0).tolist() for over in OVERS
    }
    assert kept["token"] == [False, False, True, True]
    assert kept["sum"] == [True, True, False, False]
    assert kept["mean"] == [True, True, True, True]


@pytest.mark.parametrize("over", OVERS)
def test_asymmetric_bounds_hold_for_proximal_over_generator(over):
    proximal, generator = torch.tensor([0.6]).log(), torch.tensor([0.2]).log()
    log_ratio = token_log_ratio(proximal, generator)

    def keep(low, high):
        return keep_k1(log_ratio, one_sequence(log_ratio), num_sequences=1, over=over, low=low, high=high).item()

    assert keep(0.9, 4.0)
    assert not keep(0.25, 1.1)


def test_the_bounds_of_a_ratio_are_inside_and_either_may_be_left_out():
    log_ratio = torch.zeros(1)
    assert keep_k1(log_ratio, one_sequence(log_ratio), num_sequences=1, over="mean", low=1.0, high=1.0).item()
    tiny, huge = torch.tensor([-20.0]), torch.tensor([20.0])
    assert keep_k1(tiny, one_sequence(tiny), num_sequences=1, over="sum", high=2.0).item()
    assert keep_k1(huge, one_sequence(huge), num_sequences=1, over="sum", low=0.5).item()


def test_k2_by_hand():
    log_ratio = torch.tensor([1.0, 0.0, -2.0, 1.0])  # k2: 0.5, 0, 2, 0.5
    values = {"token": [0.5, 0, 2, 0.5], "sum": [0.5, 0.5, 2.5, 2.5], "mean": [0.25, 0.25, 1.25, 1.25]}
    values["max"] = [0.5, 0.5, 2, 2]
    for over, statistic in values.items():
        for high in (0.2, 0.5, 1.25, 2.0, 2.5):
            got = keep_k2(log_ratio, SEQUENCES, num_sequences=3, over=over, high=high)
            assert got.tolist() == [value <= high for value in statistic]


def test_k3_by_hand():
    log_ratio = torch.tensor([1.0, 0.0, -2.0, 1.0])  # k3: e - 2, 0, 1 + e^-2, e - 2
    first, second = math.e - 2, 1 + math.exp(-2)
    values = {
        "token": [first, 0, second, first],
        "sum": [first, first, first + second, first + second],
        "mean": [first / 2, first / 2, (first + second) / 2, (first + second) / 2],
        "max": [first, first, second, second],
    }
    for over, statistic in values.items():
        for high in (0.1, 0.5, 0.8, 1.0, 1.5, 2.0):
            got = keep_k3(log_ratio, SEQUENCES, num_sequences=3, over=over, high=high)
            assert got.tolist() == [value <= high for value in statistic]


def test_a_veto_takes_the_whole_sequence_of_one_bad_token():
    for bad in (1e-5, 200.0):
        kept = veto(logs(1, bad, 1, 1), SEQUENCES, num_sequences=3, low=1e-4, high=100.0)
        assert kept.tolist() == [False, False, True, True]
    assert veto(logs(1, 99, 1, 1), SEQUENCES, num_sequences=3, low=1e-4, high=100.0).all()


def test_what_stays_is_counted_for_every_sequence():
    keep = torch.tensor([True, False, False, False])
    assert num_kept(keep, SEQUENCES, num_sequences=4).tolist() == [1, 0, 0, 0]
    assert num_kept(NO_TOKENS[0] > 0, NO_TOKENS[1], num_sequences=2).tolist() == [0, 0]


ANY = {
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


@pytest.mark.parametrize("name", ANY)
def test_equal_policies_keep_everything(name):
    assert ANY[name](torch.zeros(4), SEQUENCES, 3).all()


@pytest.mark.parametrize("name", ANY)
def test_what_is_not_finite_counts_as_neutral(name):
    log_ratio = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0])
    assert ANY[name](log_ratio, SEQUENCES, 3).all()


@pytest.mark.parametrize("name", ANY)
def test_no_tokens_and_empty_sequences_divide_by_nothing(name):
    assert ANY[name](*NO_TOKENS, 2).shape == (0,)


@pytest.mark.parametrize("name", ANY)
def test_extreme_drift_leaves_without_overflow(name):
    for extreme in (20.0, -20.0, 1e30, -1e30):
        kept = ANY[name](torch.tensor([0.0, 0.0, extreme, extreme]), SEQUENCES, 3)
        assert kept.tolist() == [True, True, False, False]


@pytest.mark.parametrize("name", ANY)
def test_a_mask_is_bool_without_gradient_and_equal_over_a_sequence(name):
    torch.manual_seed(0)
    log_ratio, sequences = torch.randn(40, requires_grad=True), torch.arange(40) // 5
    kept = ANY[name](log_ratio, sequences, 8)
    assert kept.dtype == torch.bool
    assert not kept.requires_grad
    if "token" not in name:
        assert all(kept[sequences == i].unique().numel() == 1 for i in range(8))


@pytest.mark.parametrize("name", ANY)
def test_another_sequence_changes_nothing(name):
    torch.manual_seed(0)
    log_ratio, sequences = torch.randn(10), torch.arange(10) // 5
    spoiled = torch.cat([log_ratio[:5], torch.full((5,), 19.0)])
    assert ANY[name](log_ratio, sequences, 2)[:5].equal(ANY[name](spoiled, sequences, 2)[:5])
