"""Generator side of the overhead: bare AsyncLLM, VllmEngine, whole role, with the same number of requests in flight."""

import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from multiprocessing.synchronize import Event
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from benchmarks.overhead.open_broker import open_broker
from benchmarks.overhead.rounds import measure_in_turn, side_arguments, summarize
from benchmarks.router import join_run
from slipstream.broker.dataset import read_train
from slipstream.broker.messages import Row
from slipstream.broker.transport.session import Session, StatusBoard, call_threadsafe
from slipstream.broker.weights.collective import CollectiveReceiver
from slipstream.buffer.trajectory import Sampling
from slipstream.configs.engines import VllmEngineConfig
from slipstream.configs.load import load
from slipstream.configs.run import RunConfig
from slipstream.generators.build import assemble
from slipstream.generators.engines.engine import Engine
from slipstream.generators.generator import Generator
from slipstream.generators.tokenization import PromptEncoder, load_tokenizer

_TIMEOUT_S = 120.0


class BareEngine:
    """vLLM's AsyncLLM as in its examples, with the engine settings and sampling of a run.

    Like VllmEngine, it uses one seed per request and returns one output at the end.
    """

    def __init__(self, run: RunConfig) -> None:
        """Start the engine process, which takes half a minute on a CPU."""
        engine = run.generators.engine
        assert isinstance(engine, VllmEngineConfig)
        self._sampling = run.generators.sampling
        self._end_token_id = GenerationConfig.from_pretrained(run.model.path).eos_token_id
        self._num_requests = 0
        self._llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=run.model.path,
                dtype=run.model.dtype,
                skip_tokenizer_init=True,
                max_model_len=run.model.max_length,
                max_num_seqs=engine.max_num_seqs,
                distributed_executor_backend="uni",
                enforce_eager=current_platform.is_cpu() if engine.enforce_eager is None else engine.enforce_eager,
                enable_prefix_caching=False,
                logprobs_mode="processed_logprobs",
                seed=run.seed,
                disable_log_stats=True,
            )
        )

    async def generate(self, prompt_token_ids: list[int]) -> int:
        """Generate one response; return its number of tokens."""
        self._num_requests += 1
        params = SamplingParams(
            temperature=self._sampling.temperature,
            max_tokens=self._sampling.max_tokens,
            seed=self._num_requests,
            stop_token_ids=[] if self._sampling.ignore_eos else [self._end_token_id],
            ignore_eos=self._sampling.ignore_eos,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"prompt_token_ids": prompt_token_ids}
        async for output in self._llm.generate(prompt, params, f"bare-{self._num_requests}"):
            final = output
        return len(final.outputs[0].token_ids)

    def stop(self) -> None:
        self._llm.shutdown()


def main() -> None:
    """Measure. Standard output gets one line of JSON; vLLM's output goes to standard error."""
    arguments = side_arguments("benchmarks.overhead.generator_side")
    with redirect_stdout(sys.stderr):
        run = load(arguments.overrides)
        torch.set_num_threads(1)
        bare = BareEngine(run)
        try:
            with open_broker(run) as admits:
                rates = asyncio.run(_measure(run, bare, admits, seconds=arguments.seconds, rounds=arguments.rounds))
        finally:
            bare.stop()
    print(json.dumps({"rates": rates}))


async def _measure(run: RunConfig, bare: BareEngine, admits: Event, *, seconds: float, rounds: int) -> dict[str, Any]:
    session, generator, engine = _assemble(run)
    serving = asyncio.create_task(generator.run())
    try:
        await _until(
            lambda: serving.done() or generator.status().state == "ready", condition="the generator must be ready"
        )
        if serving.done():
            serving.result()
        contestants = {
            "bare AsyncLLM": lambda: _flood(_ask_bare(run, bare), run, seconds=seconds),
            "VllmEngine.generate": lambda: _flood(_ask_engine(run, engine), run, seconds=seconds),
            "generator role": lambda: _run_role(generator, admits, seconds=seconds),
        }
        for warm_up in contestants.values():
            await warm_up()
        rates = await measure_in_turn(contestants, rounds=rounds)
        return summarize(rates, base="bare AsyncLLM", operations_per_token=_operations_per_token(run))
    finally:
        generator.drain("the benchmark is over")
        await serving
        session.thread.stop()


# --- contestants ---------------------------------------------------------------------------------------------------
def _ask_bare(run: RunConfig, bare: BareEngine) -> Callable[[], Awaitable[int]]:
    encoder, prompts = _encoder(run), _prompts(run)
    return lambda: bare.generate(encoder.encode(next(prompts))[0])


def _ask_engine(run: RunConfig, engine: Engine) -> Callable[[], Awaitable[int]]:
    encoder, prompts, numbers = _encoder(run), _prompts(run), itertools.count()
    sampling = run.generators.sampling

    async def ask() -> int:
        number = next(numbers)
        drawn = Sampling(
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            sampling.max_tokens,
            seed=number,
            ignore_eos=sampling.ignore_eos,
        )
        token_ids, _ = encoder.encode(next(prompts))
        # Includes the time, because request ids must be unique over all rounds.
        completion = await engine.generate(token_ids, drawn, request_id=f"engine-{time.perf_counter_ns()}-{number}")
        return len(completion.token_ids)

    return ask


async def _flood(ask: Callable[[], Awaitable[int]], run: RunConfig, *, seconds: float) -> float:
    """Return response tokens per second with `max_concurrency` requests in flight, from the first until all have ended.

    Answers of equal length end together, so a clock that stopped between two ends would count one set of them too much
    or too little.
    """
    total = 0
    ends = asyncio.Event()
    started_at = time.perf_counter()

    async def keep_asking() -> None:
        nonlocal total
        while not ends.is_set():
            num_tokens = await ask()
            total += num_tokens

    tasks = [asyncio.create_task(keep_asking()) for _ in range(run.generators.max_concurrency)]
    await asyncio.sleep(seconds)
    ends.set()
    await asyncio.gather(*tasks)
    return total / (time.perf_counter() - started_at)


async def _run_role(generator: Generator, admits: Event, *, seconds: float) -> float:
    """Return response tokens per second from the first prompt until all are answered, as in `_flood`."""
    before = float(generator.status().gauges["tokens"] or 0)
    admits.set()
    await _until(lambda: bool(generator.status().gauges["running"]), condition="the generator must get a prompt")
    started_at = time.perf_counter()
    await asyncio.sleep(seconds)
    admits.clear()
    await _until(lambda: not generator.status().gauges["running"], condition="the generator must be idle")
    return (float(generator.status().gauges["tokens"] or 0) - before) / (time.perf_counter() - started_at)


# --- the role --------------------------------------------------------------------------------------------------------
def _assemble(run: RunConfig) -> tuple[Session, Generator, Engine]:
    board = StatusBoard()
    session = join_run(run, "generator", "generator-0", board=board)
    generator = assemble(
        run,
        member=session.member,
        client=session.client,
        tokenizer=AutoTokenizer.from_pretrained(run.model.path),
        receiver=CollectiveReceiver(device="cpu"),
    )
    board.set_source(generator.status)
    session.inbox.forward_to(partial(call_threadsafe, asyncio.get_running_loop(), generator.receive))
    # The role's engine, so that wrapped and whole share one engine process.
    return session, generator, generator._engine


async def _until(is_reached: Callable[[], bool], *, condition: str) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not is_reached():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{condition} within {_TIMEOUT_S:g} s, it was not")
        await asyncio.sleep(0.01)


def _prompts(run: RunConfig) -> Iterator[Row]:
    return itertools.cycle(list(itertools.islice(read_train(run), 1024)))


def _encoder(run: RunConfig) -> PromptEncoder:
    return PromptEncoder(load_tokenizer(run.model), max_prompt_tokens=run.data.max_prompt_tokens)


def _operations_per_token(run: RunConfig) -> float:
    """Floating-point operations of the weights' matrix products per response token; attention is left out.

    A prompt passes the layers once per answer, and the head only at its last token.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(run.model.path))
    layers = sum(weight.numel() for weight in model.base_model.layers.parameters() if weight.dim() == 2)
    encoder, prompts = _encoder(run), itertools.islice(_prompts(run), 64)
    prompt_tokens = statistics.mean(len(encoder.encode(prompt)[0]) for prompt in prompts)
    max_tokens = run.generators.sampling.max_tokens
    return 2 * layers * (1 + prompt_tokens / max_tokens) + 2 * model.lm_head.weight.numel()


if __name__ == "__main__":
    main()
