"""The wire schema: versions of tokens, and their lag."""

import msgspec
import numpy as np
import pytest

from slipstream.buffer.trajectory import (
    VersionSpan,
    group_of,
    lag,
    lag_histogram,
    lease_of,
    make_lease_id,
    make_trajectory_id,
    stale_mask,
)
from tests.builders import make_trajectory


@pytest.mark.parametrize("group_id", ["17", "step-10-3-sampled:7"])
def test_ids_contain_their_lease_and_group(group_id):
    lease_id = make_lease_id(group_id, 2)
    trajectory_id = make_trajectory_id(lease_id, 3)
    assert trajectory_id == f"{group_id}-2-3"
    assert (lease_of(trajectory_id), group_of(lease_id)) == (lease_id, group_id)


def test_tokens_the_model_did_not_write_have_no_version():
    mask = np.array([0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0], dtype=bool)
    trajectory = make_trajectory(model_mask=mask, version_spans=[VersionSpan(2, 0), VersionSpan(5, 7)])
    assert trajectory.token_versions().tolist() == [-1, -1, 0, 0, -1, -1, 7, 7, -1, -1, -1, -1]
    assert trajectory.token_versions().dtype == np.int32


MIXED = [VersionSpan(6, 2), VersionSpan(9, 5)]


@pytest.mark.parametrize(("max_lag", "num_stale"), [(0, 6), (1, 3), (3, 3), (4, 0)])
def test_only_model_written_tokens_beyond_the_bound_are_stale(max_lag, num_stale):
    mask = stale_mask(make_trajectory(version_spans=MIXED), learner_version=6, max_lag=max_lag)
    assert mask.tolist() == [False] * 6 + [i < num_stale for i in range(6)]
    assert mask.dtype == np.bool_


def test_the_histogram_counts_model_written_tokens_per_lag_and_newer_ones_as_fresh():
    assert lag(np.array([0, 3, 5]), 5).tolist() == [5, 2, 0]
    trajectories = [make_trajectory(version_spans=MIXED), make_trajectory(version_spans=[VersionSpan(6, 5)])]
    assert lag_histogram(trajectories, learner_version=6) == {1: 9, 4: 3}
    assert lag_histogram([], learner_version=6) == {}
    trajectory = make_trajectory(version_spans=[VersionSpan(6, 9)])
    assert not stale_mask(trajectory, learner_version=5, max_lag=0).any()
    assert lag_histogram([trajectory], learner_version=5) == {-4: 6}
    # A span without a model-written token, and one that starts within an observation.
    mask = np.array([0, 0, 1, 1, 0, 0, 1, 0, 1], dtype=np.bool_)
    spans = [VersionSpan(2, 1), VersionSpan(4, 3), VersionSpan(5, 4), VersionSpan(8, 6)]
    trajectory = msgspec.structs.replace(
        make_trajectory(), token_ids=np.arange(9, dtype=np.int32), model_mask=mask, version_spans=spans
    )
    versions = trajectory.token_versions()[mask]
    lags, counts = np.unique(7 - versions, return_counts=True)
    assert lag_histogram([trajectory], learner_version=7) == dict(zip(lags.tolist(), counts.tolist(), strict=True))
