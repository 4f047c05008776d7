"""A learner rank that trains with many algorithms, for `run_ranks`."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from slipstream.configs.data import LoraConfig, MoeConfig, SftConfig
from slipstream.configs.learner import OptimizerConfig
from slipstream.learner.build import build_trainer
from slipstream.learner.engines.deepspeed_engine import deepspeed_environment
from slipstream.learner.ranks import Ranks, exit_rank, join_ranks
from slipstream.learner.sft.run import PairTrainer, SftTrainer
from tests.families import make_family
from tests.unit.learner.builders import CPU, make_groups, make_model, make_run, weights, zero
from tests.unit.learner.sft.test_run import make_demonstrations, make_pairs
from tests.unit.learner.test_every_algorithm import make_algorithm_groups, make_algorithm_run

TIMEOUT_S = 120.0
KEYS = (
    *(f"learner/{name}" for name in ("loss", "grad_norm", "kept_fraction", "idle_fraction", "tokens", "grad_cosine")),
    *("log_ratio", "entropy"),
)

SMOOTH = OptimizerConfig(learning_rate=1e-3, epsilon=1e-4)
"""With Adam's usual epsilon, a gradient that cancels to rounding moves its weight as far as any other gradient."""
SUPERVISED = {
    "sft": (SftTrainer, SftConfig("a", batch_size=8), make_demonstrations),
    "pairs": (PairTrainer, SftConfig("a", objective="pairs", batch_size=8), make_pairs),
}
SPECIAL = {
    "adapter": {"lora": LoraConfig(rank=4)},
    # Each expert's share covers all ranks and microbatches, so one rank's share would be wrong.
    "experts": {"moe": MoeConfig(router_aux_loss=5)},
}
"""Settings of the model."""
FAMILY = "family-"
"""Prefix of names that mean the default algorithm with a model of that family."""


def make_models(folder: Path, names: list[str]) -> None:
    """Write the models for these names, with attention heads for four ranks and key/value heads for two."""
    for seed in (0, 7):
        config = make_model(folder, seed=seed) / "config.json"
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config.write_text(json.dumps(json.loads(config.read_text()) | heads))
    for name in names:
        if name.startswith(FAMILY) or name == "experts":
            make_family(folder, family_of(name))


def family_of(name: str) -> str:
    return "qwen3_moe" if name == "experts" else name.removeprefix(FAMILY)


def train(folder: Path, name: str, *, ranks: Ranks, **learner: Any) -> tuple[list[dict], dict[str, torch.Tensor]]:
    """Run two steps with the named algorithm, or of a supervised run. Returns metrics and weights."""
    settings = {"optimizer": SMOOTH} | learner
    torch.manual_seed(0)
    if name in SUPERVISED:
        kind, sft, make = SUPERVISED[name]
        run = make_run(make_model(folder), learner=settings, mode="sft", sft=sft)
        trainer = build_trainer(run, ranks=ranks)
        supervised = kind(run, trainer=trainer, ranks=ranks, num_steps=4)
        metrics = [supervised.step(make(8, seed=step), step=step) for step in (1, 2)]
    else:
        if name.startswith(FAMILY) or name in SPECIAL:
            path = make_model(folder) if name == "adapter" else folder / family_of(name)
            run, groups = make_run(path, learner=settings), make_groups(longest=20)
            model = msgspec.structs.replace(run.model, **SPECIAL.get(name, {}))
            run = msgspec.structs.replace(run, model=model)
        else:
            run, groups = make_algorithm_run(folder, name, learner=settings), make_algorithm_groups(name)
        trainer = build_trainer(run, ranks=ranks)
        metrics = [trainer.step(groups, learner_version=0, step=1)]
        if numbers := trainer.step_tokens:
            # Weighted by position, so that swapped tokens are detected.
            metrics[0] |= {
                name: float(np.mean(column * np.cos(np.arange(len(column)))))
                for name, column in numbers.columns.items()
            }
        metrics.append(trainer.step(groups, learner_version=1, step=2))
    kept = [
        {key: value for key, value in row.items() if key in KEYS or "expert" in key or "aux" in key} for row in metrics
    ]
    return kept, weights(trainer)


def main(rank: int, ranks: int, sequence_parallel: int, stage: int, folder: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ.update(deepspeed_environment(CPU))
    place, rendezvous = Path(folder), f"file://{folder}/rendezvous"
    group = join_ranks(rank=rank, size=ranks, device=CPU, timeout_s=TIMEOUT_S, rendezvous=rendezvous)
    sizes = {"num_ranks": ranks, "sequence_parallel": sequence_parallel}
    learner = {"engine": zero(stage), "tokens_per_microbatch": 64, **sizes}
    for name in names:
        metrics, found = train(place, name, ranks=group, **learner)
        if group.is_first:
            save_file({key: tensor.contiguous().clone() for key, tensor in found.items()}, place / f"{name}.st")
            (place / f"{name}.json").write_text(json.dumps(metrics))
    exit_rank()
