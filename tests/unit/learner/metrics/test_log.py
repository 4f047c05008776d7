import json
from pathlib import Path

import numpy as np
import pytest

from slipstream.buffer.archive.step_tokens import StepTokens
from slipstream.buffer.records import EvaluationResult
from slipstream.configs.load import load
from slipstream.learner.metrics_log import MetricsLog
from slipstream.observe.results import verdict
from slipstream.runtime.run_folder import RunFolder
from tests.fakes import FakeClock
from tests.memory_store.store import MemoryStore

ROW = {"learner/tokens": 1.0, "learner/reward_mean": 0.5, "lag/mean": 0.0, "lag/max": 0, "lag/histogram": {0: 1}}
TOKENS = StepTokens(["0-0-0"], [3], [np.array([2])], {"entropy": np.array([0.5], np.float32)})


def evaluated(accuracy: float) -> dict:
    counts = {"version": 1, "num_asked": 100, "num_answered": 100, "num_correct": round(100 * accuracy)}
    return {p: EvaluationResult(id=p, purpose=p, **counts) for p in ("sampled", "greedy")}


def train(
    folder: RunFolder, steps: range, *, lag: int, accuracy: dict[int, float] | None = None, goals: str | None = None
) -> dict:
    """Steps of one second and a thousand tokens; returns the summary."""
    clock, store = FakeClock(100.0), MemoryStore()
    store.open_run("run", config_json="{}", num_rows=1, seed=0)
    overrides = [] if goals is None else [f"evaluation.goals={goals}"]
    log = MetricsLog(load(["experiment=digits_cpu", *overrides]), folder=folder, store=store, clock=clock)
    clock.now += 60.0
    log.start_training(step=steps.start - 1)
    for step in steps:
        clock.now += 1.0
        metrics = ROW | {"learner/tokens": 1000.0, "lag/mean": lag, "lag/max": lag, "lag/histogram": {lag: 1000}}
        found = {"eval/accuracy_sampled": accuracy[step]} if accuracy and step in accuracy else None
        log.add_step(step=step, version=step, metrics=metrics, published=None, evaluated=found, times={}, tokens=TOKENS)
    log.end_training()
    log.write_summary(step=steps.stop - 1, after=evaluated(0.95), evaluation={})
    return json.loads((folder.path / "summary.json").read_text())


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


class GeneratorScene:
    """The log of a run whose generators report their tokens."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.clock = FakeClock(100.0)
        self.store = MemoryStore(clock=self.clock)
        self.store.open_run("run", config_json="{}", num_rows=1, seed=0)
        self.log = MetricsLog(load(["experiment=digits_cpu"]), folder=folder, store=self.store, clock=self.clock)

    def report(self, **tokens: float | None) -> None:
        """Report the tokens of each generator since its start, at 100 tokens/s; None: it has left."""
        for name, total in tokens.items():
            here = {"state": "ready", "tokens": total, "tokens_per_s": 100.0}
            self.store.report_role(name, {"role": "generator", **({"state": "gone"} if total is None else here)})

    def step(self, number: int) -> float | None:
        """Log a step of one second; returns the generated tokens per second of its row, None if unknown."""
        self.clock.now += 1.0
        self.log.add_step(step=number, version=number, metrics=ROW, published=None, evaluated=None, times={})
        return self.store.metrics().rows[-1].get("generators/tokens_per_s")

    def generated_tokens_per_s(self) -> float:
        self.log.end_training()
        self.log.write_summary(step=1, after=evaluated(0.95), evaluation={})
        return float(json.loads((self.folder.path / "summary.json").read_text())["generated_tokens_per_s"])


def test_generators_that_leave_restart_and_join_are_counted_for_what_they_generated(folder: RunFolder):
    scene = GeneratorScene(folder)
    scene.report(leaves=5000, restarts=9000, stays=700)
    scene.log.start_training(step=0)
    scene.report(leaves=5100, restarts=9200, stays=800)
    scene.step(1)
    scene.report(leaves=None, restarts=50, stays=900, joins=30)
    scene.step(2)
    scene.report(after_the_last_step=40)
    assert scene.generated_tokens_per_s() == (100 + 200 + 100 + 50 + 100 + 30 + 40) / 2


def test_the_rate_of_a_row_is_the_mean_of_the_last_ten_steps(folder: RunFolder):
    scene = GeneratorScene(folder)
    scene.log.start_training(step=0)
    scene.report(bursts=300.0)
    assert scene.step(1) == 300.0
    assert [scene.step(number) for number in (2, 3)] == [150.0, 100.0], "no token has arrived since"
    scene.report(bursts=600.0)
    assert [scene.step(number) for number in range(4, 14)][-4:] == [60.0, 30.0, 30.0, 30.0]


def test_the_rate_before_the_first_report_is_unknown(folder: RunFolder):
    scene = GeneratorScene(folder)
    scene.log.start_training(step=0)
    assert scene.step(1) is None
    scene.report(late=300.0)
    assert scene.step(2) == 150.0


def test_every_held_out_set_has_its_accuracies_in_the_summary(folder: RunFolder):
    sets = "data.eval=[{name: aime, path: a, samples: 4}, {name: sampled, path: b}]"
    run = load(["experiment=digits_cpu", sets, "evaluation.stop=null", "evaluation.goals=[]"])
    counts = {"version": 3, "num_asked": 4, "num_answered": 4}
    found = {
        name: EvaluationResult(id=name, purpose=name, num_correct=right, **counts)
        for name, right in (("aime", 1), ("sampled", 3))
    }
    store = MemoryStore()
    store.open_run("run", config_json="{}", num_rows=1, seed=0)
    log = MetricsLog(run, folder=folder, store=store, clock=FakeClock(0.0))
    log.record_before(found)
    log.start_training(step=0)
    log.add_step(step=1, version=1, metrics=ROW, published=None, evaluated=None, times={})
    log.end_training()
    log.write_summary(step=1, after=found, evaluation={})
    summary = json.loads((folder.path / "summary.json").read_text())
    assert (summary["accuracy_aime"], summary["accuracy_before_aime"], summary["accuracy_before"]) == (0.25, 0.25, 0.75)
    assert summary["num_final_prompts"] == {"aime": 1, "sampled": 4}, "samples are not prompts"
    expected = "final evaluation on 1 or 4 prompts: accuracy 0.250 aime, 0.750 sampled"
    assert verdict(run, summary) == f"done after 1 steps; {expected}"
