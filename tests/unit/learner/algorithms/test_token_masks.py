import math

import pytest
import torch

from slipstream.learner.algorithms import token_masks
from slipstream.learner.algorithms.inputs import MaskInputs
from tests.unit.learner.inputs import checked, wide


def inputs_of(log_ratio, advantages, *, sequences=None, learner_logprobs=None, is_counted=None, seed=0):
    """A single sequence unless `sequences` is given."""
    sequences = torch.zeros(len(log_ratio), dtype=torch.int64) if sequences is None else sequences
    is_counted = torch.ones(len(log_ratio), dtype=torch.bool) if is_counted is None else is_counted
    learner_logprobs = log_ratio if learner_logprobs is None else learner_logprobs
    num_sequences = int(sequences.max()) + 1 if len(sequences) else 0
    return MaskInputs(log_ratio, advantages, learner_logprobs, sequences, num_sequences, is_counted, seed)


def m2po(log_ratio, advantages, *, threshold, **columns):
    return checked(token_masks.m2po)(inputs_of(log_ratio, advantages, **columns), threshold=threshold)


def opsm(log_ratio, advantages, sequences, *, delta):
    return checked(token_masks.opsm)(inputs_of(log_ratio, advantages, sequences=sequences), delta=delta)


def covariance(advantages, logprobs, **columns):
    inputs = inputs_of(torch.zeros_like(logprobs), advantages, learner_logprobs=logprobs, **columns)
    return checked(token_masks.covariance)(inputs)


def rising(count, **columns):
    """Tokens with covariances 0, 1, 4, 9, ... and a last token that makes both means 0."""
    values = torch.arange(count).double()
    values = torch.cat([values, -values.sum()[None]])
    return inputs_of(torch.zeros_like(values), values, learner_logprobs=values, **columns)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dropped(mask: torch.Tensor) -> list[int]:
    return (~mask).nonzero().flatten().tolist()


def m2po_by_the_algorithm(log_ratio, advantages, threshold):
    """Reference implementation: while the mean is too large, drop the largest."""
    kept = torch.ones(len(log_ratio), dtype=torch.bool)
    left = [i for i in range(len(log_ratio)) if advantages[i] * log_ratio[i] > 0]
    while left and sum(float(log_ratio[i]) ** 2 for i in left) / len(left) > threshold:
        largest = max(left, key=lambda i: float(log_ratio[i]) ** 2)
        kept[largest] = False
        left.remove(largest)
    return kept


@pytest.mark.parametrize(
    ("log_ratio", "advantages", "threshold", "expected"),
    [
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
    ],
)
def test_m2po_by_hand(log_ratio, advantages, threshold, expected):
    assert dropped(m2po(wide(*log_ratio), wide(*advantages), threshold=threshold)) == expected


def test_m2po_is_its_algorithm_line_by_line():
    for seed in range(20):
        log_ratio, advantages = torch.randn(2, 40, generator=seeded(seed), dtype=torch.float64).unbind()
        threshold = 10 ** (-seed / 8)
        mask = m2po(log_ratio, advantages, threshold=threshold)
        assert mask.equal(m2po_by_the_algorithm(log_ratio, advantages, threshold))


def test_opsm_drops_drifted_sequences_of_negative_advantage_whatever_their_length():
    sequences = torch.tensor([0, 0, 1, 1, 2, 2, 3])
    log_ratio = wide(-1.0, -0.2, -1.0, -0.2, -1.0, 0.1, 9.0)
    advantages = wide(-1, -1, 1, 1, -1, -1, -1)
    mask = opsm(log_ratio, advantages, sequences, delta=0.5)
    assert dropped(mask) == [0, 1]
    assert dropped(opsm(log_ratio, advantages, sequences, delta=0.4)) == [0, 1, 4, 5]
    log_ratio, delta = wide(-0.6, -0.2), 0.5
    for copies in (1, 50):
        values = torch.cat([log_ratio.repeat(copies), wide(-20, -20)])
        sequences = torch.cat([torch.zeros(2 * copies, dtype=torch.int64), torch.tensor([1, 1])])
        mask = opsm(values, -torch.ones_like(values), sequences, delta=delta)
        assert mask.tolist() == [True] * 2 * copies + [False] * 2


def test_the_covariances_have_the_covariance_as_mean_and_are_zero_where_not_finite():
    advantages, logprobs = torch.randn(2, 100, generator=seeded(), dtype=torch.float64).unbind()
    expected = torch.cov(torch.stack([advantages, logprobs]), correction=0)[0, 1]
    assert float(covariance(advantages, logprobs).mean()) == pytest.approx(float(expected))
    values = covariance(wide(1, -1, 5, -5), wide(-1, -3, -math.inf, math.nan))
    assert values.tolist() == [1.0, 1.0, 0.0, 0.0]


def clip_cov_mask(inputs, *, fraction, low, high):
    return checked(token_masks.clip_cov_mask)(inputs, fraction=fraction, covariance_low=low, covariance_high=high)


def test_clip_cov_draws_its_share_from_within_the_bounds_or_takes_all_candidates():
    # The covariances are 0, 1, 4, 9, ... of the first hundred tokens, and one very large.
    mask = clip_cov_mask(rising(100), fraction=0.05, low=100.0, high=2500.0)
    assert len(dropped(mask)) == 5
    assert all(10 <= i <= 50 for i in dropped(mask))
    assert dropped(clip_cov_mask(rising(4), fraction=0.9, low=1.0, high=4.0)) == [1, 2]


def test_clip_cov_is_repeatable_differs_between_seeds_and_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    masks = [clip_cov_mask(rising(100, seed=seed), fraction=0.1, low=0.0, high=1e4) for seed in (0, 0, 1)]
    assert masks[0].equal(masks[1])
    assert not masks[0].equal(masks[2])
    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize("fraction", [2e-4, 0.19])
def test_clip_cov_and_kl_cov_take_one_token_where_their_share_is_less_than_one(fraction):
    assert len(dropped(clip_cov_mask(rising(4), fraction=fraction, low=1.0, high=4.0))) == 1
    assert checked(token_masks.kl_cov_mask)(rising(4), fraction=fraction).nonzero().flatten().tolist() == [4]


def test_kl_cov_takes_the_top_share_and_the_earlier_of_equals_and_none_of_no_candidates():
    assert dropped(clip_cov_mask(rising(4), fraction=2e-4, low=500.0, high=600.0)) == []
    assert dropped(clip_cov_mask(rising(4), fraction=0.0, low=1.0, high=4.0)) == []
    assert not checked(token_masks.kl_cov_mask)(rising(4), fraction=0.0).any()
    none_counted = inputs_of(wide(1, 2), wide(1, 2), is_counted=torch.tensor([False, False]))
    assert not checked(token_masks.kl_cov_mask)(none_counted, fraction=0.5).any()
    kl_cov_mask = checked(token_masks.kl_cov_mask)
    assert kl_cov_mask(rising(4), fraction=0.4).nonzero().flatten().tolist() == [3, 4]
    equal = inputs_of(wide(3, 3, -6), wide(3, 3, -6), learner_logprobs=wide(3, 3, -6))
    assert kl_cov_mask(equal, fraction=0.7).tolist() == [True, False, True]
    assert kl_cov_mask(equal, fraction=0.3).tolist() == [False, False, True]


def test_tokens_that_the_correction_rejects_take_no_share_and_move_no_mean():
    is_counted = torch.tensor([True, False, True, True])
    assert dropped(m2po(wide(0.1, 9, 0.1, 0.3), wide(1, 1, 1, 1), threshold=0.02, is_counted=is_counted)) == [3]
    values = covariance(wide(1, 50, -1, 0), wide(-1, 70, -3, -2), is_counted=is_counted)
    assert values[[0, 2, 3]].tolist() == [1.0, 1.0, 0.0]
    inputs = inputs_of(wide(0, 0, 0, 0), wide(1, 50, -1, 0), learner_logprobs=wide(1, 50, -1, 0), is_counted=is_counted)
    assert token_masks.kl_cov_mask(inputs, fraction=0.4).tolist() == [True, False, False, False]
