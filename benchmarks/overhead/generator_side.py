"""The generator's side: bare AsyncLLM, VllmEngine, and the whole role, in turn, with equally many requests in flight.

Consumes: overrides of a run on the command line, how long, how often.
Produces: one JSON line on standard output.
"""

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import redirect_stdout
from multiprocessing.synchronize import Event
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks.overhead.bare_engine import BareEngine
from benchmarks.overhead.command import side_arguments
from benchmarks.overhead.open_broker import open_broker
from benchmarks.overhead.rounds import alternate, summarise
from slipstream.broker.dataset import Dataset
from slipstream.broker.messages import Message
from slipstream.broker.transport.session import Session, StatusBoard, join
from slipstream.broker.weights.collective import CollectiveReceiver
from slipstream.buffer.trajectory import Sampling
from slipstream.configs.load import load
from slipstream.configs.run import RunConfig
from slipstream.generators.build import assemble
from slipstream.generators.engines.engine import Engine
from slipstream.generators.generator import Generator

_PATIENCE_S = 120.0
_SETTLE_S = 0.5


def main() -> None:
    """Measure and print."""
    arguments = side_arguments()
    with redirect_stdout(sys.stderr):
        result = _measure_side(arguments)
    print(json.dumps(result))


def _measure_side(arguments: argparse.Namespace) -> dict[str, Any]:
    run = load(arguments.overrides)
    torch.set_num_threads(1)
    bare = BareEngine(run)
    try:
        with open_broker(run) as admits:
            rates = asyncio.run(_measure(run, bare, admits, seconds=arguments.seconds, rounds=arguments.rounds))
    finally:
        bare.stop()
    return {"rates": rates}


async def _measure(run: RunConfig, bare: BareEngine, admits: Event, *, seconds: float, rounds: int) -> dict[str, Any]:
    joined, generator, engine = _assemble(run)
    serving = asyncio.create_task(generator.run())
    try:
        await _until(lambda: serving.done() or generator.status().state == "ready", what="the generator must be ready")
        if serving.done():
            serving.result()
        contestants = {
            "bare AsyncLLM": lambda: _flood(_ask_bare(run, bare), run, seconds=seconds),
            "VllmEngine.generate": lambda: _flood(_ask_engine(run, engine), run, seconds=seconds),
            "generator role": lambda: _run_role(generator, admits, seconds=seconds),
        }
        for warm_up in contestants.values():
            await warm_up()
        return summarise(await alternate(contestants, rounds=rounds), base="bare AsyncLLM")
    finally:
        generator.drain("the benchmark is over")
        await serving
        joined.thread.stop()


# --- contestants ---------------------------------------------------------------------------------------------------
def _ask_bare(run: RunConfig, bare: BareEngine) -> Callable[[], Awaitable[int]]:
    prompts = _prompts(run)
    return lambda: bare.generate(bare.encode(next(prompts)))


def _ask_engine(run: RunConfig, engine: Engine) -> Callable[[], Awaitable[int]]:
    prompts, numbers = _prompts(run), itertools.count()
    tokenizer = AutoTokenizer.from_pretrained(run.model.path)
    sampling = run.generators.sampling

    async def ask() -> int:
        number = next(numbers)
        drawn = Sampling(sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens, seed=number)
        token_ids = tokenizer.encode(next(prompts), add_special_tokens=False)
        # With the time in it, because request ids must differ from those of every earlier round.
        completion = await engine.generate(token_ids, drawn, request_id=f"engine-{time.perf_counter_ns()}-{number}")
        return len(completion.token_ids)

    return ask


async def _flood(ask: Callable[[], Awaitable[int]], run: RunConfig, *, seconds: float) -> float:
    """Response tokens per second with `max_concurrency` requests in flight, once they are."""
    total = 0
    ends = asyncio.Event()

    async def keep_asking() -> None:
        nonlocal total
        while not ends.is_set():
            num_tokens = await ask()
            total += num_tokens

    tasks = [asyncio.create_task(keep_asking()) for _ in range(run.generators.max_concurrency)]
    rate = await _rate(lambda: total, seconds=seconds)
    ends.set()
    await asyncio.gather(*tasks)
    return rate


async def _run_role(generator: Generator, admits: Event, *, seconds: float) -> float:
    admits.set()
    rate = await _rate(lambda: generator.status().gauges["tokens"], seconds=seconds)
    admits.clear()
    await _until(lambda: not generator.status().gauges["running"], what="the generator must run out of prompts")
    return rate


async def _rate(total: Callable[[], float], *, seconds: float) -> float:
    await asyncio.sleep(_SETTLE_S)
    started_at, before = time.perf_counter(), total()
    await asyncio.sleep(seconds)
    return (total() - before) / (time.perf_counter() - started_at)


# --- parts ---------------------------------------------------------------------------------------------------------
def _assemble(run: RunConfig) -> tuple[Session, Generator, Engine]:
    board = StatusBoard()
    joined = join(
        "generator",
        address=run.broker.address,
        max_message_bytes=run.broker.max_message_bytes,
        peer_id="generator-0",
        status=board,
        timeout_s=_PATIENCE_S,
    )
    generator = assemble(
        run,
        member=joined.member,
        client=joined.client,
        tokenizer=AutoTokenizer.from_pretrained(run.model.path),
        receiver=CollectiveReceiver(device="cpu"),
    )
    board.set_source(generator.status)
    loop = asyncio.get_running_loop()

    def forward(message: Message) -> None:
        loop.call_soon_threadsafe(generator.receive, message)

    joined.inbox.forward_to(forward)
    return joined, generator, generator._engine  # the role's own engine, so that both are measured on one process


async def _until(is_reached: Callable[[], bool], *, what: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not is_reached():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} within {_PATIENCE_S:g} s, it did not")
        await asyncio.sleep(0.05)


def _prompts(run: RunConfig) -> Iterator[str]:
    return itertools.cycle([str(row.prompt) for row in itertools.islice(Dataset(run.data.train_path), 1024)])


if __name__ == "__main__":
    main()
