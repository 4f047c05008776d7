"""Learner ranks in separate processes, over Gloo."""

import ast
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream.buffer.archive.step_tokens import read_steps, write_step
from tests.integration.rank_processes import run_ranks
from tests.pictures import make_vision_model
from tests.tiny_model import make_tiny_model
from tests.tolerance import largest_difference
from tests.unit.learner.builders import make_groups, make_run, make_trainer, weights

DEADLINE_S = 150.0


def train(
    folder: Path, *, ranks: int, stage: int, out: str, own: Sequence[dict[str, Any]] = (), **settings: Any
) -> tuple[dict, list]:
    """Return the saved weights and the metrics of every rank. `own`: settings of each rank."""
    (folder / f"{out}.rendezvous").unlink(missing_ok=True)
    common = {"ranks": ranks, "stage": stage, "folder": str(folder), "out": out} | settings
    each = [common | {"rank": rank} | more for rank, more in enumerate(own or [{}] * ranks)]
    run_ranks("tests.integration.learner_rank", each, timeout_s=DEADLINE_S)
    metrics = [ast.literal_eval((folder / f"{out}.rank-{rank}.metrics").read_text()) for rank in range(ranks)]
    return load_file(folder / out / "model.safetensors"), metrics


def train_on_one_and_two(
    folder: Path, *, stage: int, sizes: tuple[int, int] = (8192, 64), **settings: Any
) -> tuple[tuple[dict, list], tuple[dict, list]]:
    """Train with one rank and with two, with microbatches of these sizes."""
    one, two = (
        train(folder, ranks=ranks, stage=stage, out=f"ranks-{ranks}", microbatch=size, **settings)
        for ranks, size in zip((1, 2), sizes, strict=True)
    )
    return one, two


def rewind(folder: Path, out: str) -> Path:
    """Give the run `resumed` this one's first checkpoint. Returns it."""
    first = min((folder / f"{out}-checkpoints").glob("step-*"))
    return shutil.copytree(first, folder / "resumed-checkpoints" / first.name)


@pytest.mark.slow
@pytest.mark.core
def test_two_ranks_make_the_weights_of_one(tmp_path):
    make_tiny_model(tmp_path / "model")
    # The same two steps in this process, with plain torch.
    trainer, expected = make_trainer(make_run(tmp_path / "model")), []
    for seed in range(2):
        groups = make_groups(num_groups=4, group_size=4, seed=seed)
        expected.append(trainer.step(groups, learner_version=0, step=seed + 1))
    write_step(tmp_path / "alone-tokens", 2, trainer.step_tokens)
    together, metrics = train(tmp_path, ranks=2, stage=3, out="together", microbatch=64)
    assert metrics[0] == metrics[1]
    for one, two in zip(expected, metrics[0], strict=True):
        two["learner/computed_tokens"] = one["learner/computed_tokens"]  # padding differs
        assert two == pytest.approx(one, abs=1e-4, rel=1e-4)
    assert largest_difference(weights(trainer), together) < 1e-5
    ids = {f"{group}-0-{index}": 2 for group in range(4) for index in range(4)}
    one, two = (read_steps(tmp_path / f"{name}-tokens", ids) for name in ("alone", "together"))
    assert len(one) == 16
    for name, numbers in one.items():
        assert {key: pytest.approx(values, abs=2e-3) for key, values in numbers.items()} == two[name]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adamw_8bit"])
def test_two_ranks_train_with_another_optimizer_as_one_and_resume_bit_for_bit(tmp_path, optimizer):
    if optimizer == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    make_tiny_model(tmp_path / "model")
    (alone, expected), (together, metrics) = train_on_one_and_two(tmp_path, stage=0, optimizer=optimizer)
    # Muon iterates in bfloat16, and small singular values amplify the last bit of a gradient. 8 bits are coarse, too.
    for name, tensor in load_file(tmp_path / "model" / "model.safetensors").items():
        bound = 0.1 if name.endswith("_proj.weight") or optimizer == "adamw_8bit" else 1e-3
        # The last bit of each weight may differ, too: norms of layers are 1 and move by 1e-5.
        rounding = torch.finfo(torch.float32).eps * tensor.norm()
        assert (alone[name] - together[name]).norm() < bound * (alone[name] - tensor).norm() + rounding, name
    assert metrics[0] == metrics[1]
    assert metrics[0][1]["learner/grad_norm"] == pytest.approx(expected[0][1]["learner/grad_norm"], rel=1e-3)
    rewind(tmp_path, "ranks-2")
    rest = {"optimizer": optimizer, "microbatch": 64, "steps": [1]}
    resumed, again = train(tmp_path, ranks=2, stage=0, out="resumed", **rest)
    assert largest_difference(together, resumed) == 0
    assert again[0][0].items() <= metrics[0][1].items()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.long) for stage in (0, 1, 2)), 3])
def test_two_ranks_continue_a_bfloat16_model_bit_for_bit_and_save_what_they_publish(tmp_path, stage):
    make_tiny_model(tmp_path / "model")
    settings = {"ranks": 2, "stage": stage, "dtype": "bfloat16", "microbatch": 64}
    straight, expected = train(tmp_path, out="straight", **settings)
    folder = rewind(tmp_path, "straight")
    masters = [load_file(path) for path in folder.glob("optimizer-rank-*")]
    named = {key: tensor for each in masters for key, tensor in each.items() if key.startswith("weight/")}
    assert any(not tensor.equal(tensor.bfloat16().float()) for tensor in named.values()), "masters are not rounded"
    saved = load_file(folder / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    resumed, metrics = train(tmp_path, out="resumed", steps=[1], **settings)
    assert largest_difference(straight, resumed) == 0
    assert metrics[0][0].items() <= expected[0][1].items()


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_two_ranks_train_the_visual_encoder_of_one(tmp_path, stage):
    make_vision_model(tmp_path / "model")
    # Small, so that only some microbatches have images.
    trained = train_on_one_and_two(tmp_path, stage=stage, sizes=(64, 64), has_pictures=True)
    (alone, expected), (together, metrics) = trained
    assert metrics[0] == metrics[1]
    assert metrics[0][0]["learner/loss"] == pytest.approx(expected[0][0]["learner/loss"], abs=1e-5)
    base = load_file(tmp_path / "model" / "model.safetensors")
    visual = [name for name in base if "visual" in name]
    assert largest_difference(alone, together) < 1e-5
    assert min(float((base[name] - together[name]).abs().max()) for name in visual) > 0


@pytest.mark.long
def test_two_machines_continue_bit_for_bit_without_a_shared_folder(tmp_path):
    """On the same machines with the ranks swapped, and on new machines from an object store."""
    make_tiny_model(tmp_path / "model")
    straight, _ = train(tmp_path, ranks=2, stage=2, out="straight")
    storage = {"storage": f"file://{tmp_path}/remote"}
    train(tmp_path, ranks=2, stage=2, out="begun", steps=[0], own=[{"machine": "a"}, {"machine": "b"}], **storage)
    kept = {name: {path.name for path in (tmp_path / name / "checkpoints").glob("*/*")} for name in ("a", "b")}
    assert kept["a"] >= {"model", "state.json", "optimizer-rank-0.safetensors"}
    assert kept["b"] == {"optimizer-rank-1.safetensors", "checksums.json"}
    for name in ("a", "b"):
        shutil.copytree(tmp_path / name, tmp_path / f"{name}-2")
    for out, machines, more in (
        ("same", ("a", "b"), {}),
        ("swapped", ("b-2", "a-2"), {}),
        ("elsewhere", ("c", "d"), storage),
    ):
        own = [{"machine": name} for name in machines]
        resumed, _ = train(tmp_path, ranks=2, stage=2, out=out, steps=[1], own=own, **more)
        assert largest_difference(straight, resumed) == 0


@pytest.mark.slow
def test_a_dead_rank_raises_in_the_others(tmp_path):
    make_tiny_model(tmp_path / "model")
    with pytest.raises(AssertionError, match="RankGroupError"):
        train(tmp_path, ranks=2, stage=0, out="dying", own=[{}, {"dies": True}])
