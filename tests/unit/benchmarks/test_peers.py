"""The comparison with other trainers: what both sides are given, and what is read from their rows."""

from argparse import Namespace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.peers.__main__ import _ENGINES, figures, num_parameters
from benchmarks.peers.tasks import TASKS, save_long_tail_model
from benchmarks.staleness.lagging_run import LaggingRun, Point, summarize
from benchmarks.staleness.model import make_model
from benchmarks.staleness.plans import METHODS, Plan, make_config, make_plans
from slipstream.buffer.trajectory import Trajectory
from slipstream.configs.algorithm import AlgorithmConfig
from slipstream.configs.data import DataConfig
from slipstream.configs.load import convert, load
from slipstream.learner.training.model import Policy
from slipstream.scripts.init_random_model import make_tokenizer, save_model
from slipstream.scripts.make_digits_data import make_files
from tests.unit.learner.builders import make_samples, measure_alone, weights

LAG = 2


@pytest.mark.parametrize("engine", _ENGINES)
@pytest.mark.parametrize("name", TASKS)
def test_both_sides_of_a_task_are_given_the_same(name, engine):
    task = TASKS[name]
    run = load([*task.settings(), *_ENGINES[engine]])
    peer = task.peer(threads=2, folder=Path("out"), seed=3)
    ours = {
        "model": run.model.path,
        "train": run.data.train,
        "groups": run.learner.prompts_per_step,
        "group_size": run.generators.group_size,
        "max_tokens": run.generators.sampling.max_tokens,
        "learning_rate": run.learner.optimizer.learning_rate,
        "warmup_steps": run.learner.optimizer.warmup_steps,
        "steps": run.learner.max_steps,
    }
    assert {key: peer[key] for key in ours} == ours


def test_figures_are_of_the_second_half_and_the_goal_of_all():
    slow = {"tokens": 100.0, "accuracy": 0.1, "wait_s": 9.0}
    rows = [{"step": step, "time_s": 10.0 * step} | slow for step in range(1, 5)]
    # The third of them is above the goal, the mean of three with the fifth.
    for step, accuracy in enumerate((0.8, 0.85, 0.95, 0.85, 0.91, 0.9), 5):
        rows.append({"step": step, "time_s": 36.0 + step, "tokens": 30.0, "accuracy": accuracy, "wait_s": 0.25})
    found = figures(rows, TASKS["default"], parameters=1_000_000, peak_gflops=10.0)
    # Per second, 30 answer tokens and 32 prompts of 6 tokens, with 8 operations per parameter.
    speed = {"seconds_per_step": 1.0, "wait_s": 0.25, "tokens_per_s": 30.0}
    speed["peak_share"] = pytest.approx(8e-3 * (30 + 192) / 10)
    assert found == speed | {"seconds_to_goal": 45.0, "steps_to_goal": 9}
    speed["peak_share"] = pytest.approx(8e-3 * (30 + 16 * 6) / 10)
    assert figures(rows, TASKS["long tail"], parameters=1_000_000, peak_gflops=10.0) == speed


def test_tied_parameters_count_once(tmp_path: Path):
    save_long_tail_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert num_parameters(tmp_path) == sum(each.numel() for each in model.parameters())


def make_lagging_run(folder: Path, **changes: int) -> LaggingRun:
    torch.set_num_threads(1)
    plan = Plan("token_tis", LAG, replay=0, seed=0, steps=4, groups=3, learning_rate=1e-2)._replace(**changes)
    if not (folder / "data").exists():
        make_files(folder / "data", task="reverse", digits=5, train_rows=40, heldout_rows=300, seed=0)
        save_model(folder / "model", model=make_model(seed=0), tokenizer=make_tokenizer())
    data = DataConfig(str(folder / "data/train.parquet"), str(folder / "data/heldout.parquet"), max_prompt_tokens=16)
    return LaggingRun(plan, config=msgspec.structs.replace(make_config(plan, model=str(folder / "model")), data=data))


def largest_difference(version: dict[str, torch.Tensor], members: list[Trajectory]) -> float:
    """Largest difference between recorded log-probabilities and those of a forward pass without a cache."""
    model = make_model(seed=1).eval()
    model.load_state_dict(version)
    recorded = np.concatenate([member.generator_logprobs[member.model_mask] for member in members])
    return float(np.abs(measure_alone(Policy(model), make_samples(members)).numpy() - recorded).max())


def test_a_batch_is_sampled_from_the_policy_of_lag_versions_before(tmp_path: Path) -> None:
    run = make_lagging_run(tmp_path)
    versions = [weights(run.trainer)]
    for step in range(5):
        members = [member for group in run.step() for member in group]
        expected = max(0, step - LAG)
        assert {span.version for member in members for span in member.version_spans} == {expected}
        assert largest_difference(versions[expected], members) < 1e-5
        assert step == 0 or largest_difference(versions[step], members) > 1e-3
        versions.append(weights(run.trainer))


def test_the_same_plan_gives_the_same_run_and_each_replayed_batch_makes_a_version(tmp_path: Path) -> None:
    first, second = ([p._replace(seconds=0.0) for p in make_lagging_run(tmp_path).points()] for _ in range(2))
    assert first == second
    run = make_lagging_run(tmp_path, lag=0, replay=2)
    labels = [run.step()[0][0].version_spans[0].version for _ in range(3)]
    assert labels == [0, 3, 6]
    assert run.trainer.num_updates == 9


def test_figures_of_a_report_mean_what_their_names_say_and_plans_are_distinct() -> None:
    accuracies = [0.1, 0.95, 0.5, 0.5, 0.5, 0.5, 1.0]
    points = [Point(20 * n, 100 * n, 2.0 * n, accuracy, 1.0) for n, accuracy in enumerate(accuracies)]
    summary = summarize(points)
    assert summary["final"] == pytest.approx(0.6)
    assert (summary["goal_step"], summary["goal_samples"], summary["goal_s"], summary["best"]) == (20, 100, 2.0, 1.0)
    assert summarize(points[:1])["goal_s"] is None
    settings = {"steps": 1, "groups": 1, "learning_rate": 1e-3, "seeds": (0, 1)}
    lagging = [*make_plans(Namespace(lags=(0, 8), replay=(), methods=None, **settings))]
    replayed = [*make_plans(Namespace(lags=(0, 8), replay=(0, 3), methods=None, **settings))]
    assert len(set(lagging)) == 2 * 2 * len(METHODS)
    assert len(set(replayed)) == 2 * 2 * 2
    assert {plan.lag for plan in replayed} == {0}
    assert convert(METHODS["default"].algorithm, AlgorithmConfig) == load([]).algorithm, "without a recipe"


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_a_legal_algorithm(name: str) -> None:
    plan = Plan(name, 0, replay=0, seed=0, steps=4, groups=32, learning_rate=1e-3)
    config = make_config(plan, model="unread")
    assert config.learner.optimizer.learning_rate == pytest.approx(1e-3 * METHODS[name].rate)
