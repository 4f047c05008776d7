"""Log-probabilities of vLLM and of the learner for a mixture of experts, with the learner's routing or the engine's.

A random Qwen3-MoE answers random prompts. The learner evaluates the answers, first with the weights that wrote them
(lag 0), then after optimizer steps that the engine has not applied. Replayed: it uses the experts recorded by vLLM.
"""

import argparse
import asyncio
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.harness import make_parser, make_table, write_result
from slipstream.buffer.trajectory import Sampling
from slipstream.configs.data import ModelConfig
from slipstream.configs.engines import VllmEngineConfig
from slipstream.configs.learner import OptimizerConfig
from slipstream.generators.engines.vllm.environment import engine_environment
from slipstream.learner.batching.collate import Layout, collate
from slipstream.learner.batching.microbatch import Sample
from slipstream.learner.engines.torch_engine import TorchEngine
from slipstream.learner.training.model import Policy, load_policy
from slipstream.scripts.init_random_model import make_tokenizer

ENGINE = VllmEngineConfig(max_num_seqs=64)
LAYOUT = Layout("shared_rows", 8192, 128)
Answer = tuple[Sample, list[float]]
"""With the engine's log-probability of each trained token."""

console = Console(highlight=False)


def main(arguments: argparse.Namespace) -> None:
    """Measure every data type, and print a line for each lag and routing."""
    os.environ.update(engine_environment(ENGINE))
    torch.set_num_threads(1)
    rows = [row for dtype in arguments.dtypes for row in _measure(dtype, arguments)]
    columns = {"dtype": "{dtype}", "lag": "{lag}", "routing": "{routing}", "other experts": "{other_experts:.2g}"}
    columns |= {"mean |d|": "{mean:.2g}", "max |d|": "{max:.2g}", "k3": "{k3:.2g}"}
    console.print(make_table(rows, columns))
    write_result(arguments, {"rows": rows})


def _measure(dtype: str, arguments: argparse.Namespace) -> list[dict[str, float | str]]:
    with tempfile.TemporaryDirectory() as folder:
        _make_model(Path(folder), arguments)
        model = ModelConfig(folder, dtype=dtype, max_length=128, moe=MoeConfig(router_replay=True))  # type: ignore[arg-type]
        answers = asyncio.run(_answer(model, arguments))
        policy = load_policy(model, device=torch.device("cpu"))
    learner = TorchEngine(policy, optimizer=OptimizerConfig(), device=torch.device("cpu"))
    rows = []
    for lag in range(max(arguments.lags) + 1):
        if lag in arguments.lags:
            for routing in ("own", "replayed"):
                figures = _compare(policy, answers, is_replayed=routing == "replayed")
                rows.append({"dtype": dtype, "lag": lag, "routing": routing} | figures)
        _train(learner, [sample for sample, _ in answers], seed=lag)
    return rows


def _make_model(folder: Path, arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=arguments.width,
        intermediate_size=2 * arguments.width,
        moe_intermediate_size=arguments.width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=arguments.experts,
        num_experts_per_tok=4,
        max_position_embeddings=256,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


async def _answer(model: ModelConfig, arguments: argparse.Namespace) -> list[Answer]:
    # Imported here because vLLM reads the environment at import.
    from slipstream.generators.engines.vllm.engine import VllmEngine

    engine = VllmEngine(model, ENGINE, seed=0)
    await engine.start()
    random = np.random.default_rng(0)
    prompts = random.integers(2, 12, size=(arguments.answers, 16)).tolist()
    sampling = [Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=arguments.tokens, seed=i) for i in range(999)]
    try:
        found = await asyncio.gather(
            *(engine.generate(p, sampling[i], request_id=str(i)) for i, p in enumerate(prompts))
        )
    finally:
        await engine.stop()
    answers, first = [], 0
    for number, (prompt, one) in enumerate(zip(prompts, found, strict=True)):
        token_ids = np.array([*prompt, *one.token_ids])
        trained = np.arange(len(prompt), len(token_ids))
        answers.append((Sample(token_ids, trained, first, str(number), experts=one.experts), one.logprobs))
        first += len(trained)
    return answers


@torch.no_grad()
def _compare(policy: Policy, answers: Sequence[Answer], *, is_replayed: bool) -> dict[str, float]:
    samples = [sample for sample, _ in answers]
    engine = torch.tensor([value for _, values in answers for value in values])
    learner = torch.zeros_like(engine)
    different, num_tokens = 0, 0
    assert policy.routers
    for microbatch in collate(samples, layout=LAYOUT):
        given = microbatch.experts
        assert given is not None
        passed = microbatch if is_replayed else replace(microbatch, experts=None)
        learner[microbatch.indices] = policy(passed)["logprobs"].float()
        is_read = microbatch.copies.flatten() > 0
        recorded, used = (x[is_read].sort(-1).values for x in (given.flatten(0, 1), policy.routers.chosen()))
        different += int((recorded != used).any(-1).any(-1).sum())
        num_tokens += int(is_read.sum())
    difference = learner - engine
    return {
        "other_experts": different / num_tokens,
        "mean": float(difference.abs().mean()),
        "max": float(difference.abs().max()),
        "k3": float((difference.exp() - 1 - difference).mean()),
    }


def _train(learner: TorchEngine[Policy], samples: list[Sample], *, seed: int) -> None:
    """Run one step of REINFORCE with random advantages, with replay."""
    generator = torch.Generator().manual_seed(seed)
    advantages = torch.randn(sum(len(sample.trained) for sample in samples), generator=generator)
    for microbatch in collate(samples, layout=LAYOUT):
        logprobs: Tensor = learner.forward(microbatch)["logprobs"]
        learner.backward(-(advantages[microbatch.indices] * logprobs).sum() / len(advantages))
    learner.step(learning_rate=1e-4)


if __name__ == "__main__":
    parser = make_parser("benchmarks.learner.router_replay", __doc__)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="(float32 bfloat16)")
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 4, 16], help="optimizer steps (0 1 4 16)")
    parser.add_argument("--answers", type=int, default=64, help="number of engine responses (64)")
    parser.add_argument("--tokens", type=int, default=64, help="longest answer (64)")
    parser.add_argument("--layers", type=int, default=4, help="layers, each with a router (4)")
    parser.add_argument("--experts", type=int, default=32, help="experts per layer, 4 of which are chosen (32)")
    parser.add_argument("--width", type=int, default=64, help="width of the model and of an expert (64)")
    main(parser.parse_args())
