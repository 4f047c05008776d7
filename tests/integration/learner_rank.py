"""One learner rank of a test, started as `python -m tests.integration.learner_rank`. Trains two steps, saves each.

Only rank 0 has the trajectories, as if from the store. The others receive them from it.
"""

import argparse
import os
from pathlib import Path

import msgspec
import numpy as np
import torch

from slipstream.buffer.archive.step_tokens import write_step
from slipstream.buffer.codec import pack, unpack
from slipstream.buffer.trajectory import Reward, Trajectory
from slipstream.configs.advantages import GrpoConfig
from slipstream.configs.algorithm import AlgorithmConfig
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


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name, kind in {"rank": int, "ranks": int, "zero": int, "folder": Path, "out": str}.items():
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--steps", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--die", action="store_true", help="after the model is built, without a word")
    parser.add_argument("--engine-checkpoint", action="store_true", help="save one of DeepSpeed's own, too")
    parser.add_argument("--optimizer", choices=["muon", "adamw_8bit"])
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--pictures", action="store_true", help="a model with images, prompts with and without")
    parser.add_argument("--microbatch", type=int, default=8192)
    parser.add_argument("--machine", help="name of the machine, which has a run folder of its own")
    parser.add_argument("--storage", help="object store")
    return parser.parse_args()


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


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    os.environ.update(deepspeed_environment(CPU))
    rendezvous = f"file://{args.folder / args.out}.rendezvous"
    ranks = join_ranks(rank=args.rank, size=args.ranks, device=CPU, timeout_s=TIMEOUT_S, rendezvous=rendezvous)
    learner = {"engine": zero(args.zero), "num_ranks": args.ranks, "tokens_per_microbatch": args.microbatch}
    if args.optimizer:
        learner |= {"optimizer": OptimizerConfig(name=args.optimizer, learning_rate=1e-3, epsilon=1.0)}
    dtype = "bfloat16" if args.bfloat16 else "float32"
    model = ModelConfig(max_length=64, path=str(args.folder / "model"), dtype=dtype)
    algorithm = AlgorithmConfig(advantage=GrpoConfig())
    run = make_run(model.path, model=model, learner=learner, algorithm=algorithm, storage=StorageConfig(args.storage))
    torch.manual_seed(run.seed)
    trainer = build_trainer(run, ranks=ranks)
    where = args.folder / args.machine / "checkpoints" if args.machine else args.folder / f"{args.out}-checkpoints"
    checkpoints = Checkpoints(where, run=run, trainer=trainer, ranks=ranks)
    # Only rank 0 knows which checkpoints all machines have finished.
    found = ranks.broadcast_bytes([name.encode() for name in checkpoints.names()] if ranks.is_first else None)
    if found:
        checkpoints.restore_finite([found[-1].decode()])
    assert ranks.broadcast_bytes([] if ranks.is_first else None) == []
    if args.die:
        os._exit(1)
    if trainer.images:
        trainer.images.keep([*map(image_id, PICTURES)], {image_id(data): data for data in PICTURES})
    metrics = []
    for step in args.steps:
        made = make_groups(num_groups=4, group_size=4, seed=step)
        groups = share_groups(ranks, rewarded_pictures(args.folder, seed=step) if args.pictures else made)
        metrics.append(trainer.step(groups, learner_version=0, step=step + 1))
        trainer.canary()
        checkpoints.save(step=step + 1, version=0)
    if trainer.step_tokens:
        write_step(args.folder / f"{args.out}-tokens", args.steps[-1] + 1, trainer.step_tokens)
    checkpoints.saver.flush()
    if args.engine_checkpoint:
        trainer.engine._engine.save_checkpoint(str(args.folder / f"{args.out}-zero"))
    save_model(trainer.engine, args.folder / args.out, config=run.model, ranks=ranks)
    (args.folder / f"{args.out}.rank-{args.rank}.metrics").write_text(repr(metrics))
    exit_rank()


if __name__ == "__main__":
    main()
