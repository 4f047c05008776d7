"""Pause of generation during a weight update, compared with moving and loading the same bytes alone.

Real vLLM under constant load. `collective`: the pause includes a Gloo broadcast from the learner; `fetched`: the bytes
are in shared memory before it starts. Raw costs of the same weights, measured in the same run: the broadcast between
two otherwise idle processes, and vLLM's loading in an engine without requests.
"""

import argparse
import asyncio
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from vllm.v1.engine.async_llm import AsyncLLM

from benchmarks.harness import make_parser, write_result
from benchmarks.weights.engine_and_learner import (
    MEMBER,
    TIMEOUT_S,
    EngineAndLearner,
    announce,
    make_module,
    tensors_of,
)
from slipstream.broker.messages import OpenEpoch, Update
from slipstream.broker.weights import buckets
from slipstream.broker.weights.collective import CollectiveReceiver, CollectiveSender
from slipstream.broker.weights.shared_buckets import SharedBuckets
from slipstream.buffer.trajectory import Sampling
from slipstream.configs.engines import VllmEngineConfig
from slipstream.generators.engines.vllm.health import LoadRecorder

_BUCKET_BYTES = 64 << 20
_MAX_TOKENS = 200
_PROMPT = [2 + i % 12 for i in range(64)]
_PARTS = ("_receive", "_load", "finish_weight_update")
"""Methods of the worker. The last one finishes loading and verifies the loaded weights."""
_KV_SETTINGS = ["keep", "recompute"]

console = Console(highlight=False)
Seconds = dict[str, list[float]]


class TokenClock:
    """Times at which tokens were sampled, from the statistics of vLLM's steps."""

    def __init__(self, llm: AsyncLLM) -> None:
        recorder = next(each for each in llm.logger_manager.stat_loggers if isinstance(each, LoadRecorder))
        self._record = recorder.record
        self._steps: list[tuple[float, int]] = []
        recorder.record = self._record_step  # type: ignore[method-assign]

    def until_tokens(self, count: int, *, since: float) -> float | None:
        """Return the seconds from `since` until `count` tokens were sampled; None if not yet."""
        total = 0
        for at, tokens in self._steps:
            total += tokens if at > since else 0
            if total >= count:
                return at - since
        return None

    def _record_step(self, scheduler_stats: Any, iteration_stats: Any, *others: Any, **named: Any) -> None:
        self._record(scheduler_stats, iteration_stats, *others, **named)
        if iteration_stats is not None:
            self._steps.append((time.perf_counter(), iteration_stats.num_generation_tokens))


class Versions:
    """Two sets of weights, published in turn."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.module = make_module(layers=arguments.layers, width=arguments.width)
        # The end token's logit is zero and others are far above, so responses run to max_tokens.
        self.module.lm_head.weight[1].zero_()
        self._tensors = tensors_of(self.module)
        self._others = [(name, tensor + 1e-6) for name, tensor in self._tensors]
        self._count = 0

    def next(self, *, epoch: int) -> tuple[Update, list[Tensor]]:
        """Return the next update and its buckets."""
        self._count += 1
        tensors = self._tensors if self._count % 2 else self._others
        return announce(tensors, module=self.module, epoch=epoch, version=self._count, bucket_bytes=_BUCKET_BYTES)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self._tensors)


def main(arguments: argparse.Namespace) -> None:
    """Measure raw costs, then updates with each setting of on_weight_update."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    versions = Versions(arguments)
    results: dict[str, Seconds] = {"raw": _raw(versions, arguments.updates)}
    for on_weight_update in arguments.on_weight_update:
        config = VllmEngineConfig(max_num_seqs=arguments.requests, on_weight_update=on_weight_update)
        with (
            tempfile.TemporaryDirectory(prefix="pause-") as folder,
            EngineAndLearner(Path(folder) / "model", module=versions.module, config=config) as rig,
        ):
            measured = rig.run(_measure(rig, versions, arguments), timeout_s=1800)
        results["raw"]["load"] = measured.pop("idle")["load"]
        results |= {f"{on_weight_update}, {transport}": seconds for transport, seconds in measured.items()}
        write_result(arguments, {"bytes": versions.num_bytes, "seconds": results})
    _show(results, versions, arguments)


# --- raw costs -------------------------------------------------------------------------------------------------------
def _raw(versions: Versions, num_updates: int) -> Seconds:
    """Measure the broadcast alone, and the checksums of its bytes."""
    sender = CollectiveSender("127.0.0.1", device="cpu")
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_receive_only, args=(theirs,))
    process.start()
    host, port = sender.address
    ours.send_bytes(msgspec.msgpack.encode(OpenEpoch(1, [MEMBER], host, port, TIMEOUT_S)))
    sender.open_epoch(1, num_members=1, timeout_s=TIMEOUT_S)
    seconds: Seconds = {"broadcast": [], "checksums": []}
    for _ in range(num_updates):
        update, packed = versions.next(epoch=1)
        ours.send_bytes(msgspec.msgpack.encode(update))
        ours.recv_bytes()
        started_at = time.perf_counter()
        sender.broadcast(packed, timeout_s=TIMEOUT_S)
        ours.recv_bytes()
        seconds["broadcast"].append(time.perf_counter() - started_at)
        started_at = time.perf_counter()
        buckets.verify(packed, expected=update.checksums)
        seconds["checksums"].append(time.perf_counter() - started_at)
    ours.close()
    process.join(TIMEOUT_S)
    sender.close()
    return seconds


def _receive_only(commands: Connection) -> None:
    """Receiving process: repeatedly receives into the same memory."""
    torch.set_num_threads(1)
    receiver = CollectiveReceiver(device="cpu")
    receiver.open_epoch(msgspec.msgpack.decode(commands.recv_bytes(), type=OpenEpoch), rank=1)
    staging: list[Tensor] = []
    with suppress(EOFError):
        while True:
            update = msgspec.msgpack.decode(commands.recv_bytes(), type=Update)
            staging = buckets.allocate(update.bucket_bytes, reuse=staging)
            commands.send_bytes(b"waiting")
            receiver._group.receive(staging, timeout_s=TIMEOUT_S)  # type: ignore[union-attr]
            commands.send_bytes(b"here")
    receiver.close()


# --- updates ---------------------------------------------------------------------------------------------------------
async def _measure(rig: EngineAndLearner, versions: Versions, arguments: argparse.Namespace) -> dict[str, Seconds]:
    await rig.open_epoch()
    await rig.engine._running.collective_rpc(_time_parts)
    clock = TokenClock(rig.engine._running)
    measured = {"idle": await _updates(rig, versions, _fetched, num_updates=arguments.updates)}
    async with _kept_busy(rig, num_requests=arguments.requests):
        for name, apply in {"collective": _collective, "fetched": _fetched}.items():
            measured[name] = await _updates(
                rig, versions, apply, num_updates=arguments.updates, clock=clock, num_requests=arguments.requests
            )
    return measured


async def _updates(
    rig: EngineAndLearner,
    versions: Versions,
    apply: Callable[[EngineAndLearner, Update, list[Tensor]], Any],
    *,
    num_updates: int,
    clock: TokenClock | None = None,
    num_requests: int = 0,
) -> Seconds:
    """Measure the pause, its parts, and the time until every request has a new token on average."""
    seconds: Seconds = {"pause": [], "next tokens": []}
    await rig.engine._running.collective_rpc(_pop_parts)
    for _ in range(num_updates):
        update, packed = await asyncio.to_thread(versions.next, epoch=rig.epoch)
        if clock:
            await _until(clock, num_requests, since=time.perf_counter())
        started_at = time.perf_counter()
        pause = await apply(rig, update, packed)
        seconds["pause"].append(pause)
        if clock:
            seconds["next tokens"].append(await _until(clock, num_requests, since=started_at + pause) + pause)
    (parts,) = await rig.engine._running.collective_rpc(_pop_parts)
    return seconds | parts


async def _collective(rig: EngineAndLearner, update: Update, packed: list[Tensor]) -> float:
    pause, _ = await asyncio.gather(rig.engine.update(update), rig.broadcast(packed))
    return pause


async def _fetched(rig: EngineAndLearner, update: Update, packed: list[Tensor]) -> float:
    fetched = SharedBuckets(update.bucket_bytes)
    for ours, theirs in zip(fetched.tensors, packed, strict=True):
        await asyncio.to_thread(ours.copy_, theirs)
    try:
        return await rig.engine.update(update, fetched)
    finally:
        fetched.close()


async def _until(clock: TokenClock, count: int, *, since: float) -> float:
    deadline = time.perf_counter() + TIMEOUT_S
    while (seconds := clock.until_tokens(count, since=since)) is None:
        if time.perf_counter() > deadline:
            raise TimeoutError(f"{count} tokens must be sampled within {TIMEOUT_S:g} s, they were not")
        await asyncio.sleep(0.005)
    return seconds


@asynccontextmanager
async def _kept_busy(rig: EngineAndLearner, *, num_requests: int) -> AsyncIterator[None]:
    """Keep `num_requests` requests running during the block."""

    async def keep_requesting(slot: int) -> None:
        number = 0
        while True:
            seed = slot + number * num_requests
            sampling = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=_MAX_TOKENS, seed=seed)
            await rig.engine.generate(_PROMPT, sampling, request_id=f"request-{seed}")
            number += 1

    running = [asyncio.create_task(keep_requesting(slot)) for slot in range(num_requests)]
    try:
        yield
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _time_parts(worker: Any) -> None:
    """Make the worker record the time of each part of an update."""
    transfer = worker.weight_transfer_engine
    transfer.seconds = {name.strip("_"): [] for name in _PARTS}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timing(*arguments: Any) -> Any:
            started_at = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                transfer.seconds[name.strip("_")].append(time.perf_counter() - started_at)

        return timing

    for name in _PARTS:
        setattr(transfer, name, timed(name, getattr(transfer, name)))


def _pop_parts(worker: Any) -> Seconds:
    transfer = worker.weight_transfer_engine
    seconds, transfer.seconds = transfer.seconds, {name.strip("_"): [] for name in _PARTS}
    return seconds


def _show(results: dict[str, Seconds], versions: Versions, arguments: argparse.Namespace) -> None:
    raw = results["raw"]
    medians = {name: statistics.median(values) for name, values in raw.items()}
    size = f"{versions.num_bytes / 2**20:.1f} MiB"
    title = f"{arguments.updates} updates of {size}, {arguments.requests} requests; ms, median (longest)"
    table = Table("", "pause", "ratio to moving + loading alone", "until all have a token again", title=title)
    for name, seconds in results.items():
        if name != "raw":
            alone = medians["load"] + (medians["broadcast"] if name.endswith("collective") else 0)
            ratio = f"{statistics.median(seconds['pause']) / alone:.2f}"
            table.add_row(name, _ms(seconds["pause"]), ratio, _ms(seconds["next tokens"]))
    console.print(table)
    parts = Table("part", "ms, median (longest)", title="Alone, and inside an update")
    for name, values in raw.items():
        parts.add_row(f"{name} alone", _ms(values))
    for name, seconds in results.items():
        for part in (name.strip("_") for name in _PARTS):
            if name != "raw":
                parts.add_row(f"{name}: {part}", _ms(seconds[part]))
    console.print(parts)


def _ms(seconds: list[float]) -> str:
    return f"{1000 * statistics.median(seconds):.1f} ({1000 * max(seconds):.1f})"


if __name__ == "__main__":
    parser = make_parser("benchmarks.weights.update_pause", __doc__)
    parser.add_argument("--updates", type=int, default=20, help="updates per measurement (20)")
    parser.add_argument("--requests", type=int, default=32, help="requests running at any time (32)")
    parser.add_argument("--layers", type=int, default=4, help="of the model (4)")
    parser.add_argument("--width", type=int, default=128, help="of the model (128)")
    parser.add_argument(
        "--kv-on-update", nargs="+", choices=_KV_SETTINGS, default=_KV_SETTINGS, help="settings to measure (both)"
    )
    main(parser.parse_args())
