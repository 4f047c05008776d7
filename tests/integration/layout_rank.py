"""One learner rank in some layout, for `run_ranks`.

Without `resume`, it trains two steps, saves, and continues: the uninterrupted run. With `resume`, it loads the
checkpoint of each named layout, writes its moments, and makes the same last step.
"""

import os
from collections.abc import Sequence
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


def make_layout_run(folder: Path, layout: str, ranks: int, *, kind: str) -> RunConfig:
    engine = TorchEngineConfig() if layout == "torch" else zero(int(layout))
    learner = {"engine": engine, "num_ranks": ranks, "optimizer": OptimizerConfig(**SMOOTH)}
    critic = CriticConfig(optimizer=CriticOptimizerConfig(**SMOOTH))
    algorithm = AlgorithmConfig(advantage=GaeConfig() if kind == "critic" else GrpoConfig(), critic=critic)
    lora, dtype = LoraConfig(rank=4) if kind == "lora" else None, "bfloat16" if kind == "bfloat16" else "float32"
    model = ModelConfig(dtype=dtype, path=str(folder / "model"), lora=lora)
    return make_run(model.path, model=model, learner=learner, algorithm=algorithm)


def step(trainer: Trainer, ranks: Ranks, number: int) -> None:
    groups = make_groups(num_groups=4, group_size=4, seed=number)
    trainer.step(share_groups(ranks, groups), learner_version=0, step=number)


def write_weights(trainer: Trainer, path: Path, ranks: Ranks) -> None:
    gathered = weights(trainer)
    if ranks.is_first:
        save_file(gathered, path)


def main(
    rank: int, ranks: int, layout: str, folder: str, out: str, *, kind: str = "", resume: Sequence[str] = ()
) -> None:
    """`kind`: critic, lora, or bfloat16; `resume`: layouts with a checkpoint."""
    place = Path(folder)
    torch.set_num_threads(1)
    os.environ.update(deepspeed_environment(CPU))
    group = join_ranks(
        rank=rank, size=ranks, device=CPU, timeout_s=TIMEOUT_S, rendezvous=f"file://{place / out}.rendezvous"
    )
    run = make_layout_run(place, layout, ranks, kind=kind)
    torch.manual_seed(run.seed)
    trainer = build_trainer(run, ranks=group)
    if not resume:
        checkpoints = Checkpoints(place / f"{out}-checkpoints", run=run, trainer=trainer, ranks=group)
        step(trainer, group, 1)
        step(trainer, group, 2)
        pointer = checkpoints.save(step=2, version=2)
        checkpoints.saver.flush()
        assert pointer.name == "step-00000002"
        step(trainer, group, 3)
        write_weights(trainer, place / f"{out}.safetensors", group)
    for source in resume:
        checkpoints = Checkpoints(place / f"{source}-checkpoints", run=run, trainer=trainer, ranks=group)
        assert checkpoints.restore("step-00000002").num_updates == 2
        name = f"{source}-to-{out}"
        for part, engine in (
            ("policy", trainer.engine),
            ("critic", trainer.second_model and trainer.second_model.engine),
        ):
            if engine:
                save_file(engine.copy_state(), place / f"{name}.{part}-{rank}.safetensors")
        step(trainer, group, 3)
        write_weights(trainer, place / f"{name}.safetensors", group)
    exit_rank()
