"""The examples in a short form: every command, with fewer steps."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import runs

pytestmark = pytest.mark.slow

SERIAL = (
    *("mode=serial", "weights.transport=memory", "generators/engine=hf", "learner/engine=torch"),
    *("evaluation.stop=null", "staleness.max_lag=0", *runs.FEW),
)
"""All roles in one process, with small steps."""
REVERSE = "learner/by_source/digits/reverse/"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    # The examples' modules and settings are found from the checkout's root.
    (tmp_path / "examples").symlink_to(runs.ROOT / "examples")
    return tmp_path


def sft(folder: Path, experiment: str, *overrides: str) -> None:
    steps = ("learner.max_steps=60", "learner/engine=torch")
    runs.run_script(folder, "slipstream", "sft", f"experiment=examples/{experiment}.yaml", *steps, *overrides)


def short_run(folder: Path, name: str) -> list[dict[str, float]]:
    """Run some steps of both kinds of training. Returns the rows of the reinforcement run."""
    sft(folder, f"{name}/sft")
    runs.train(folder, f"experiment=examples/{name}/run.yaml", *SERIAL, "learner.max_steps=2")
    return runs.metrics(folder, name)


def long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.long
def test_mathematics(folder: Path):
    sums = ("--task=addition", "--train-rows=200", "--heldout-rows=40", "--out=data/addition")
    runs.run_script(folder, "slipstream.scripts.make_digits_data", *sums)
    model = ("--architecture=gpt2", "--layers=2", "--width=64", "--max-length=64", "--out=models/addition-gpt2")
    runs.run_script(folder, "slipstream.scripts.init_random_model", *model)
    begin = ("prepare=[]", "model.path=models/addition-gpt2", "learner.max_steps=2")
    runs.train(folder, "experiment=addition_cpu", *SERIAL, *begin)
    rows = runs.metrics(folder, "addition_cpu")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        # An untrained model gets some digits right by chance.
        assert 0 < row["learner/by_source/digits/addition/reward_mean"] < 0.5
        assert row["learner/mismatch_max"] < 1e-4


@pytest.mark.parametrize(
    ("name", "source", "bounds", "library"),
    [
        # A quarter of the demonstrations call it.
        ("calculator", "multiplication", {"agent_tool_calls": (0.05, 0.6), "turns_mean": (1.01, 3)}, "transformers"),
        # A quarter of the demonstrations search, and no answer is right without a search.
        long("search", "codes", {"turns_mean": (1.05, 1.6), "agent_tool_failures": (0, 0)}, "tantivy"),
        # Each correction costs part of the reward.
        long("interaction", "correction", {"turns_mean": (1.2, 2), "part_turns": (-0.6, -0.001)}, "transformers"),
        # Its verifier gives a share of the reward for each correctly placed letter.
        long("reasoning_gym", "reasoning_gym/spell_backward", {"reward_mean": (0.01, 0.9)}, "reasoning_gym"),
    ],
)
def test_demonstrations_then_rewards(
    folder: Path, name: str, source: str, bounds: dict[str, tuple[float, float]], library: str
):
    pytest.importorskip(library)
    for row in short_run(folder, name):
        assert row["learner/mismatch_max"] < 1e-4
        own = {key: row[f"learner/by_source/{source}/{key}"] for key in (*bounds, "failed_fraction")}
        assert own.pop("failed_fraction") == 0
        for key, (low, high) in bounds.items():
            assert low <= own[key] <= high, key


# In CI: tests/unit/generators/agents/test_external.py.
@pytest.mark.long
def test_a_black_box_agent_through_the_door(folder: Path):
    runs.make_task(folder, warm=False)
    command = [sys.executable, "examples/black_box_agent/agent.py", "runs/black_box"]
    agent = runs.start(folder / "agent.out", command, folder)
    try:
        small = ("generators.group_size=4", "generators/engine=hf", "learner/engine=torch", "learner.max_steps=2")
        run = ("experiment=examples/black_box_agent/run.yaml", "name=black_box", "staleness.max_lag=0")
        runs.train(folder, *run, *runs.RANDOM, *runs.FEW, *small, timeout_s=100)
    finally:
        runs.kill_tree(agent)
    rows = runs.metrics(folder, "black_box")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row[REVERSE + "failed_fraction"] == 0
        assert row[REVERSE + "turns_mean"] == 1 + row[REVERSE + "agent_asked_again"] > 1
        # The agent's reward, not a reward function's: half a share for each of five digits.
        assert 0 < row[REVERSE + "reward_mean"] < 0.5
        assert row["learner/mismatch_max"] < 1e-3


# In CI: pairs in tests/unit/learner/sft/test_run.py, models that score in tests/unit/generators/rewards/test_pool.py.
@pytest.mark.long
def test_a_reward_model_is_trained_from_pairs_and_rewards(folder: Path):
    runs.make_task(folder, warm=False)
    runs.run_script(folder, "examples.reward_model.make_pairs")
    small = ("sft.batch_size=32", "sft.eval_rows=100", "sft.eval_every_steps=0")
    sft(folder, "reward_model/pairs", *runs.RANDOM, *small, "learner.max_steps=20")
    found = runs.summary(folder, "digits_reward_model")
    assert found["eval_loss"] < 0.9 * found["eval_loss_before"]
    run = ("experiment=examples/reward_model/run.yaml", "learner.max_steps=2")
    runs.train(folder, *run, *SERIAL, *runs.RANDOM)
    for row in runs.metrics(folder, "digits_by_reward_model"):
        assert row[REVERSE + "failed_fraction"] == 0
        # The taste is measured separately and not added to the score.
        assert row[REVERSE + "reward_mean"] == pytest.approx(row[REVERSE + "part_reward_model"])
        assert -1 <= row[REVERSE + "part_taste"] <= 1


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
