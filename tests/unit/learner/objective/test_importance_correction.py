import pytest
import torch

from slipstream.configs.algorithm import CorrectionConfig, RejectionConfig
from slipstream.learner.algorithms.inputs import RatioInputs
from slipstream.learner.training.loss_inputs import correct

SEQUENCES = torch.tensor([0, 0, 1, 1])
DRIFT = torch.tensor([1.0, 4.0, 0.25, 1.0]).log()


def corrected(drift=DRIFT, learner_log_ratio=None, **settings):
    inputs, learner = (
        RatioInputs(x, SEQUENCES, 2) for x in (drift, drift if learner_log_ratio is None else learner_log_ratio)
    )
    return correct(inputs, learner=learner, config=CorrectionConfig(**settings))


def test_without_a_level_every_token_counts_once():
    found = corrected(level="none", high=None)
    assert found.weights.tolist() == [1, 1, 1, 1]
    assert found.is_kept.all()
    assert not found.is_bounded.any()


def test_truncated_weights_are_reported_as_bounded():
    found = corrected(level="token", high=2.0, low=0.5)
    assert found.weights.tolist() == [1, 2, 0.5, 1]
    assert found.is_bounded.tolist() == [False, True, True, False]


def test_masked_weights_are_zero_and_stay_in_the_count():
    found = corrected(level="token", high=2.0, low=0.5, bound="mask")
    assert found.weights.tolist() == [1, 0, 0, 1]
    assert found.is_bounded.tolist() == [False, True, True, False]
    assert found.is_kept.all()


def test_a_sequence_is_bounded_as_one():
    found = corrected(level="sequence", high=2.0)
    assert found.weights.tolist() == pytest.approx([2, 2, 0.25, 0.25])
    assert found.is_bounded.tolist() == [True, True, False, False]


def test_normalised_weights_have_the_mean_one_over_what_they_belong_to():
    by_token = corrected(level="token", high=2.0, normalise=True)
    assert by_token.weights.tolist() == pytest.approx([1 / 1.0625, 2 / 1.0625, 0.25 / 1.0625, 1 / 1.0625])
    by_sequence = corrected(level="sequence", high=2.0, normalise=True)
    assert by_sequence.weights.tolist() == pytest.approx([2 / 1.125, 2 / 1.125, 0.25 / 1.125, 0.25 / 1.125])


def test_weights_are_the_proximal_policys_and_rejections_the_learners():
    entry = RejectionConfig(over="token", high=2.0)
    found = corrected(learner_log_ratio=torch.zeros(4), level="token", high=2.0, reject=[entry], veto=(0.5, 2.0))
    assert found.weights.tolist() == [1, 2, 0.25, 1]
    assert found.is_kept.all()
    found = corrected(torch.zeros(4), learner_log_ratio=DRIFT, level="token", reject=[entry])
    assert found.weights.tolist() == [1, 1, 1, 1]
    assert found.is_kept.tolist() == [True, False, True, True]


def test_a_token_stays_when_every_entry_keeps_it():
    low = RejectionConfig(statistic="k1", over="token", low=0.5)
    high = RejectionConfig(statistic="k1", over="token", high=2.0)
    assert corrected(reject=[low]).is_kept.tolist() == [True, True, False, True]
    assert corrected(reject=[high]).is_kept.tolist() == [True, False, True, True]
    assert corrected(reject=[low, high]).is_kept.tolist() == [True, False, False, True]
    assert corrected(reject=[high], veto=(0.5, 10.0)).is_kept.tolist() == [True, False, False, False]


@pytest.mark.parametrize(("statistic", "high"), [("k2", 0.9), ("k3", 1.0)])
def test_each_statistic_may_be_that_of_its_largest_token(statistic, high):
    # k2: ln(4)^2 / 2 = 0.96 of both; k3: 4 - 1 - ln 4 = 1.61, and 1/4 - 1 + ln 4 = 0.64.
    entry = RejectionConfig(statistic=statistic, over="max", high=high)
    assert corrected(reject=[entry]).is_kept.tolist() == [False, False, statistic == "k3", statistic == "k3"]
