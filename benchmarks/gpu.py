"""The learner on one GPU compared with bare kernels: a step, publishing, log-prob head, attention, bfloat16.

step        a model shaped like Qwen2.5-1.5B with random weights: tokens/s and MFU of forward, backward, and AdamW
            over packed rows, compared with the matrix products of its layers and head alone; peak memory
publish     its weights from the device to buckets in host memory, with checksums, and how long the learner waits
head        hidden states to log-probabilities and back: all logits at once, and a chunk at a time
attention   packed rows with the learner's kernel, and SDPA with an equivalent mask, forward and backward
probe       mean difference of log-probabilities between bfloat16 and float32

Every part stops at its share of --seconds. `--device cpu --tiny` runs all of them at sizes that need no GPU.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.harness import make_parser, write_result
from slipstream.broker.weights.checkpoint_names import CheckpointNames
from slipstream.configs.broker import WeightsConfig
from slipstream.configs.learner import DeepSpeedEngineConfig, OptimizerConfig
from slipstream.learner.algorithms.logprobs import DeferredLogits, Requested, measure_tokens
from slipstream.learner.batching.collate import Layout, collate
from slipstream.learner.batching.microbatch import Microbatch, Sample, Spans
from slipstream.learner.engines.deepspeed_engine import DeepSpeedEngine, deepspeed_environment
from slipstream.learner.publishing.staging import Stager
from slipstream.learner.ranks import join_ranks
from slipstream.learner.training.attention import PACKED, SINGLE_RANK, PackedRows, packed_attention
from slipstream.learner.training.model import OutputHead, Policy

GIB = 2**30
_PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}
"""Dense bfloat16 FLOP/s, by a part of the device's name."""
Figures = dict[str, float]

console = Console(highlight=False)


class Bench:
    """Device, sizes, and time limit shared by all parts."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device = torch.device(arguments.device)
        self.is_cuda = self.device.type == "cuda"
        self.is_tiny = arguments.tiny
        self.part_s = arguments.seconds / len(PARTS)
        self.half = torch.bfloat16
        self.name = torch.cuda.get_device_name(self.device) if self.is_cuda else "cpu"
        sizes = (2, 64, 128, 512) if self.is_tiny else (28, 1536, 8960, 151_936)
        self.layers, self.width, self.inner, self.vocabulary = sizes
        self.tokens, self.sequence = (256, 64) if self.is_tiny else (8192, 1024)

    def model(self) -> Qwen2ForCausalLM:
        """Build a random model of these sizes on the device."""
        heads = 4 if self.is_tiny else 12
        config = Qwen2Config(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
        )
        torch.manual_seed(0)
        with self.device:
            return Qwen2ForCausalLM(config).float()

    def seconds(self, call: Callable[[], Any], *, share: float = 1.0, most: int = 10) -> float:
        """Return the median time of `call` after a warm-up, repeated within the part's time."""
        ends_at = time.monotonic() + share * self.part_s
        call()
        found: list[float] = []
        while not found or (time.monotonic() < ends_at and len(found) < most):
            self.wait()
            began_at = time.perf_counter()
            call()
            self.wait()
            found.append(time.perf_counter() - began_at)
        return statistics.median(found)

    def peak_gib(self, call: Callable[[], Any]) -> float:
        """Return the peak allocation of `call` beyond what was allocated before; 0 on a CPU."""
        if not self.is_cuda:
            return 0.0
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return (torch.cuda.max_memory_allocated() - before) / GIB

    def wait(self) -> None:
        """Block until the device is idle."""
        if self.is_cuda:
            torch.cuda.synchronize()


# --- the step, publishing, the probe ---------------------------------------------------------------------------------
def measure_step(bench: Bench) -> Figures:
    """Measure an update over four microbatches, its matrix products alone, and publishing after it."""
    module = bench.model()
    module.gradient_checkpointing_enable({"use_reentrant": False})
    engine = _engine(module, bench)
    microbatches = _microbatches(bench, count=4)
    num_tokens = sum(int(microbatch.token_ids.numel()) for microbatch in microbatches)

    def update() -> None:
        for microbatch in microbatches:
            outputs = engine.forward(microbatch, requested=Requested(entropy=True))
            engine.backward(-outputs["logprobs"].mean())
        engine.step(learning_rate=1e-6)

    peak = bench.peak_gib(update)
    seconds = bench.seconds(update, share=0.6)
    products = bench.seconds(lambda: _products(bench), share=0.2) * len(microbatches)
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    flops = 6 * num_parameters * num_tokens
    fastest = next((peak for name, peak in _PEAK_FLOPS.items() if name in bench.name), 0.0)
    names = CheckpointNames(module)
    config = WeightsConfig(bucket_bytes=2**28 if bench.is_cuda else 2**16)
    stager = Stager(config, metadata=names.metadata(bench.half), device=bench.device)
    staged: list[Any] = []
    blocked: list[float] = []

    def publish() -> None:
        weights, reuse = names.convert(engine.gather_parameters()), staged.pop() if staged else None
        began_at = time.perf_counter()
        staged.append(stager.stage(version=1, weights=weights, canary=([], []), reuse=reuse))
        bench.wait()
        blocked.append(time.perf_counter() - began_at)
        staged[0].finish()

    publish_s = bench.seconds(publish, share=0.2)
    published = sum(bucket.numel() for bucket in staged[0].buckets) / GIB
    return {
        "step: tokens/s": num_tokens / seconds,
        "step: TFLOP/s (6 N)": flops / seconds / 1e12,
        "step: MFU": flops / seconds / fastest if fastest else 0.0,
        "step: seconds": seconds,
        "step: matrix products alone, seconds": products,
        "step: share of products": products / seconds,
        "step: peak GiB beside the weights": peak,
        "publish: GiB": published,
        "publish: seconds of the learner": statistics.median(blocked[1:]),
        "publish: seconds until in host memory": publish_s,
        "publish: GiB/s": published / publish_s,
    }


def measure_probe(bench: Bench) -> Figures:
    """Compare log-probabilities in bfloat16 with those in float32."""
    module = bench.model().eval()
    (microbatch,) = _microbatches(bench, count=1)
    with torch.no_grad():
        own = _policy(deepcopy(module), bench)(microbatch)["logprobs"]
        theirs = _policy(module, bench, dtype=torch.float32)(microbatch)["logprobs"]
    return {
        "probe: mean nats": float((own - theirs).abs().mean()),
        "probe: max nats": float((own - theirs).abs().max()),
    }


def _policy(module: Qwen2ForCausalLM, bench: Bench, *, dtype: torch.dtype | None = None) -> Policy:
    dtype = dtype or bench.half
    module.to(dtype).set_attn_implementation(PACKED)
    policy = Policy(module, compute_dtype=dtype)
    policy.head = OutputHead(module)
    return policy


def _engine(module: Qwen2ForCausalLM, bench: Bench) -> DeepSpeedEngine[Policy]:
    ranks = join_ranks(rank=0, size=1, device=bench.device)
    config = DeepSpeedEngineConfig(zero_stage=0, gradient_checkpointing=True)
    policy = _policy(module.train(), bench)
    return DeepSpeedEngine(policy, config=config, optimizer=OptimizerConfig(), ranks=ranks)


def _microbatches(bench: Bench, *, count: int) -> list[Microbatch]:
    """Build packed rows: pairs of answers that share a prompt of a quarter of their length."""
    random = np.random.default_rng(0)
    prompt_tokens, samples = bench.sequence // 4, list[Sample]()
    own = bench.sequence - prompt_tokens
    for group in range(count * bench.tokens // (prompt_tokens + 2 * own)):
        prompt = random.integers(0, bench.vocabulary, prompt_tokens)
        for _ in range(2):
            token_ids = np.concatenate([prompt, random.integers(0, bench.vocabulary, own)])
            trained = np.arange(prompt_tokens, bench.sequence)
            samples.append(Sample(token_ids, trained, len(samples) * own, group_id=str(group)))
    layout = Layout("shared_rows", bench.tokens, bench.tokens)
    return [microbatch.to(bench.device) for microbatch in collate(samples, layout=layout)]


def _products(bench: Bench) -> None:
    """Run the matrix products of a microbatch: every layer and the head; forward, recomputed, and backward."""
    kv = bench.width // (2 if bench.is_tiny else 6)
    layer = [(bench.width, bench.width + 2 * kv), (bench.width, bench.width), (bench.width, 2 * bench.inner)]
    layer.append((bench.inner, bench.width))
    states = {
        size: torch.randn(bench.tokens, size, device=bench.device, dtype=bench.half)
        for size in {size for shape in layer for size in shape}
    }
    for width, out in layer:
        weight = torch.randn(out, width, device=bench.device, dtype=bench.half)
        for _ in range(bench.layers):
            for _ in range(2):
                linear(states[width], weight)
            _ = states[out] @ weight, states[out].T @ states[width]
    weight = torch.randn(bench.vocabulary, bench.width, device=bench.device, dtype=bench.half)
    for part in states[bench.width].split(256):
        logits = linear(part, weight)
        _ = linear(part, weight), logits @ weight, logits.T @ part


# --- kernels ---------------------------------------------------------------------------------------------------------
def measure_head(bench: Bench) -> Figures:
    """Measure time and peak memory of log-probabilities and their gradients, [tokens, vocabulary]."""
    states = torch.randn(bench.tokens, bench.width, device=bench.device, dtype=bench.half, requires_grad=True)
    weight = (torch.randn(bench.vocabulary, bench.width, device=bench.device) / bench.width**0.5).requires_grad_()
    targets = torch.randint(0, bench.vocabulary, (bench.tokens,), device=bench.device)
    ones = torch.ones(bench.tokens, device=bench.device)
    whole = bench.tokens * bench.vocabulary

    def run(is_deferred: bool) -> None:
        states.grad = weight.grad = None
        logits = (
            DeferredLogits(states, weight, dtype=bench.half) if is_deferred else linear(states, weight.to(bench.half))
        )
        chunk = None if is_deferred and not bench.is_tiny else whole // 4 if is_deferred else whole
        measured = measure_tokens(logits, targets, ones, requested=Requested(entropy=True), chunk_elements=chunk)
        measured["logprobs"].mean().backward()

    figures: Figures = {}
    for name, is_deferred in (("all at once", False), ("by chunks", True)):
        figures[f"head, {name}: seconds"] = bench.seconds(lambda own=is_deferred: run(own), share=0.45)
        figures[f"head, {name}: peak GiB"] = bench.peak_gib(lambda own=is_deferred: run(own))
    return figures


def measure_attention(bench: Bench) -> Figures:
    """Measure sequences of 1.5k, 8k, and 32k tokens, with about 32k tokens in total."""
    heads, width = (4, 16) if bench.is_tiny else (12, 128)
    figures: Figures = {}
    lengths = (16, 32) if bench.is_tiny else (1536, 8192, 32_768)
    for length in lengths:
        count = max(1, (lengths[-1] if bench.is_tiny else 32_768) // length)
        spans = Spans([length] * count, list(range(count)))
        states = [
            torch.randn(1, each, length * count, width, device=bench.device, dtype=bench.half, requires_grad=True)
            for each in (heads, 2, 2)
        ]
        packed_rows, share = PackedRows(spans, SINGLE_RANK), 0.5 / len(lengths)

        def by_kernel(states: list[Tensor] = states, packed_rows: PackedRows = packed_rows) -> None:
            found, _ = packed_attention(nn.Module(), *states, None, packed_rows=packed_rows)
            torch.autograd.grad(found.float().sum(), states)

        figures[f"attention, {count} x {length}, kernel: seconds"] = bench.seconds(by_kernel, share=share)
        rows = [
            state.unflatten(2, (count, length))[0].transpose(0, 1).contiguous() for state in map(Tensor.detach, states)
        ]
        own = [row.requires_grad_() for row in rows]
        mask = torch.ones(length, length, dtype=torch.bool, device=bench.device).tril()

        def by_mask(own: list[Tensor] = own, mask: Tensor = mask) -> None:
            # Repeat keys as transformers does: no fused kernel accepts a mask with fewer key heads.
            query, key, value = (part.repeat_interleave(heads // part.shape[1], 1) for part in own)
            found = scaled_dot_product_attention(query, key, value, attn_mask=mask)
            torch.autograd.grad(found.float().sum(), own)

        figures[f"attention, {count} x {length}, mask: seconds"] = bench.seconds(by_mask, share=share)
    return figures


# --- command line ----------------------------------------------------------------------------------------------------
PARTS: dict[str, Callable[[Bench], Figures]] = {
    "step": measure_step,
    "head": measure_head,
    "attention": measure_attention,
    "probe": measure_probe,
}


def main(arguments: argparse.Namespace) -> int:
    """Measure each part and print a table; return 1 if a part failed."""
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit(
            "error: benchmarks.gpu needs an NVIDIA GPU that torch can use; --device cpu --tiny tries it without one."
        )
    os.environ.update(deepspeed_environment(device))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    bench = Bench(arguments)
    figures: Figures = {}
    errors: dict[str, str] = {}
    for name in arguments.parts:
        try:
            figures |= PARTS[name](bench)
        except (RuntimeError, AssertionError, TypeError, ValueError) as error:
            # Measure the other parts anyway, because time on such a machine is short.
            errors[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        if bench.is_cuda:
            torch.cuda.empty_cache()
    table = Table("", bench.name)
    for name, value in figures.items():
        table.add_row(name, f"{value:,.4g}")
    for name, message in errors.items():
        table.add_row(name, f"FAILED: {message}")
    console.print(table)
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": bench.name}
    write_result(arguments, {"figures": figures, "errors": errors, "versions": versions})
    return 1 if errors else 0


if __name__ == "__main__":
    parser = make_parser("benchmarks.gpu", __doc__)
    parser.add_argument("--device", default="cuda:0", help="device (cuda:0)")
    parser.add_argument("--tiny", action="store_true", help="small sizes")
    parser.add_argument("--seconds", type=float, default=160.0, help="time of all parts together (160)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help=f"({' '.join(PARTS)})")
    sys.exit(main(parser.parse_args()))
