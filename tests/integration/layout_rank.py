"""One learner rank in some layout, started as `python -m tests.integration.layout_rank`.

Without `--resume`, it trains two steps, saves, and continues: the uninterrupted run. With `--resume`, it loads the
checkpoint of each named layout, writes its moments, and makes the same last step.
"""

import argparse
import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from slipstream.configs.algorithm import AlgorithmConfig, CriticConfig, CriticOptimizerConfig
from slipstream.configs.algorithm_terms import GaeConfig, GrpoConfig
from slipstream.configs.data import LoraConfig, ModelConfig
from slipstream.configs.learner import OptimizerConfig, TorchEngineConfig
from slipstream.configs.run import RunConfig
from slipstream.learner.build import build_trainer
from slipstream.learner.checkpoint import Checkpoints
from slipstream.learner.engines.deepspeed_engine import deepspeed_environment
from slipstream.learner.ranks import Ranks, exit_rank, join_ranks
from slipstream.learner.training.trainer import Trainer
from tests.integration.learner_rank import TIMEOUT_S, share_groups
from tests.unit.learner.builders import CPU, make_groups, make_run, weights, zero

# Large enough that the update is as smooth a function of the gradient as the loss. Otherwise Adam amplifies rounding.
SMOOTH = {"epsilon": 1.0, "learning_rate": 1.0}


def make_layout_run(args: argparse.Namespace) -> RunConfig:
    engine = TorchEngineConfig() if args.layout == "torch" else zero(int(args.layout))
    learner = {"engine": engine, "num_ranks": args.ranks, "optimizer": OptimizerConfig(**SMOOTH)}
    critic = CriticConfig(optimizer=CriticOptimizerConfig(**SMOOTH))
    algorithm = AlgorithmConfig(advantage=GaeConfig() if args.critic else GrpoConfig(), critic=critic)
    lora, dtype = LoraConfig(rank=4) if args.lora else None, "bfloat16" if args.bfloat16 else "float32"
    model = ModelConfig(dtype=dtype, path=str(args.folder / "model"), lora=lora)
    return make_run(model.path, model=model, learner=learner, algorithm=algorithm)


def step(trainer: Trainer, ranks: Ranks, number: int) -> None:
    groups = make_groups(num_groups=4, group_size=4, seed=number)
    trainer.step(share_groups(ranks, groups), learner_version=0, step=number)


def write_weights(trainer: Trainer, path: Path, ranks: Ranks) -> None:
    gathered = weights(trainer)
    if ranks.is_first:
        save_file(gathered, path)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name, kind in {"rank": int, "ranks": int, "layout": str, "folder": Path, "out": str}.items():
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--resume", nargs="*", default=[])
    parser.add_argument("--critic", action="store_true")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--bfloat16", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.update(deepspeed_environment(CPU))
    rendezvous = f"file://{args.folder / args.out}.rendezvous"
    ranks = join_ranks(rank=args.rank, size=args.ranks, device=CPU, timeout_s=TIMEOUT_S, rendezvous=rendezvous)
    run = make_layout_run(args)
    torch.manual_seed(run.seed)
    trainer = build_trainer(run, ranks=ranks)
    if not args.resume:
        checkpoints = Checkpoints(args.folder / f"{args.out}-checkpoints", run=run, trainer=trainer, ranks=ranks)
        step(trainer, ranks, 1)
        step(trainer, ranks, 2)
        pointer = checkpoints.save(step=2, version=2)
        checkpoints.saver.flush()
        assert pointer.name == "step-00000002"
        step(trainer, ranks, 3)
        write_weights(trainer, args.folder / f"{args.out}.safetensors", ranks)
    for source in args.resume:
        checkpoints = Checkpoints(args.folder / f"{source}-checkpoints", run=run, trainer=trainer, ranks=ranks)
        assert checkpoints.restore("step-00000002").num_updates == 2
        name = f"{source}-to-{args.out}"
        for part, engine in (
            ("policy", trainer.engine),
            ("critic", trainer.second_model and trainer.second_model.engine),
        ):
            if engine:
                save_file(engine.copy_state(), args.folder / f"{name}.{part}-{args.rank}.safetensors")
        step(trainer, ranks, 3)
        write_weights(trainer, args.folder / f"{name}.safetensors", ranks)
    exit_rank()


if __name__ == "__main__":
    main()
