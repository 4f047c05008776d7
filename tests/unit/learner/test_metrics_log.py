import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from structlog.testing import capture_logs

from slipstream.buffer.archive.step_tokens import StepTokens, write_step
from slipstream.buffer.records import EvaluationResult
from slipstream.configs.load import load
from slipstream.learner.metrics_log import MetricsLog, StepTokensWriter
from slipstream.observe.terminal import verdict
from slipstream.runtime.healthy_ranges import RANGES, MetricAlerts, Range
from slipstream.runtime.run_folder import RunFolder
from tests.cases import cases
from tests.contract.stores import open_run
from tests.fakes import FakeClock
from tests.memory_store.store import MemoryStore
from tests.metric_docs import STEP, TOKENS, keys_under
from tests.unit.learner.builders import make_model, make_run

ROW = {"learner/tokens": 1.0, "learner/reward_mean": 0.5, "lag/mean": 0.0, "lag/max": 0, "lag/histogram": {0: 1}}
ONE = StepTokens(["0-0-0"], [3], [np.array([2])], {"entropy": np.array([0.5], np.float32)})


def evaluated(accuracy: float) -> dict:
    counts = {"version": 1, "num_asked": 100, "num_answered": 100, "num_correct": round(100 * accuracy)}
    return {p: EvaluationResult(id=p, purpose=p, **counts) for p in ("sampled", "greedy")}


class Scene:
    """The log of a run, in which the test adds steps of one second."""

    def __init__(self, folder: RunFolder, *overrides: str) -> None:
        self.folder, self.clock = folder, FakeClock(100.0)
        self.store = open_run(MemoryStore(clock=self.clock))
        self.run = load(["experiment=digits_cpu", *overrides])
        self.log = MetricsLog(self.run, folder=folder, store=self.store, clock=self.clock)

    def report(self, **tokens: float | None) -> None:
        """Report the tokens of each generator since its start, at 100 tokens/s; None: it has left."""
        for name, total in tokens.items():
            here = {"state": "ready", "tokens": total, "tokens_per_s": 100.0}
            self.store.report_role(name, {"role": "generator", **({"state": "gone"} if total is None else here)})

    def step(self, number: int, metrics: Any = ROW, **fields: Any) -> float | None:
        """Returns the generated tokens per second of the row, None if unknown."""
        self.clock.now += 1.0
        plain = {"step": number, "version": number, "published": None, "evaluated": None, "times": {}}
        self.log.add_step(metrics=metrics, **(plain | fields))
        return self.store.metrics().rows[-1].get("generators/tokens_per_s")

    def summary(self, *, step: int = 1, after: Any = None) -> dict[str, Any]:
        self.log.end_training()
        self.log.write_summary(step=step, after=after or evaluated(0.95), evaluation={})
        return json.loads((self.folder.path / "summary.json").read_text())


def train(folder: RunFolder, steps: range, *, lag: int, accuracy: Any = None, goals: str | None = None) -> dict:
    """Steps of a thousand tokens; returns the summary."""
    scene = Scene(folder, *([] if goals is None else [f"evaluation.goals={goals}"]))
    scene.clock.now += 60.0
    scene.log.start_training(step=steps.start - 1)
    for step in steps:
        metrics = ROW | {"learner/tokens": 1000.0, "lag/mean": lag, "lag/max": lag, "lag/histogram": {lag: 1000}}
        found = {"eval/accuracy_sampled": accuracy[step]} if accuracy and step in accuracy else None
        scene.step(step, metrics, evaluated=found, tokens=ONE)
    return scene.summary(step=steps.stop - 1)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(load(["experiment=digits_cpu", f"runs_dir={tmp_path}"]))
    folder.path.mkdir()
    return folder


def test_the_summary_of_a_resumed_run_is_of_the_whole_run_and_counts_repeated_steps_once(folder: RunFolder):
    train(folder, range(1, 91), lag=2, accuracy={20: 0.5, 50: 0.95})
    summary = train(folder, range(51, 101), lag=1)
    assert [summary[key] for key in ("seconds_to_goal", "train_seconds", "steps")] == [50, 100, 100]
    assert (summary["lag_mean"], summary["lag_max"]) == (pytest.approx(1.5), 2)
    assert summary["learner_tokens_per_s"] == pytest.approx(1000)
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert {row["learner/tokens_per_s"] for row in rows} == {1000.0}, "from the first step on"


@pytest.mark.parametrize(("goal", "seconds"), [("0.4", 20), ("0.9", 50), ("0.99", None), ("", None)])
def test_the_seconds_to_the_goal_are_those_of_the_first_evaluation_that_reached_it(folder: RunFolder, goal, seconds):
    goals = f"[{{metric: eval/accuracy_sampled, at_least: {goal}}}]" if goal else "[]"
    summary = train(folder, range(1, 91), lag=2, accuracy={20: 0.5, 50: 0.95}, goals=goals)
    assert summary["seconds_to_goal"] == seconds


def test_a_resumed_run_forgets_the_tokens_of_the_steps_that_were_rolled_back(folder: RunFolder):
    # No more steps than may wait for the disk.
    for steps in (range(1, 5), range(3, 4)):
        train(folder, steps, lag=2)
        expected = [f"{number}.parquet" for number in range(1, steps.stop)]
        assert [path.name[-9:] for path in sorted(folder.token_stats.iterdir())] == expected


def test_generators_that_leave_restart_and_join_are_counted_for_what_they_generated(folder: RunFolder):
    scene = Scene(folder)
    scene.report(leaves=5000, restarts=9000, stays=700)
    scene.log.start_training(step=0)
    scene.report(leaves=5100, restarts=9200, stays=800)
    scene.step(1)
    scene.report(leaves=None, restarts=50, stays=900, joins=30)
    scene.step(2)
    scene.report(after_the_last_step=40)
    assert scene.summary()["generated_tokens_per_s"] == (100 + 200 + 100 + 50 + 100 + 30 + 40) / 2


def test_the_rate_of_a_row_is_the_mean_of_the_last_ten_steps_and_unknown_before_the_first_report(folder: RunFolder):
    scene = Scene(folder)
    scene.log.start_training(step=0)
    scene.report(bursts=300.0)
    assert scene.step(1) == 300.0
    assert [scene.step(number) for number in (2, 3)] == [150.0, 100.0], "no token has arrived since"
    scene.report(bursts=600.0)
    assert [scene.step(number) for number in range(4, 14)][-4:] == [60.0, 30.0, 30.0, 30.0]
    scene = Scene(folder)
    scene.log.start_training(step=0)
    assert scene.step(1) is None
    scene.report(late=300.0)
    assert scene.step(2) == 150.0


def test_every_held_out_set_has_its_accuracies_in_the_summary(folder: RunFolder):
    sets = "data.eval=[{name: aime, path: a, samples: 4}, {name: sampled, path: b}]"
    scene = Scene(folder, sets, "evaluation.stop=null", "evaluation.goals=[]")
    counts = {"version": 3, "num_asked": 4, "num_answered": 4}
    right = {"aime": 1, "sampled": 3}
    found = {name: EvaluationResult(id=name, purpose=name, num_correct=n, **counts) for name, n in right.items()}
    scene.log.record_before(found)
    scene.log.start_training(step=0)
    scene.step(1)
    summary = scene.summary(after=found)
    assert (summary["accuracy_aime"], summary["accuracy_before_aime"], summary["accuracy_before"]) == (0.25, 0.25, 0.75)
    assert summary["num_final_prompts"] == {"aime": 1, "sampled": 4}, "samples are not prompts"
    expected = "final evaluation on 1 or 4 prompts: accuracy 0.250 aime, 0.750 sampled"
    assert verdict(scene.run, summary) == f"done after 1 steps; {expected}"


class Watched:
    def __init__(self, healthy: Range) -> None:
        self.texts: list[str] = []
        self.alerts = MetricAlerts(self.texts.append, ranges={"learner/ess": healthy})

    def check(self, *values: float, **others: float) -> list[str]:
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


def test_metrics_that_leave_in_one_step_are_one_event_and_a_spike_is_seen_against_the_median():
    texts: list[str] = []
    MetricAlerts(texts.append, ranges={"a": Range(high=1.0), "b": Range(low=0.0)}).check({"a": 2.0, "b": -1.0})
    assert texts == ["a is 2, healthy is <= 1, b is -1, healthy is >= 0: "]
    scene = Watched(Range(high=10.0, of_median=True))
    assert scene.check(*[100.0] * 3) == scene.check(*[2.0] * 20, 19.0) == []
    assert scene.check(21.0) == ["learner/ess is 21, healthy is <= 10 x its median: "]


def test_patience_is_in_steps_in_a_row_and_ranges_depend_on_stale_tokens_and_correctness():
    scene = Watched(Range(high=0.5, patience=3))
    assert scene.check(0.9, 0.9, 0.1, 0.9, 0.9) == []
    assert len(scene.check(0.9)) == 1
    scene = Watched(Range(high=0.5, only_stale=True))
    assert scene.check(0.9, 0.9) == scene.check(0.9, **{"lag/max": 0}) == []
    assert len(scene.check(0.9, **{"lag/max": 2})) == 1
    scene = Watched(Range(low=0.1, min_wrong=0.1))
    assert scene.check(0.05, **{"learner/correct_fraction": 0.95}) == []
    assert len(scene.check(0.05, **{"learner/correct_fraction": 0.6})) == 1
    assert len(Watched(Range(low=0.1, min_wrong=0.1)).check(0.05)) == 1, "correctness is not known"


@cases(
    "values, num_steps",
    ({"learner/advantage_zero_fraction": 1.0}, 2),
    ({"learner/truncated_fraction": 1.0}, 2),
    ({"learner/entropy": 0.05, "learner/correct_fraction": 0.5}, 3),
    ({"learner/correct_fraction": 0.0, "learner/reward_mean": 0.4}, 20),
)
def test_what_beginners_get_wrong_is_told_within_a_few_steps(values: dict[str, float], num_steps: int):
    texts: list[str] = []
    alerts = MetricAlerts(texts.append, run=make_run(make_model))
    for step in range(1, num_steps + 1):
        assert texts == [], step
        alerts.check(values)
    assert len(texts) == 1
    assert next(iter(values)) in texts[0]


def test_nan_is_unhealthy_and_every_range_is_of_a_metric_and_says_what_to_do():
    for healthy in (Range(high=1.0), Range(low=1.0)):
        (alert,) = Watched(healthy).check(float("nan"))
        assert "is nan" in alert
        assert "log-probabilities that are not finite" in alert
    assert {key.replace("by_lag/0/", "") for key in RANGES} <= keys_under(STEP, TOKENS)
    assert [key for key, healthy in RANGES.items() if not (healthy.advice and str(healthy))] == []


def test_the_events_of_a_run_are_where_the_status_looks(tmp_path):
    run = make_run(make_model(tmp_path), runs_dir=str(tmp_path))
    store, folder = open_run(MemoryStore()), RunFolder(run)
    folder.open()
    log = MetricsLog(run, folder=folder, store=store)
    metrics = {"learner/tokens": 1.0, "learner/reward_mean": 0.5, "lag/mean": 0.0, "lag/max": 0, "learner/ess": 0.1}
    for step in (1, 2):
        log.add_step(step=step, version=step, metrics=metrics, published=None, evaluated=None, times={})
    (event,) = store.events(limit=5)
    assert event.role == "learner"
    assert event.text.startswith("learner/ess is 0.1, healthy is >= 0.3: the answers come from older weights")
    assert "staleness.max_lag (now 4, mean lag 0)" in event.text


DEADLINE_S = 20.0


class Slow(StepTokens):
    """Statistics that block their writer until `may_end` is set."""

    begun, may_end = threading.Event(), threading.Event()

    def to_table(self) -> pa.Table:
        self.begun.set()
        assert self.may_end.wait(DEADLINE_S)
        return super().to_table()


def test_a_slow_disk_costs_files_and_no_waiting(tmp_path: Path) -> None:
    writer = StepTokensWriter(tmp_path, max_gib=1, in_background=True)
    with capture_logs() as logged:
        writer.add(1, Slow(*ONE))
        assert Slow.begun.wait(DEADLINE_S)
        for step in range(2, 8):
            writer.add(step, ONE)
        Slow.may_end.set()
        writer.close()
    assert [(each["event"], each["step"]) for each in logged] == [("token_stats_not_written", n) for n in (6, 7)]
    assert [path.name[-9] for path in sorted(tmp_path.iterdir())] == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize("in_background", [False, True])
def test_a_disk_that_refuses_costs_the_file_alone(tmp_path: Path, in_background: bool) -> None:
    folder = tmp_path / "token_stats"
    folder.write_text("no folder")
    writer = StepTokensWriter(folder, max_gib=1, in_background=in_background)
    with capture_logs() as logged:
        writer.add(1, ONE)
        writer.close()
        assert [(each["event"], each["step"]) for each in logged] == [("token_stats_not_written", 1)]


def test_files_beyond_the_room_go_also_those_of_a_process_before(tmp_path: Path) -> None:
    sizes = [write_step(tmp_path, step, ONE) for step in range(1, 5)]
    writer = StepTokensWriter(tmp_path, max_gib=2.5 * sizes[0] / 2**30, in_background=False)
    for step in (5, 6, 7):
        writer.add(step, ONE)
        assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{n:08}.parquet" for n in (step - 1, step)]
