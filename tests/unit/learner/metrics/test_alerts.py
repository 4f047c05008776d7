import pytest
from structlog.testing import capture_logs

from slipstream.learner.metrics_log import MetricsLog
from slipstream.runtime.healthy_ranges import RANGES, MetricAlerts, Range
from slipstream.runtime.run_folder import RunFolder
from tests.memory_store.store import MemoryStore
from tests.metric_docs import STEP, TOKENS, keys_under
from tests.unit.learner.builders import make_model, make_run


class Watched:
    """One metric with its range, and the alerts about it."""

    def __init__(self, healthy: Range) -> None:
        self.texts: list[str] = []
        self.alerts = MetricAlerts(self.texts.append, ranges={"learner/ess": healthy})

    def check(self, *values: float, **others: float) -> list[str]:
        """Alerts while the metric takes these values."""
        self.texts.clear()
        for value in values:
            self.alerts.check({"learner/ess": value} | others)
        return list(self.texts)


def test_a_metric_that_leaves_its_range_alerts_once_until_it_has_returned():
    scene = Watched(Range(low=0.3, advice="lower max_lag"))
    with capture_logs() as logs:
        assert scene.check(0.9, 0.3) == []
        assert scene.check(0.2, 0.1, 0.05) == ["learner/ess is 0.2, healthy is >= 0.3: lower max_lag"]
        for _ in range(5):
            scene.alerts.check({})
        assert scene.check(0.1) == [], "a row without the metric changes nothing"
        assert scene.check(*[0.4, 0.4, 0.2] * 10) == [], "a metric that wavers makes no stream of events"
        assert scene.check(0.4, 0.4, 0.4, 0.4) == []
        assert len(scene.check(0.2, 0.2)) == 1
    changes = [(entry["log_level"], entry["event"], entry["metric"]) for entry in logs]
    left, returned = ("warning", "unhealthy", "learner/ess"), ("info", "healthy_again", "learner/ess")
    assert changes == [left, returned, left]
    assert logs[0]["healthy"] == ">= 0.3"


def test_metrics_that_leave_their_range_in_one_step_are_one_event():
    texts: list[str] = []
    MetricAlerts(texts.append, ranges={"a": Range(high=1.0), "b": Range(low=0.0)}).check({"a": 2.0, "b": -1.0})
    assert texts == ["a is 2, healthy is <= 1, b is -1, healthy is >= 0: "]


def test_patience_is_in_steps_in_a_row():
    scene = Watched(Range(high=0.5, patience=3))
    assert scene.check(0.9, 0.9, 0.1, 0.9, 0.9) == []
    assert len(scene.check(0.9)) == 1


def test_a_metric_of_stale_tokens_is_not_checked_without_any():
    scene = Watched(Range(high=0.5, only_stale=True))
    assert scene.check(0.9, 0.9) == scene.check(0.9, **{"lag/max": 0}) == []
    assert len(scene.check(0.9, **{"lag/max": 2})) == 1


def test_a_policy_that_answers_correctly_may_stop_exploring():
    scene = Watched(Range(low=0.1, min_wrong=0.1))
    assert scene.check(0.05, **{"learner/correct_fraction": 0.95}) == []
    assert len(scene.check(0.05, **{"learner/correct_fraction": 0.6})) == 1
    assert len(Watched(Range(low=0.1, min_wrong=0.1)).check(0.05)) == 1, "correctness is not known"


@pytest.mark.parametrize(
    ("values", "num_steps"),
    [
        ({"learner/advantage_zero_fraction": 1.0}, 2),
        ({"learner/truncated_fraction": 1.0}, 2),
        ({"learner/entropy": 0.05, "learner/correct_fraction": 0.5}, 3),
        ({"learner/correct_fraction": 0.0, "learner/reward_mean": 0.4}, 20),
    ],
)
def test_what_beginners_get_wrong_is_told_within_a_few_steps(values: dict[str, float], num_steps: int):
    texts: list[str] = []
    alerts = MetricAlerts(texts.append, run=make_run(make_model))
    for step in range(1, num_steps + 1):
        assert texts == [], step
        alerts.check(values)
    assert len(texts) == 1
    assert next(iter(values)) in texts[0]


def test_a_spike_is_seen_against_the_median_of_the_steps_before():
    scene = Watched(Range(high=10.0, of_median=True))
    assert scene.check(*[100.0] * 3) == scene.check(*[2.0] * 20, 19.0) == []
    assert scene.check(21.0) == ["learner/ess is 21, healthy is <= 10 x its median: "]


@pytest.mark.parametrize("healthy", [Range(high=1.0), Range(low=1.0)])
def test_nan_is_unhealthy_and_no_ordinary_departure(healthy: Range):
    (alert,) = Watched(healthy).check(float("nan"))
    assert "is nan" in alert
    assert "log-probabilities that are not finite" in alert


def test_every_range_is_of_a_metric_and_says_what_to_do():
    assert {key.replace("by_lag/0/", "") for key in RANGES} <= keys_under(STEP, TOKENS)
    assert [key for key, healthy in RANGES.items() if not (healthy.advice and str(healthy))] == []


def test_the_events_of_a_run_are_where_the_status_looks(tmp_path):
    run = make_run(make_model(tmp_path), runs_dir=str(tmp_path))
    store, folder = MemoryStore(), RunFolder(run)
    store.open_run(run.name, config_json="{}", num_rows=1, seed=0)
    folder.open()
    log = MetricsLog(run, folder=folder, store=store)
    metrics = {"learner/tokens": 1.0, "learner/reward_mean": 0.5, "lag/mean": 0.0, "lag/max": 0, "learner/ess": 0.1}
    for step in (1, 2):
        log.add_step(step=step, version=step, metrics=metrics, published=None, evaluated=None, times={})
    (event,) = store.events(limit=5)
    assert event.role == "learner"
    assert event.text.startswith("learner/ess is 0.1, healthy is >= 0.3: the answers come from older weights")
    assert "staleness.max_lag (now 4, mean lag 0)" in event.text
