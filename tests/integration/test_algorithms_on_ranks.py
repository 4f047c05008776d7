"""Two ranks over Gloo, at every ZeRO stage, make the weights of one process, for every algorithm."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.algorithm_ranks import KEYS, SMOOTH
from tests.unit.learner.builders import make_trainer, weights
from tests.unit.learner.test_every_algorithm import SETTINGS, make_algorithm_groups, make_algorithm_run

DEADLINE_S = 900.0
FEW = [
    "loss-ppo_clip",
    "advantage-gae",
    "loss-gspo-token",
    "loss-clip_cov",
    "m2po",
    "rejected",
    "normalised",
    "kl-full",
]
AT_ONCE = 20
"""Algorithms per pair of processes: after some sixty DeepSpeed engines in one process, which keeps their groups, a
collective of ZeRO 3 hangs."""
TOLERANCE = 5e-6
"""Largest difference of a weight after two steps, which move each by up to 1e-3."""
pytestmark = pytest.mark.timeout(DEADLINE_S + 60)


def train_on_two(folder: Path, names: list[str], *, stage: int) -> None:
    command = [sys.executable, "-m", "tests.integration.algorithm_ranks", f"--zero={stage}", f"--folder={folder}"]
    (folder / "rendezvous").unlink(missing_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    root = Path(__file__).parents[2]
    processes = [
        subprocess.Popen(
            [*command, f"--rank={rank}", *names],
            cwd=root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    ends_at = time.monotonic() + DEADLINE_S
    try:
        outputs = [process.communicate(timeout=max(1.0, ends_at - time.monotonic()))[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    logs = "\n".join(output.decode()[-2000:] for output in outputs)
    assert [process.returncode for process in processes] == [0, 0], logs


@pytest.mark.parametrize(
    ("stage", "names"),
    [(2, FEW), *(pytest.param(stage, list(SETTINGS), marks=pytest.mark.long) for stage in (0, 2, 3))],
)
def test_two_ranks_make_the_weights_of_one(tmp_path: Path, stage: int, names: list[str]):
    alone = {name: train_alone(tmp_path, name) for name in names}
    for first in range(0, len(names), AT_ONCE):
        train_on_two(tmp_path, names[first : first + AT_ONCE], stage=stage)
    for name, (metrics, expected) in alone.items():
        found = load_file(tmp_path / f"{name}.st")
        assert max(float((found[key] - expected[key]).abs().max()) for key in expected) < TOLERANCE, name
        for one, two in zip(metrics, json.loads((tmp_path / f"{name}.json").read_text()), strict=True):
            assert two == pytest.approx({key: one[key] for key in KEYS}, rel=1e-4, abs=1e-5), name


def train_alone(folder: Path, name: str) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    trainer = make_trainer(make_algorithm_run(folder, name, learner={"optimizer": SMOOTH}))
    metrics = [trainer.step(make_algorithm_groups(name), learner_version=v, step=v + 1) for v in range(2)]
    return metrics, weights(trainer)
