"""A learner rank that trains with many algorithms: `python -m tests.integration.algorithm_ranks`."""

import argparse
import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from slipstream.configs.learner import OptimizerConfig
from slipstream.learner.build import build_trainer
from slipstream.learner.engines.deepspeed_engine import deepspeed_environment
from slipstream.learner.ranks import exit_rank, join_ranks
from tests.unit.learner.builders import CPU, weights, zero
from tests.unit.learner.test_every_algorithm import make_algorithm_groups, make_algorithm_run

TIMEOUT_S = 120.0
KEYS = ("learner/loss", "learner/grad_norm", "learner/kept_fraction", "learner/idle_fraction", "learner/tokens")

SMOOTH = OptimizerConfig(learning_rate=1e-3, epsilon=1e-4)
"""With Adam's usual epsilon a gradient that cancels to rounding moves its weight as far as any other."""


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--zero", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("names", nargs="+")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.update(deepspeed_environment(CPU))
    rendezvous = f"file://{args.folder / 'rendezvous'}"
    ranks = join_ranks(rank=args.rank, size=2, device=CPU, timeout_s=TIMEOUT_S, rendezvous=rendezvous)
    for name in args.names:
        learner = {"engine": zero(args.zero), "num_ranks": 2, "tokens_per_microbatch": 64, "optimizer": SMOOTH}
        trainer = build_trainer(make_algorithm_run(args.folder, name, learner=learner), ranks=ranks, device=CPU)
        metrics = [trainer.step(make_algorithm_groups(name), learner_version=v, step=v + 1) for v in range(2)]
        found = weights(trainer)
        if ranks.is_first:
            save_file({key: tensor.contiguous().clone() for key, tensor in found.items()}, args.folder / f"{name}.st")
            (args.folder / f"{name}.json").write_text(json.dumps([{key: m[key] for key in KEYS} for m in metrics]))
    exit_rank()


if __name__ == "__main__":
    main()
