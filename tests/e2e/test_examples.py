"""The examples in a short form: every command, with fewer steps."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import runs

pytestmark = pytest.mark.slow

SERIAL = (
    "mode=serial",
    "weights.transport=memory",
    "generators/engine=hf",
    "learner/engine=torch",
    "learner.stop=null",
    "buffer.staleness.max_lag=0",
    "learner.groups_per_step=4",
    "evaluation.monitor_prompts=4",
    "evaluation.final_prompts=8",
    "evaluation.every_steps=0",
)
"""All roles in one process, with small steps."""
SUMS = (
    ("make_digits_data", "--task=addition", "--train-rows=200", "--heldout-rows=40", "--out=data/addition"),
    (
        *("init_random_model", "--architecture=gpt2", "--layers=2", "--width=64", "--max-length=64"),
        "--out=models/addition-gpt2",
    ),
)
PRODUCTS = "learner/by_source/multiplication/"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    # The examples' modules and settings are found from the checkout's root.
    (tmp_path / "examples").symlink_to(runs.ROOT / "examples")
    return tmp_path


def test_mathematics(folder: Path):
    for module, *arguments in SUMS:
        runs.run_script(folder, f"slipstream.scripts.{module}", *arguments)
    begin = ("prepare=[]", "model.path=models/addition-gpt2", "learner.max_steps=2")
    runs.train(folder, "experiment=addition_cpu", *SERIAL, *begin)
    rows = runs.metrics(folder, "addition_cpu")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        # An untrained model gets some digits right by chance.
        assert 0 < row["learner/by_source/digits/addition/reward_mean"] < 0.5
        assert row["learner/mismatch_max"] < 1e-4


def test_calculator(folder: Path):
    steps = ("sft.epochs=null", "learner.max_steps=60", "learner/engine=torch")
    runs.run_script(folder, "slipstream", "sft", "experiment=examples/calculator/sft.yaml", *steps)
    runs.train(folder, "experiment=examples/calculator/run.yaml", *SERIAL, "learner.max_steps=2")
    for row in runs.metrics(folder, "calculator"):
        # A quarter of the demonstrations call it.
        assert 0.05 < row[PRODUCTS + "agent_tool_calls"] < 0.6
        assert row[PRODUCTS + "turns_mean"] > 1
        assert row["learner/mismatch_max"] < 1e-4


DIGITS = (
    "prepare=[]",
    "model.path=models/digits-random",
    "generators/engine=hf",
    "learner/engine=torch",
    "generators.group_size=4",
    "learner.groups_per_step=2",
    "buffer.staleness.max_lag=0",
    "learner.max_steps=2",
    "evaluation.every_steps=0",
    "evaluation.monitor_prompts=2",
    "evaluation.final_prompts=4",
)
"""A random model of digits, processes for the roles, and two small steps."""


@contextmanager
def beside(folder: Path, *command: str) -> Iterator[None]:
    """Run a command in the folder for the duration of the context."""
    process = subprocess.Popen([sys.executable, *command], cwd=folder)
    try:
        yield
    finally:
        runs.kill_tree(process)


def test_a_black_box_agent_through_the_door(folder: Path):
    runs.make_task(folder, warm=False)
    with beside(folder, "examples/black_box_agent/agent.py", "runs/black_box"):
        runs.train(folder, "experiment=examples/black_box_agent/run.yaml", "name=black_box", *DIGITS, timeout_s=100)
    rows = runs.metrics(folder, "black_box")
    own = "learner/by_source/digits/reverse/"
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row[own + "failed_fraction"] == 0
        assert row[own + "turns_mean"] == 1 + row[own + "agent_asked_again"] > 1
        # The agent's reward, not a reward function's: half a share for each of five digits.
        assert 0 < row[own + "reward_mean"] < 0.5
        assert row["learner/mismatch_max"] < 1e-3


def test_a_reward_model_is_trained_from_pairs_and_rewards(folder: Path):
    run_name, own = "digits_by_reward_model", "learner/by_source/digits/reverse/"
    random_model = ("prepare=[]", "model.path=models/digits-random", "learner/engine=torch")
    runs.make_task(folder, warm=False)
    runs.run_script(folder, "examples.reward_model.make_pairs")
    small = ("sft.epochs=null", "sft.trajectories_per_step=32", "sft.heldout_rows=100", "sft.heldout_every_steps=0")
    steps = (*random_model, *small, "learner.max_steps=20")
    runs.run_script(folder, "slipstream", "sft", "experiment=examples/reward_model/pairs.yaml", *steps)
    found = runs.summary(folder, "digits_reward_model")
    assert found["heldout_loss"] < 0.9 * found["heldout_loss_before"]
    runs.train(folder, "experiment=examples/reward_model/run.yaml", *SERIAL, *random_model, "learner.max_steps=2")
    for row in runs.metrics(folder, run_name):
        assert row[own + "failed_fraction"] == 0
        # The taste is measured separately and not added to the score.
        assert row[own + "reward_mean"] == pytest.approx(row[own + "part_reward_model"])
        assert -1 <= row[own + "part_taste"] <= 1


def short_run(folder: Path, name: str, *overrides: str) -> list[dict[str, float]]:
    """Run some steps of both kinds of training. Returns the rows of the reinforcement run."""
    steps = ("sft.epochs=null", "learner.max_steps=60", "learner/engine=torch")
    runs.run_script(folder, "slipstream", "sft", f"experiment=examples/{name}/sft.yaml", *steps)
    runs.train(folder, f"experiment=examples/{name}/run.yaml", *SERIAL, "learner.max_steps=2", *overrides)
    return runs.metrics(folder, name)


def test_search(folder: Path):
    pytest.importorskip("tantivy")
    for row in short_run(folder, "search"):
        # A quarter of the demonstrations search, and no answer is right without a search.
        assert 1.05 < row["learner/by_source/codes/turns_mean"] < 1.6
        assert row["learner/by_source/codes/agent_tool_failures"] == 0
        assert row["learner/mismatch_max"] < 1e-4


@pytest.mark.long
def test_interaction(folder: Path):
    for row in short_run(folder, "interaction"):
        # Each correction costs part of the reward.
        assert 1.2 < row["learner/by_source/correction/turns_mean"] <= 2
        assert -0.6 < row["learner/by_source/correction/part_turns"] < 0
        assert row["learner/mismatch_max"] < 1e-4


@pytest.mark.long
def test_reasoning_gym(folder: Path):
    pytest.importorskip("reasoning_gym")
    for row in short_run(folder, "reasoning_gym"):
        own = "learner/by_source/reasoning_gym/spell_backward/"
        assert row[own + "failed_fraction"] == 0
        # Its verifier gives a share of the reward for each correctly placed letter.
        assert row[own + "correct_fraction"] < row[own + "reward_mean"] < 0.9
        assert row["learner/mismatch_max"] < 1e-4


VERIFIERS = os.environ.get("SLIPSTREAM_VERIFIERS_PYTHON", "")


@pytest.mark.skipif(not VERIFIERS, reason="SLIPSTREAM_VERIFIERS_PYTHON names no Python with verifiers")
def test_a_verifiers_environment(folder: Path, monkeypatch: pytest.MonkeyPatch):
    beside = runs.ROOT / "examples" / "verifiers_environment"
    monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}{os.pathsep}{beside}")
    (folder / "envs").mkdir()
    (folder / "envs" / "verifiers").symlink_to(Path(VERIFIERS).parents[1])
    for row in short_run(folder, "verifiers_environment"):
        own = "learner/by_source/sums_v1/"
        assert (row[own + "failed_fraction"], row[own + "turns_mean"]) == (0, 2)
        # The rubric's reward, not a reward function's.
        parts = row[own + "part_right"] + row[own + "part_short"]
        assert row[own + "reward_mean"] == pytest.approx(parts)
        assert row["learner/mismatch_max"] < 1e-4
