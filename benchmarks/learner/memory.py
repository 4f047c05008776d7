"""Peak memory of learner ranks on the CPU: the estimate of `slipstream plan` compared with two measured steps.

Each rank is a separate process. Memory is its peak resident memory after all models are loaded, minus the memory after
its imports.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.harness import make_parser, make_table, write_result
from slipstream.buffer.trajectory import Reward, Sampling, Trajectory, VersionSpan
from slipstream.configs.load import load
from slipstream.configs.run import RunConfig
from slipstream.launch.plan import HOST, Machine, make_plan

_MIB = 2**20
_TIMEOUT_S = 600
_SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 640,
    "intermediate_size": 1920,
    "num_hidden_layers": 6,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
_BASE = [
    "experiment=digits_cpu",
    "learner/engine=deepspeed",
    "learner.device=cpu",
    "model.max_length=1024",
    "data.max_prompt_tokens=256",
    "generators.sampling.max_tokens=768",
    "generators.group_size=2",
    "learner.prompts_per_step=2",
    "learner.tokens_per_microbatch=2048",
    "algorithm.updates_per_step=1",
]
_SETTINGS = {
    "one rank": [],
    "one rank, recomputed activations": ["learner.engine.gradient_checkpointing=true"],
    "ZeRO-2 on two ranks": ["learner.num_ranks=2", "learner.engine.zero_stage=2"],
    "ZeRO-3 on two ranks, with a reference": [
        "learner.num_ranks=2",
        "learner.engine.zero_stage=3",
        "algorithm.kl.coef=0.01",
    ],
    "LoRA of rank 16": ["model.lora.rank=16"],
    "bfloat16, with a critic": ["model.dtype=bfloat16", "recipe=ppo"],
}

console = Console(highlight=False)


def main(arguments: argparse.Namespace) -> None:
    """Print the estimate and the measured peak of each rank, for each setting."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        torch.manual_seed(0)
        Qwen2ForCausalLM(Qwen2Config(**_SIZES)).save_pretrained(model)
        for name, settings in _SETTINGS.items():
            overrides = [*_BASE, f"model.path={model}", *settings]
            run = load(overrides)
            estimates = _estimate(run)
            for rank, measured in enumerate(_measure(run, overrides, Path(folder))):
                row = {"setting": name, "rank": rank, "estimate_mib": estimates[rank], "measured_mib": measured}
                rows.append(row | {"ratio": estimates[rank] / measured})
    columns = {"setting": "{setting}", "rank": "{rank}", "estimate, MiB": "{estimate_mib:,.0f}"}
    console.print(make_table(rows, columns | {"measured, MiB": "{measured_mib:,.0f}", "ratio": "{ratio:.2f}"}))
    write_result(arguments, {"rows": rows})


def _estimate(run: RunConfig) -> list[float]:
    """Return the estimated MiB per rank for training, without imports, checkpoints, and published versions."""
    needs = [need for need in make_plan(run, Machine(host_gib=1024)).needs if need.place == HOST]
    trained = [need for need in needs if not need.cause.startswith(("libraries", "checkpoint", "published"))]
    names = [f"learner rank {rank}" for rank in range(run.learner.num_ranks)]
    return [1024 * sum(need.gib for need in trained if need.process == name) for name in names]


def _measure(run: RunConfig, overrides: list[str], folder: Path) -> list[float]:
    (folder / "rendezvous").unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.learner.memory", "--alone", str(folder), *overrides]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(run.learner.num_ranks)
    ]
    try:
        outputs = [rank.communicate(timeout=_TIMEOUT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [float(output.split()[-1]) for output in outputs]


def _train(folder: Path, overrides: list[str]) -> None:
    """Run two steps of one rank and print its peak."""
    from slipstream.learner.build import build_trainer
    from slipstream.learner.engines.deepspeed_engine import deepspeed_environment
    from slipstream.learner.ranks import exit_rank, join_ranks
    from slipstream.learner.role import return_freed_memory

    run, device = load(overrides), torch.device("cpu")
    os.environ.update(deepspeed_environment(device))
    import deepspeed  # noqa: F401

    torch.set_num_threads(1)
    return_freed_memory()
    ranks = join_ranks(
        rank=int(os.environ["RANK"]),
        size=run.learner.num_ranks,
        device=device,
        rendezvous=f"file://{folder}/rendezvous",
    )
    before = _resident("VmRSS")
    trainer = build_trainer(run, ranks=ranks)
    # Reset the peak: memory used while reading a checkpoint file is not part of training.
    Path("/proc/self/clear_refs").write_text("5")
    for step in (1, 2):
        trainer.step(_groups(run, vocab_size=trainer.engine.model.vocab_size), learner_version=0, step=step)
    print(_resident("VmHWM") - before)
    exit_rank()


def _resident(field: str) -> float:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) / 1024


def _groups(run: RunConfig, *, vocab_size: int) -> list[list[Trajectory]]:
    """Build groups as long as the settings allow."""
    random = np.random.default_rng(0)
    prompt, response = run.data.max_prompt_tokens, run.generators.sampling.max_tokens
    mask = np.arange(prompt + response) >= prompt
    groups = []
    for group in range(run.learner.prompts_per_step):
        shared = random.integers(0, vocab_size, size=prompt)
        groups.append(
            [
                Trajectory(
                    id=f"{group}-0-{index}",
                    group_id=str(group),
                    index=index,
                    prompt_uid=str(group),
                    attempt=0,
                    token_ids=np.concatenate([shared, random.integers(0, vocab_size, size=response)]).astype(np.int32),
                    model_mask=mask,
                    generator_logprobs=np.where(mask, -10.4, 0.0).astype(np.float32),
                    version_spans=[VersionSpan(prompt, 0)],
                    reward=Reward(total=float(random.random())),
                    stop_reason="stop",
                    sampling=Sampling(1.0, 1.0, -1, response, seed=index),
                    generator_id="generator-0",
                    started_at=0.0,
                    finished_at=1.0,
                    data_source="",
                )
                for index in range(run.generators.group_size)
            ]
        )
    return groups


if __name__ == "__main__":
    if sys.argv[1:2] == ["--alone"]:
        _train(Path(sys.argv[2]), sys.argv[3:])
    else:
        main(make_parser("benchmarks.learner.memory", __doc__).parse_args())
