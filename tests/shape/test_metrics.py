"""docs/metrics.md names every metric, and no other."""

import re
from pathlib import Path

from learner.diagnostics import METRICS
from learner.record import ROW_KEYS, SUMMARY_KEYS

DOCUMENTED = set(re.findall(r"^\| `([^`]+)` \|", (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(), re.M))


def test_every_metric_is_documented_and_every_documented_one_exists():
    assert set(METRICS) | set(ROW_KEYS) | set(SUMMARY_KEYS) == DOCUMENTED
