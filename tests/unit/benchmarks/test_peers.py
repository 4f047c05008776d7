"""The comparison with other trainers: what both sides are given, and what is read from their rows."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from benchmarks.peers.__main__ import _ENGINES, figures, num_parameters
from benchmarks.peers.tasks import TASKS, save_long_tail_model
from slipstream.configs.load import load


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
    rows = [{"step": step, "time_s": 10.0 * step, "tokens": 100.0, "accuracy": 0.1} for step in range(1, 5)]
    # The third of them is above the goal, the mean of three with the fifth.
    for step, accuracy in enumerate((0.8, 0.85, 0.95, 0.85, 0.91, 0.9), 5):
        rows.append({"step": step, "time_s": 36.0 + step, "tokens": 30.0, "accuracy": accuracy})
    found = figures(rows, TASKS["default"], parameters=1_000_000, peak_gflops=10.0)
    # Per second, 30 answer tokens and 32 prompts of 6 tokens, with 8 operations per parameter.
    speed = {"seconds_per_step": 1.0, "tokens_per_s": 30.0, "peak_share": pytest.approx(8e-3 * (30 + 192) / 10)}
    assert found == speed | {"seconds_to_goal": 45.0, "steps_to_goal": 9}
    speed["peak_share"] = pytest.approx(8e-3 * (30 + 16 * 6) / 10)
    assert figures(rows, TASKS["long tail"], parameters=1_000_000, peak_gflops=10.0) == speed


def test_tied_parameters_count_once(tmp_path: Path):
    save_long_tail_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert num_parameters(tmp_path) == sum(each.numel() for each in model.parameters())
