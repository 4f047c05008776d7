"""One learner rank of a test, for `run_ranks`. Trains two steps, saves each.

Only rank 0 has the trajectories, as if from the store. The others receive them from it.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from slipstream.buffer.archive.step_tokens import write_step
from slipstream.buffer.codec import pack, unpack
from slipstream.buffer.trajectory import Reward, Trajectory
from slipstream.configs.algorithm import AlgorithmConfig
from slipstream.configs.algorithm_terms import GrpoConfig
from slipstream.configs.data import ModelConfig
from slipstream.configs.learner import OptimizerConfig
from slipstream.configs.run import StorageConfig
from slipstream.learner.build import build_trainer
from slipstream.learner.checkpoint import Checkpoints
from slipstream.learner.engines.deepspeed_engine import deepspeed_environment
from slipstream.learner.ranks import Ranks, exit_rank, join_ranks
from slipstream.learner.training.saved_model import save_model
from slipstream.runtime.images import image_id
from tests.unit.learner.batching.test_images import PICTURES
from tests.unit.learner.batching.test_images import make_groups as make_picture_groups
from tests.unit.learner.builders import CPU, make_groups, make_run, zero

TIMEOUT_S = 60.0


def rewarded_pictures(folder: Path, *, seed: int) -> list[list[Trajectory]]:
    random = np.random.default_rng(seed)
    groups = make_picture_groups(folder / "model")
    return [[msgspec.structs.replace(m, reward=Reward(total=float(random.random()))) for m in g] for g in groups]


def share_groups(ranks: Ranks, groups: list[list[Trajectory]]) -> list[list[Trajectory]]:
    groups = groups if ranks.is_first else []
    payloads = [pack(m, lease_id="0", purpose="train", group_size=len(g))[1] for g in groups for m in g]
    sizes = ranks.broadcast_ints([len(group) for group in groups] if ranks.is_first else None)
    members = iter(map(unpack, ranks.broadcast_bytes(payloads if ranks.is_first else None)))
    return [[next(members) for _ in range(size)] for size in sizes]


def main(
    rank: int,
    ranks: int,
    folder: str,
    out: str,
    *,
    stage: int,
    steps: Sequence[int] = (0, 1),
    microbatch: int = 8192,
    optimizer: Any = None,
    dtype: Any = "float32",
    has_pictures: bool = False,
    saves_engine: bool = False,
    dies: bool = False,
    machine: str = "",
    storage: str | None = None,
) -> None:
    """`saves_engine`: a checkpoint of DeepSpeed's own, too; `machine`: has a run folder of its own."""
    place = Path(folder)
    torch.set_num_threads(1)
    os.environ.update(deepspeed_environment(CPU))
    group = join_ranks(
        rank=rank, size=ranks, device=CPU, timeout_s=TIMEOUT_S, rendezvous=f"file://{place / out}.rendezvous"
    )
    learner = {"engine": zero(stage), "num_ranks": ranks, "tokens_per_microbatch": microbatch}
    if optimizer:
        learner |= {"optimizer": OptimizerConfig(name=optimizer, learning_rate=1e-3, epsilon=1.0)}
    model = ModelConfig(max_length=64, path=str(place / "model"), dtype=dtype)
    algorithm = AlgorithmConfig(advantage=GrpoConfig())
    run = make_run(model.path, model=model, learner=learner, algorithm=algorithm, storage=StorageConfig(storage))
    torch.manual_seed(run.seed)
    trainer = build_trainer(run, ranks=group)
    where = place / machine / "checkpoints" if machine else place / f"{out}-checkpoints"
    checkpoints = Checkpoints(where, run=run, trainer=trainer, ranks=group)
    # Only rank 0 knows which checkpoints all machines have finished.
    found = group.broadcast_bytes([name.encode() for name in checkpoints.names()] if group.is_first else None)
    if found:
        checkpoints.restore_finite([found[-1].decode()])
    assert group.broadcast_bytes([] if group.is_first else None) == []
    if dies:
        os._exit(1)
    if trainer.images:
        trainer.images.keep([*map(image_id, PICTURES)], {image_id(data): data for data in PICTURES})
    metrics = []
    for step in steps:
        made = make_groups(num_groups=4, group_size=4, seed=step)
        groups = share_groups(group, rewarded_pictures(place, seed=step) if has_pictures else made)
        metrics.append(trainer.step(groups, learner_version=0, step=step + 1))
        trainer.canary()
        checkpoints.save(step=step + 1, version=0)
    if trainer.step_tokens:
        write_step(place / f"{out}-tokens", steps[-1] + 1, trainer.step_tokens)
    checkpoints.saver.flush()
    if saves_engine:
        trainer.engine._engine.save_checkpoint(str(place / f"{out}-zero"))
    save_model(trainer.engine, place / out, config=run.model, ranks=group)
    (place / f"{out}.rank-{rank}.metrics").write_text(repr(metrics))
    exit_rank()
