"""Stages of a weight update on one machine, next to a plain copy of the same bytes.

Real vLLM under constant load, and versions in shared memory as the learner writes them: the default run's model, and a
randomly initialized one with the shape of SmolLM2-135M. Requests are decoded in every stage except the pause.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Event
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.harness import make_parser, write_result
from benchmarks.weights.engine_and_learner import EngineAndLearner, announce, make_module, tensors_of
from slipstream.broker.weights import buckets
from slipstream.broker.weights.fetcher import Fetcher
from slipstream.broker.weights.shared_buckets import SharedBuckets
from slipstream.buffer.trajectory import Sampling
from slipstream.configs.engines import VllmEngineConfig
from slipstream.generators.weight_updates import probe

_BUCKET_BYTES = 64 << 20
_MAX_TOKENS = 200
_PROMPT = [2 + i % 12 for i in range(64)]
_STAGES = {
    "copy": "a plain copy of the bytes",
    "write": "learner: write into shared memory",
    "checksums": "learner: checksums",
    "receive": "generator: map, verify checksums",
    "prepare": "engine: prepare",
    "load": "- load into the second copy",
    "compare": "- compare bit for bit",
    "pause": "pause",
    "switch": "- switch",
    "gap": "- longest time between two steps around it",
    "usual gap": "- the same without an update",
    "probe": "probe",
}

console = Console(highlight=False)
Seconds = dict[str, list[float]]


def make_135m() -> LlamaForCausalLM:
    """Build a model with the shape of SmolLM2-135M and random weights."""
    torch.manual_seed(0)
    shape = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    config = LlamaConfig(
        **shape,
        intermediate_size=1536,
        vocab_size=49152,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def main(arguments: argparse.Namespace) -> None:
    """Measure updates of each model."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    results: dict[str, Any] = {}
    for name in arguments.models:
        module = make_135m() if name == "135m" else make_module(is_tied=True, layers=4)
        config = VllmEngineConfig(max_num_seqs=arguments.requests)
        with (
            tempfile.TemporaryDirectory(prefix="pause-") as folder,
            EngineAndLearner(Path(folder) / "model", module=module, config=config) as rig,
        ):
            seconds = rig.run(_measure(rig, module, arguments), timeout_s=1800)
        results[name] = {"bytes": sum(tensor.nbytes for _, tensor in tensors_of(module)), "seconds": seconds}
        write_result(arguments, results)
    _show(results, arguments)


async def _measure(rig: EngineAndLearner, module: PreTrainedModel, arguments: argparse.Namespace) -> Seconds:
    seconds: Seconds = defaultdict(list)
    memories: list[SharedBuckets | None] = [None, None]
    await rig.engine._running.collective_rpc(_time_steps)
    async with _kept_busy(rig, num_requests=arguments.requests):
        for version in range(arguments.updates + 2):
            measured = await _update(rig, module, version, memories)
            # The first two versions allocate memory.
            for stage, duration in measured.items() if version > 1 else ():
                seconds[stage].append(duration)
    return seconds


async def _update(
    rig: EngineAndLearner, module: PreTrainedModel, version: int, memories: list[SharedBuckets | None]
) -> dict[str, float]:
    watch = _Watch()
    update, memory = await asyncio.to_thread(
        announce,
        tensors_of(module),
        module=module,
        version=version,
        bucket_bytes=_BUCKET_BYTES,
        memory=memories[version % 2],
    )
    memories[version % 2], other = memory, memories[(version + 1) % 2] or memory
    watch.restart()
    await asyncio.to_thread(lambda: [one.copy_(two) for one, two in zip(other.tensors, memory.tensors, strict=True)])
    watch.stop("copy")
    await asyncio.to_thread(buckets.pack, tensors_of(module), update.slots, into=memory.tensors)
    watch.stop("write")
    await asyncio.to_thread(buckets.checksums, memory.tensors)
    watch.stop("checksums")
    received = await asyncio.to_thread(_FETCHER.fetch, update, cancelled=Event())
    watch.stop("receive")
    await rig.engine.prepare(update, received)
    watch.stop("prepare")
    await _longest_gap(rig, seconds=0)
    watch.seconds["usual gap"] = await _longest_gap(rig)
    watch.seconds["pause"] = await rig.engine.switch(update)
    watch.seconds["gap"] = await _longest_gap(rig)
    watch.restart()
    await probe(rig.engine, update)
    watch.stop("probe")
    return watch.seconds | rig.engine.update_seconds


_FETCHER = Fetcher(None)


class _Watch:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.restart()

    def restart(self) -> None:
        self._at = time.perf_counter()

    def stop(self, stage: str) -> None:
        self.seconds[stage] = time.perf_counter() - self._at
        self.restart()


def _time_steps(worker: Any) -> None:
    """Make the worker record the longest time between two steps."""
    execute, worker.gap, worker.ended_at = worker.execute_model, 0.0, time.perf_counter()

    def timed(*arguments: Any, **named: Any) -> Any:
        worker.gap = max(worker.gap, time.perf_counter() - worker.ended_at)
        try:
            return execute(*arguments, **named)
        finally:
            worker.ended_at = time.perf_counter()

    worker.execute_model = timed


async def _longest_gap(rig: EngineAndLearner, *, seconds: float = 0.5) -> float:
    """Return the longest time between two steps since the last call, after waiting."""
    await asyncio.sleep(seconds)
    (gap,) = await rig.engine._running.collective_rpc(_pop_gap)
    return gap


def _pop_gap(worker: Any) -> float:
    gap, worker.gap = worker.gap, 0.0
    return gap


@asynccontextmanager
async def _kept_busy(rig: EngineAndLearner, *, num_requests: int) -> AsyncIterator[None]:
    """Keep `num_requests` requests running during the block."""

    async def keep_requesting(slot: int) -> None:
        number = 0
        while True:
            seed = slot + number * num_requests
            sampling = Sampling(
                temperature=1.0, top_p=1.0, top_k=-1, max_tokens=_MAX_TOKENS, seed=seed, ignore_eos=True
            )
            await rig.engine.generate(_PROMPT, sampling, request_id=f"request-{seed}")
            number += 1

    running = [asyncio.create_task(keep_requesting(slot)) for slot in range(num_requests)]
    try:
        yield
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _show(results: dict[str, Any], arguments: argparse.Namespace) -> None:
    title = f"{arguments.updates} updates, {arguments.requests} requests; ms, median (longest)"
    names = [f"{name}, {result['bytes'] / 1e6:.1f} MB" for name, result in results.items()]
    table = Table("stage", *names, title=title)
    for stage, text in _STAGES.items():
        table.add_row(text, *(_ms(result["seconds"].get(stage, [])) for result in results.values()))
    limits = []
    for result in results.values():
        copy, pause = (statistics.median(result["seconds"][stage]) for stage in ("copy", "pause"))
        limits.append(f"{pause / (1.5 * copy + 0.005):.2f}")
    table.add_row("pause / (1.5 x copy + 5 ms)", *limits)
    console.print(table)


def _ms(seconds: list[float]) -> str:
    return f"{1000 * statistics.median(seconds):.1f} ({1000 * max(seconds):.1f})" if seconds else ""


if __name__ == "__main__":
    parser = make_parser("benchmarks.weights.update_pause", __doc__)
    parser.add_argument("--updates", type=int, default=20, help="updates per model (20)")
    parser.add_argument("--requests", type=int, default=8, help="requests running at any time (8)")
    parser.add_argument("--models", nargs="+", choices=["default", "135m"], default=["default", "135m"])
    main(parser.parse_args())
