"""What an id is made of, and which version sampled which token."""

import numpy as np
import pytest

from slipstream.buffer.trajectory import VersionSpan, group_of, lease_of, make_lease_id, make_trajectory_id
from tests.builders import make_trajectory


@pytest.mark.parametrize("group_id", ["17", "step-10-3-sampled:7"])
def test_an_id_tells_its_lease_and_its_group(group_id):
    lease_id = make_lease_id(group_id, 2)
    trajectory_id = make_trajectory_id(lease_id, 3)
    assert trajectory_id == f"{group_id}-2-3"
    assert (lease_of(trajectory_id), group_of(lease_id)) == (lease_id, group_id)


def test_a_span_lasts_until_the_next_one_begins():
    trajectory = make_trajectory(version_spans=[VersionSpan(6, 2), VersionSpan(9, 3)])
    assert trajectory.token_versions().tolist() == [-1] * 6 + [2, 2, 2, 3, 3, 3]


def test_tokens_the_model_did_not_write_have_no_version():
    mask = np.array([0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0], dtype=bool)
    trajectory = make_trajectory(model_mask=mask, version_spans=[VersionSpan(2, 0), VersionSpan(5, 7)])
    assert trajectory.token_versions().tolist() == [-1, -1, 0, 0, -1, -1, 7, 7, -1, -1, -1, -1]
    assert trajectory.token_versions().dtype == np.int32


def test_the_length_counts_prompt_and_response():
    assert make_trajectory().num_tokens == 12
