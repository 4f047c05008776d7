"""Ranks over Gloo, with shares of the batch and slices of sequences, produce the same weights as one process."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slipstream.learner.engines.deepspeed_engine import deepspeed_environment
from tests.families import FAMILIES
from tests.integration.algorithm_ranks import SPECIAL, SUPERVISED, make_models, train
from tests.integration.rank_processes import run_ranks
from tests.unit.learner.builders import CPU, make_alone
from tests.unit.learner.test_every_algorithm import SETTINGS

DEADLINE_S = 900.0
FEW = ["loss-ppo_clip", "advantage-gae", "advantage-prime", "loss-gspo-token", "loss-clip_cov"]
FEW += ["m2po", "rejected", "normalized", "kl-full", *SPECIAL]
FEW_SLICED = ["loss-gspo-token", "advantage-gae", "advantage-prime", "kl-full", "distil-forward_kl_topk", *SUPERVISED]
FEW_SLICED += ["family-gemma3_text", "family-qwen3_moe"]
"""Losses of whole sequences, a second model of each kind, values that pass between ranks, and windows."""
SLICED_FAMILIES = [
    f"family-{name}"
    for name, (kind, _) in FAMILIES.items()
    if kind == "shared_rows" and name not in ("gemma2", "gpt_oss", "falcon")
]
AT_ONCE = 20
"""Algorithms per pair of processes. After about sixty DeepSpeed engines in one process, which keeps their groups, a
ZeRO-3 collective hangs."""
TOLERANCE = 5e-6
"""Largest difference of a weight after two steps. Each step moves weights by up to 1e-3."""
pytestmark = pytest.mark.timeout(4 * DEADLINE_S)


def train_on_ranks(folder: Path, names: list[str], *, stage: int, ranks: int = 2, sequence_parallel: int = 1) -> None:
    common = {"ranks": ranks, "sequence_parallel": sequence_parallel, "stage": stage, "folder": str(folder)}
    (folder / "rendezvous").unlink(missing_ok=True)
    own = [common | {"names": names, "rank": rank} for rank in range(ranks)]
    run_ranks("tests.integration.algorithm_ranks", own, timeout_s=DEADLINE_S)


@pytest.mark.parametrize(
    ("stage", "names"),
    [(2, FEW), *(pytest.param(stage, [*SETTINGS, *SPECIAL], marks=pytest.mark.long) for stage in (0, 2, 3))],
)
def test_two_ranks_make_the_weights_of_one(tmp_path: Path, stage: int, names: list[str]):
    check_ranks(tmp_path, names, stage=stage)


LONG = [(2, 2, 1), (4, 4, 2), (4, 2, 3)]


@pytest.mark.parametrize(
    ("ranks", "sequence_parallel", "stage", "names"),
    [
        pytest.param(2, 2, 3, FEW_SLICED, marks=pytest.mark.slow),
        *(pytest.param(*sizes, [*SETTINGS, *SUPERVISED], marks=pytest.mark.long) for sizes in LONG),
        pytest.param(2, 2, 0, SLICED_FAMILIES, marks=pytest.mark.long),
    ],
)
def test_slices_of_sequences_make_the_weights_of_whole_ones(
    tmp_path: Path, ranks: int, sequence_parallel: int, stage: int, names: list[str]
):
    check_ranks(tmp_path, names, stage=stage, ranks=ranks, sequence_parallel=sequence_parallel)


def check_ranks(tmp_path: Path, names: list[str], *, stage: int, **sizes: int) -> None:
    make_models(tmp_path, names)
    os.environ.update(deepspeed_environment(CPU))
    torch.set_num_threads(1)
    alone = {name: train(tmp_path, name, ranks=make_alone()) for name in names}
    for first in range(0, len(names), AT_ONCE):
        train_on_ranks(tmp_path, names[first : first + AT_ONCE], stage=stage, **sizes)
    for name, (metrics, expected) in alone.items():
        found = load_file(tmp_path / f"{name}.st")
        assert max(float((found[key] - expected[key]).abs().max()) for key in expected) < TOLERANCE, name
        for one, two in zip(metrics, json.loads((tmp_path / f"{name}.json").read_text()), strict=True):
            assert two == pytest.approx(one, rel=1e-4, abs=1e-5), name
