"""The serial run is deterministic, reproduces its golden values, and is replayed from its archive alone."""

import json
import os
import shutil
import subprocess
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow.parquet import read_table
from safetensors.torch import load_file

from slipstream.buffer.archive.trajectory_filter import TrajectoryFilter
from slipstream.observe.catalog.catalog import CatalogQuery, open_catalog
from tests import runs

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[1] / "golden" / "serial_3_steps.json"
SYNCHRONOUS = ("staleness.max_lag=0", "learner.max_steps=3")
FINAL = "runs/adapter/final_model"
KEYS = ("learner/loss", "learner/reward_mean", "learner/grad_norm", "lag/mean", "version")
SMALL = (*runs.RANDOM, *runs.FEW, "learner.max_steps=8", "learner.optimizer.learning_rate=3e-4")
REPLAY = ("experiment=digits_replay", "replay.path=elsewhere", *SMALL, "learner.max_steps=3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make_task(tmp_path_factory.mktemp("serial"), warm=False)


@pytest.fixture(scope="module")
def first(folder: Path) -> list[dict[str, float]]:
    return train(folder, "first")


def train(folder: Path, name: str, *overrides: str) -> list[dict[str, float]]:
    runs.train(folder, "experiment=digits_serial", *SMALL, f"name={name}", *overrides)
    return [{key: row[key] for key in KEYS} for row in runs.metrics(folder, name)]


@pytest.mark.core
def test_a_serial_run_equals_the_recorded_one(first: list[dict[str, float]]):
    # On another processor, sums have another order. Each of fewer than 8,192 operations between a token and a metric
    # rounds by at most eps / 2 (kernels without AVX differ by 3e-7). A changed formula shows in the first digits.
    for row, expected in zip(first[:3], json.loads(GOLDEN.read_text()), strict=True):
        assert row == pytest.approx(expected, rel=8192 * torch.finfo(torch.float32).eps)
    # A version is applied immediately, so no token depends on threads: all tokens of the first max_lag + 1 steps are of
    # version 0, those of the next steps of version 5.
    assert [row["lag/mean"] for row in first] == [0, 1, 2, 3, 4, 0, 1, 2]


def test_an_adapter_is_published_and_saved(folder: Path):
    train(folder, "adapter", "model.lora.rank=4", *SYNCHRONOUS)
    for row in runs.metrics(folder, "adapter"):
        assert row["learner/mismatch_max"] < 1e-4
        assert row["weights/probe_diff_max"] < 1e-4
    saved, base = (load_file(folder / path / "model.safetensors") for path in (FINAL, "models/digits-random"))
    adapted = {name for name, tensor in base.items() if not tensor.equal(saved[name])}
    assert adapted == {name for name in base if "_proj.weight" in name}
    assert load_file(folder / FINAL / "adapter/adapter_model.safetensors")


@pytest.fixture(scope="module")
def synchronous(folder: Path) -> list[dict[str, float]]:
    return train(folder, "synchronous", *SYNCHRONOUS, "profile.steps=[2,3]")


@pytest.mark.core
def test_a_run_that_is_resumed_at_a_checkpoint_equals_one_without_a_break_bit_for_bit(
    folder: Path, synchronous: list[dict[str, float]]
):
    """The resumed run is not recorded, which changes no value."""
    roles = ("trajectories", "broker (", "generator-0 (", "learner (", "learner torch (")
    runs.assert_traced(folder, "synchronous", steps=(2, 3), per_step=4 * 8, processes=roles)
    changes = ("experiment=digits_serial", "name=resumed", *SYNCHRONOUS, "learner.checkpoint.every_steps=2")
    runs.run_script(folder, "tests.e2e.resumed_serial", *SMALL, *changes)
    assert [{key: row[key] for key in KEYS} for row in runs.metrics(folder, "resumed")] == synchronous
    straight, resumed = (folder / "runs" / name for name in ("synchronous", "resumed"))
    # The order of prompts, the sampled tokens, and their log-probabilities.
    columns = ["id", "prompt_uid", "token_ids", "generator_logprobs", "version_spans", "steps"]
    groups = [
        sorted(read_table(path / "archive/shard-00000001.parquet", columns=columns).to_pylist(), key=itemgetter("id"))
        for path in (straight, resumed)
    ]
    assert [each for each in groups[0] if each["steps"]] == [each for each in groups[1] if each["steps"]]
    first, second = (load_file(path / "final_model/model.safetensors") for path in (straight, resumed))
    assert all(tensor.equal(second[name]) for name, tensor in first.items())


@pytest.mark.usefixtures("synchronous")
def test_max_lag_zero_is_exactly_on_policy(folder: Path):
    rows = runs.metrics(folder, "synchronous")
    for row in rows:
        assert row["lag/max"] == 0
        assert row["learner/weight_mean"] == pytest.approx(1.0, abs=1e-4)
        assert row["learner/mismatch_max"] < 1e-4
    rates = [row["generators/tokens_per_s"] for row in rows if "generators/tokens_per_s" in row]
    assert rates
    assert min(rates) > 0
    # The values that trajectory pages show for each token.
    with open_catalog(str(folder / "runs/synchronous/archive")) as catalog:
        trained = catalog.page(CatalogQuery(TrajectoryFilter(step=3))).rows
        for member in catalog.group(trained[0].group_id):
            log_ratios, entropies = (member.numbers[f"learner_{name}"] for name in ("log_ratio", "entropy"))
            is_known = [number is not None for number in log_ratios]
            assert is_known == [number is not None for number in entropies] == member.model_mask
            assert max(abs(number) for number in log_ratios if number is not None) < 1e-3
            assert min(number for number in entropies if number is not None) > 0
    # With max_lag > 0, such a short run generates everything before its first step.
    assert runs.summary(folder, "synchronous")["generated_tokens_per_s"] > 0


@pytest.fixture(scope="module")
def stored(folder: Path, synchronous: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Rows of a run of which only the archive is left, elsewhere. A vLLM is in place that must not be imported."""
    shutil.copytree(folder / "runs" / "synchronous" / "archive", folder / "elsewhere")
    (folder / "poison" / "vllm").mkdir(parents=True)
    (folder / "poison" / "vllm" / "__init__.py").write_text("raise RuntimeError('vLLM was imported')\n")
    return runs.metrics(folder, "synchronous")


def call_replay(folder: Path, name: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    search = os.pathsep.join([str(folder / "poison"), str(runs.ROOT)])
    return runs.call(runs.command(*REPLAY, f"name={name}", *overrides), folder, PYTHONPATH=search)


def replay(folder: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    done = call_replay(folder, name, *overrides)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return runs.metrics(folder, name)


def column(rows: list[dict[str, Any]], name: str) -> list[float]:
    return [row[f"learner/{name}"] for row in rows]


def test_a_replay_reproduces_the_losses_bit_for_bit_and_evaluates_each_step(folder: Path, stored: list[dict[str, Any]]):
    rows = replay(folder, "again", "evaluation.every_steps=2")
    assert column(rows, "loss") == column(stored, "loss")
    assert [(row["step"], row["eval/version"]) for row in rows if "eval/accuracy_sampled" in row] == [(2, 2)]


# In CI: tests/unit/slipstream/launch/test_convert.py rescores, tests/unit/learner/test_every_algorithm.py trains.
@pytest.mark.long
def test_another_algorithm_and_another_reward_function_train_on_the_same_rollouts(
    folder: Path, stored: list[dict[str, Any]]
):
    rescored = "replay.rescore=slipstream.generators.rewards.functions:exact_match"
    rows = replay(folder, "otherwise", "algorithm/advantage=rloo", rescored)
    assert column(rows, "reward_mean") != column(stored, "reward_mean")
    assert column(rows, "loss") != column(stored, "loss")


# In the fast suite, tests/integration/test_learner_ranks.py trains on two ranks, but does not replay.
@pytest.mark.long
def test_two_ranks_replay_the_losses_and_weights_of_one(folder: Path, stored: list[dict[str, Any]]):
    rows = replay(folder, "ranks", "learner.num_ranks=2", "learner/engine=deepspeed_zero3")
    assert column(rows, "loss") == pytest.approx(column(stored, "loss"), abs=1e-6)
    one, two = (load_file(folder / f"runs/{name}/final_model/model.safetensors") for name in ("synchronous", "ranks"))
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-5


def test_a_damaged_ledger_is_refused_in_one_sentence_before_a_folder_is_made(
    folder: Path, stored: list[dict[str, Any]]
):
    ledger = folder / "elsewhere" / "ledger.jsonl"
    whole = ledger.read_text()
    first, *others = whole.splitlines(keepends=True)
    ledger.write_text(json.dumps(json.loads(first) | {"checksum": "0" * 16}) + "\n" + "".join(others))
    done = call_replay(folder, "never")
    ledger.write_text(whole)
    assert done.returncode == 2
    assert done.stderr.startswith("error: line 1 of elsewhere/ledger.jsonl must hold a step")
    assert not (folder / "runs" / "never").exists()
