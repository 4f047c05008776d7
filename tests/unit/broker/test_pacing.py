"""Pacing bounds how far generators run ahead."""

import msgspec
import pytest

from broker.pacing import admission_limit
from tests.builders import make_run


@pytest.mark.parametrize(
    ("max_lag", "publish_every", "version", "limit"),
    [(0, 1, 0, 4), (0, 1, 3, 16), (2, 1, 0, 12), (2, 2, 1, 32), (8, 1, 100, 40)],
)
def test_the_limit_follows_the_committed_version_and_ends_with_the_run(max_lag, publish_every, version, limit):
    run = make_run(
        buffer={"staleness": {"max_lag": max_lag}},
        weights={"publish_every_steps": publish_every},
        learner={"groups_per_step": 4, "max_steps": 10},
    )
    assert admission_limit(run, version=version) == limit


def test_a_run_config_made_for_tests_survives_the_wire():
    run = make_run()
    assert msgspec.json.decode(msgspec.json.encode(run), type=type(run)) == run
