"""Training only from stored rollouts: on one rank and on two, without vLLM, and with other rewards."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests import runs

pytestmark = pytest.mark.slow

SMALL = (
    "model.path=models/digits-random",
    "prepare=[]",
    "learner.groups_per_step=4",
    "learner.max_steps=3",
    "evaluation.monitor_prompts=4",
    "evaluation.final_prompts=8",
)
REPLAY = ("experiment=digits_replay", "replay.path=elsewhere", *SMALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A serial run of which only the archive and metrics remain, and a vLLM that must not be imported."""
    made = runs.make_task(tmp_path_factory.mktemp("replay"), warm=False)
    runs.train(made, "experiment=digits_serial", "name=first", *SMALL)
    (made / "runs" / "first" / "archive").rename(made / "elsewhere")
    (made / "poison" / "vllm").mkdir(parents=True)
    (made / "poison" / "vllm" / "__init__.py").write_text("raise RuntimeError('vLLM was imported')\n")
    return made


def replay(folder: Path, name: str, *overrides: str, timeout_s: float = 240) -> list[dict[str, Any]]:
    """The rows of a replay whose processes cannot import vLLM."""
    done = subprocess.run(
        runs.command(*REPLAY, f"name={name}", *overrides),
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(folder / "poison"), str(runs.ROOT)])},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return runs.metrics(folder, name)


def losses(rows: list[dict[str, Any]]) -> list[float]:
    return [row["learner/loss"] for row in rows]


def weights(folder: Path, name: str) -> dict[str, Any]:
    return load_file(folder / "runs" / name / "final_model" / "model.safetensors")


def test_a_replay_of_an_archive_reproduces_the_losses_bit_for_bit_and_evaluates_each_step(folder: Path):
    rows = replay(folder, "again", "evaluation.every_steps=2")
    assert losses(rows) == losses(runs.metrics(folder, "first"))
    assert [(row["step"], row["eval/version"]) for row in rows if "eval/accuracy_sampled" in row] == [(2, 2)]


def test_another_algorithm_trains_on_the_same_rollouts(folder: Path):
    first, other = runs.metrics(folder, "first"), replay(folder, "otherwise", "algorithm/advantage=rloo")
    assert [row["learner/reward_mean"] for row in other] == [row["learner/reward_mean"] for row in first]
    assert losses(other) != losses(first)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["deepspeed_zero2", "deepspeed_zero3"])
def test_two_ranks_make_the_weights_of_one(folder: Path, engine: str):
    rows = replay(folder, engine, "learner.num_ranks=2", f"learner/engine={engine}")
    assert losses(rows) == pytest.approx(losses(runs.metrics(folder, "first")), abs=1e-6)
    one, two = weights(folder, "first"), weights(folder, engine)
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-5


def test_the_same_reward_function_changes_nothing_and_a_different_one_does(folder: Path):
    first = runs.metrics(folder, "first")
    same = "replay.rescore=slipstream.generators.rewards.functions:position_match"
    assert losses(replay(folder, "same", same)) == losses(first)
    other = replay(folder, "exact", "replay.rescore=slipstream.generators.rewards.functions:exact_match")
    assert [row["learner/reward_mean"] for row in other] != [row["learner/reward_mean"] for row in first]


def test_a_damaged_ledger_is_refused_in_one_sentence_before_a_folder_is_made(folder: Path):
    ledger = folder / "elsewhere" / "ledger.jsonl"
    whole = ledger.read_text()
    first, *others = whole.splitlines(keepends=True)
    line = json.loads(first)
    ledger.write_text(json.dumps(line | {"checksum": "0" * 16}) + "\n" + "".join(others))
    done = subprocess.run(
        runs.command(*REPLAY, "name=never"), cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    ledger.write_text(whole)
    assert done.returncode == 2
    assert done.stderr.startswith("error: line 1 of elsewhere/ledger.jsonl must hold a step")
    assert not (folder / "runs" / "never").exists()
