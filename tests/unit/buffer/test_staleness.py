"""Lags of tokens and trajectories."""

import numpy as np
import pytest

from slipstream.buffer.trajectory import VersionSpan, lag, lag_histogram, stale_mask
from tests.builders import make_trajectory

MIXED = [VersionSpan(6, 2), VersionSpan(9, 5)]


def test_lag_is_the_learners_version_less_the_tokens():
    assert lag(np.array([0, 3, 5]), 5).tolist() == [5, 2, 0]


@pytest.mark.parametrize(("max_lag", "num_too_old"), [(0, 6), (1, 3), (3, 3), (4, 0)])
def test_only_model_written_tokens_beyond_the_bound_are_over_age(max_lag, num_too_old):
    mask = stale_mask(make_trajectory(version_spans=MIXED), learner_version=6, max_lag=max_lag)
    assert mask.tolist() == [False] * 6 + [i < num_too_old for i in range(6)]
    assert mask.dtype == np.bool_


def test_prompt_tokens_are_never_over_age():
    mask = stale_mask(make_trajectory(), learner_version=100, max_lag=0)
    assert mask.tolist() == [False] * 6 + [True] * 6


def test_tokens_newer_than_the_learner_count_as_fresh():
    trajectory = make_trajectory(version_spans=[VersionSpan(6, 9)])
    assert not stale_mask(trajectory, learner_version=5, max_lag=0).any()
    assert lag_histogram([trajectory], learner_version=5) == {-4: 6}


def test_the_histogram_counts_model_written_tokens_per_lag():
    trajectories = [make_trajectory(version_spans=MIXED), make_trajectory(version_spans=[VersionSpan(6, 5)])]
    assert lag_histogram(trajectories, learner_version=6) == {1: 9, 4: 3}
    assert lag_histogram([], learner_version=6) == {}
