"""docs/metrics.md names every metric with its healthy range, and no other."""

import re
from pathlib import Path

import pytest

from slipstream.learner.metrics.log import ROW_KEYS, SUMMARY_KEYS
from slipstream.learner.metrics.step_metrics import METRICS, RANGES
from slipstream.learner.training.critic import CRITIC_METRICS

ROWS = dict(re.findall(r"^\| `([^`]+)` \|(.*)$", (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(), re.M))


def test_every_metric_is_documented_and_every_documented_one_exists():
    assert set(METRICS) | set(CRITIC_METRICS) | set(ROW_KEYS) | set(SUMMARY_KEYS) == set(ROWS)


@pytest.mark.parametrize("key", RANGES)
def test_the_range_that_is_watched_is_the_one_documented(key: str):
    assert str(RANGES[key]) in ROWS[re.sub("by_lag/[^/]+/", "", key)]
