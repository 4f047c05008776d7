"""The serial run is deterministic and reproduces its golden values."""

import json
from operator import itemgetter
from pathlib import Path

import pytest
import torch
from pyarrow.parquet import read_table
from safetensors.torch import load_file

from slipstream.buffer.archive.trajectory_filter import TrajectoryFilter
from slipstream.observe.catalog.catalog import CatalogQuery, open_catalog
from tests import runs

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[1] / "golden" / "serial_3_steps.json"
SYNCHRONOUS = "buffer.staleness.max_lag=0"
FINAL = "runs/adapter/final_model"
KEYS = ("learner/loss", "learner/reward_mean", "learner/grad_norm", "lag/mean", "version")
SMALL = (
    "experiment=digits_serial",
    "model.path=models/digits-random",
    "prepare=[]",
    "learner.groups_per_step=4",
    "learner.max_steps=3",
    "learner.optimizer.learning_rate=3e-4",
    "evaluation.monitor_prompts=4",
    "evaluation.final_prompts=8",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make_task(tmp_path_factory.mktemp("serial"), warm=False)


@pytest.fixture(scope="module")
def first(folder: Path) -> list[dict[str, float]]:
    return train(folder, "first")


def train(folder: Path, name: str, *overrides: str) -> list[dict[str, float]]:
    runs.train(folder, *SMALL, f"name={name}", *overrides)
    return [{key: row[key] for key in KEYS} for row in runs.metrics(folder, name)]


@pytest.mark.core
def test_a_serial_run_equals_the_recorded_one(first: list[dict[str, float]]):
    golden = json.loads(GOLDEN.read_text())
    # On another processor, sums have another order. Each of fewer than 8,192 operations between a token and a metric
    # rounds by at most eps / 2 (kernels without AVX differ by 3e-7). A changed formula shows in the first digits.
    for row, expected in zip(first, golden, strict=True):
        assert row == pytest.approx(expected, rel=8192 * torch.finfo(torch.float32).eps)


@pytest.mark.core
def test_two_runs_with_one_seed_are_equal_bit_for_bit(folder: Path, first: list[dict[str, float]]):
    # Recording changes no value.
    assert train(folder, "second", "profile.steps=[2,3]") == first
    roles = ("trajectories", "broker (", "generator-0 (", "learner (", "learner torch (")
    runs.assert_traced(folder, "second", steps=(2, 3), per_step=4 * 8, processes=roles)


def test_an_adapter_is_published_and_saved(folder: Path):
    train(folder, "adapter", "model.lora.rank=4", "buffer.staleness.max_lag=0")
    for row in runs.metrics(folder, "adapter"):
        assert row["learner/mismatch_max"] < 1e-4
        assert row["weights/probe_diff_max"] < 1e-4
    saved, base = (load_file(folder / path / "model.safetensors") for path in (FINAL, "models/digits-random"))
    adapted = {name for name, tensor in base.items() if not tensor.equal(saved[name])}
    assert adapted == {name for name in base if "_proj.weight" in name}
    assert load_file(folder / FINAL / "adapter/adapter_model.safetensors")


def test_a_version_is_applied_immediately_so_no_token_depends_on_threads(folder: Path):
    # All tokens of the first max_lag + 1 steps are of version 0, those of the next steps of version 5.
    rows = train(folder, "later", "learner.max_steps=8")
    assert [row["lag/mean"] for row in rows] == [0, 1, 2, 3, 4, 0, 1, 2]


@pytest.mark.long
def test_another_seed_gives_another_run(folder: Path, first: list[dict[str, float]]):
    assert train(folder, "third", "seed=1") != first


@pytest.fixture(scope="module")
def synchronous(folder: Path) -> list[dict[str, float]]:
    return train(folder, "synchronous", SYNCHRONOUS)


def test_a_run_that_is_resumed_at_a_checkpoint_equals_one_without_a_break_bit_for_bit(
    folder: Path, synchronous: list[dict[str, float]]
):
    changes = ("name=resumed", SYNCHRONOUS, "learner.checkpoint.every_steps=2")
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
    for row in runs.metrics(folder, "synchronous"):
        assert row["lag/max"] == 0
        assert row["learner/weight_mean"] == pytest.approx(1.0, abs=1e-4)
        assert row["learner/mismatch_max"] < 1e-4
        assert row["generators/tokens_per_s"] > 0
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
