"""A checkpoint from any engine, ZeRO stage, and number of ranks can be resumed with any other."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.rank_processes import run_ranks
from tests.integration.test_learner_ranks import DEADLINE_S
from tests.tiny_model import make_tiny_model
from tests.tolerance import largest_difference

ALL = ["torch-1", *(f"{stage}-{ranks}" for stage in range(4) for ranks in (1, 2)), "2-4", "3-4"]


def launch(folder: Path, out: str, **settings: Any) -> None:
    """Run all ranks of a layout to completion. Example: `2-4` is stage 2 on four ranks."""
    layout, _, ranks = out.partition("-")
    (folder / f"{out}.rendezvous").unlink(missing_ok=True)
    common = {"layout": layout, "ranks": int(ranks), "folder": str(folder), "out": out} | settings
    own = [common | {"rank": rank} for rank in range(int(ranks))]
    run_ranks("tests.integration.layout_rank", own, timeout_s=DEADLINE_S)


def join_moments(files: list[Path]) -> dict[str, torch.Tensor]:
    """The flattened moments by field and parameter, with each element once."""
    pieces = sorted(
        (f"{field}/{name}", int(begin), tensor)
        for file in files
        for key, tensor in load_file(file).items()
        for field, begin, name in [key.split("/", 2)]
        if field != "step"
    )
    joined = {}
    for key, parts in itertools.groupby(pieces, key=lambda piece: piece[0]):
        rows = list(parts)
        ends = [0, *itertools.accumulate(len(tensor) for _, _, tensor in rows)]
        assert [begin for _, begin, _ in rows] == ends[:-1], key
        joined[key] = torch.cat([tensor for _, _, tensor in rows])
    return joined


def check(folder: Path, source: str, target: str, *, has_critic: bool, is_exact: bool) -> None:
    found, expected = (load_file(folder / f"{name}.safetensors") for name in (f"{source}-to-{target}", target))
    # In bfloat16, layouts round gradients differently.
    assert not is_exact or largest_difference(expected, found) < 1e-5, (source, target)
    checkpoint = folder / f"{source}-checkpoints" / "step-00000002"
    for part in ("policy", "critic") if has_critic else ("policy",):
        saved = checkpoint / "critic" if part == "critic" else checkpoint
        before = join_moments(sorted(saved.glob("optimizer-rank-*")))
        after = join_moments(sorted(folder.glob(f"{source}-to-{target}.{part}-*")))
        assert before.keys() == after.keys()
        assert all(tensor.equal(after[key]) for key, tensor in before.items()), (source, target, part)
        assert all(tensor.any() for key, tensor in before.items() if "exp_avg/" in key and "lora_A" not in key)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["", "critic", "lora", "bfloat16"])
def test_every_layout_resumes_from_every_other(tmp_path: Path, kind: str) -> None:
    make_tiny_model(tmp_path / "model")
    layouts = ALL if kind == "" else ["torch-1", "0-2", "1-2", "2-4", "3-1", "3-2"]
    for layout in layouts:
        launch(tmp_path, layout, kind=kind)
    for layout in layouts:
        launch(tmp_path, layout, kind=kind, resume=layouts)
    for source, target in itertools.product(layouts, layouts):
        check(tmp_path, source, target, has_critic=kind == "critic", is_exact=kind != "bfloat16")
