"""Multi-turn responses with and without prefix caching, with real vLLM.

Every turn reads all earlier turns. Conversations run concurrently, each a prompt followed by model turns with an
observation after each. Engines with and without the cache alternate on the same conversations.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.harness import make_parser, rotate, write_result
from slipstream.buffer.trajectory import Sampling
from slipstream.configs.data import ModelConfig
from slipstream.configs.engines import VllmEngineConfig
from slipstream.generators.engines.vllm.engine import VllmEngine
from slipstream.generators.engines.vllm.environment import engine_environment
from slipstream.scripts.init_random_model import VOCABULARY_SIZE, make_model, make_tokenizer, save_model

console = Console(highlight=False)


def main(arguments: argparse.Namespace) -> None:
    """Measure both engines in turn and print medians."""
    length = arguments.prompt + 2 * arguments.turns * arguments.tokens
    seconds = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="prefixes-") as folder:
        path = Path(folder) / "model"
        model = make_model(layers=arguments.layers, width=arguments.width, seed=0, max_length=length + 1)
        save_model(path, model=model, tokenizer=make_tokenizer())
        for number, name in rotate(["cached", "computed again"], rounds=arguments.rounds):
            config = VllmEngineConfig(enable_prefix_caching=name == "cached", max_num_seqs=arguments.conversations)
            os.environ.update(engine_environment(config))
            taken = asyncio.run(
                _converse(ModelConfig(dtype="float32", path=str(path), max_length=length), config, arguments, number)
            )
            seconds[name].append(taken)
    table = Table("prefixes", "s, median", "turns/s")
    for name, values in seconds.items():
        middle = statistics.median(values)
        table.add_row(name, f"{middle:.2f}", f"{arguments.conversations * arguments.turns / middle:.1f}")
    pairs = zip(seconds["computed again"], seconds["cached"], strict=True)
    gain = statistics.median(again / cached for again, cached in pairs)
    console.print(table, f"computed again / cached: {gain:.2f} (median of {arguments.rounds} rounds)")
    write_result(arguments, {"seconds": dict(seconds), "gain": gain})


async def _converse(model: ModelConfig, config: VllmEngineConfig, arguments: argparse.Namespace, number: int) -> float:
    """Start an engine, run all conversations, and return the seconds they take."""
    random = np.random.default_rng(number)
    engine = VllmEngine(model, config, seed=0, reads_text=True)
    await engine.start()

    def draw(count: int) -> list[int]:
        return random.integers(2, VOCABULARY_SIZE, count).tolist()

    async def converse(index: int) -> None:
        token_ids = draw(arguments.prompt)
        for turn in range(arguments.turns):
            sampling = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=arguments.tokens, seed=index)
            completion = await engine.generate(token_ids, sampling, request_id=f"{index}-{turn}")
            token_ids += completion.token_ids + draw(arguments.tokens)

    try:
        started = time.perf_counter()
        await asyncio.gather(*(converse(index) for index in range(arguments.conversations)))
        return time.perf_counter() - started
    finally:
        await engine.stop()


if __name__ == "__main__":
    parser = make_parser("benchmarks.generators.prefix_caching", __doc__)
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each (3)")
    parser.add_argument("--conversations", type=int, default=16, help="conversations at once (16)")
    parser.add_argument("--turns", type=int, default=6, help="model turns per conversation (6)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens per prompt (512)")
    parser.add_argument("--tokens", type=int, default=32, help="tokens per turn, and per observation (32)")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model (8)")
    parser.add_argument("--width", type=int, default=512, help="width of the model (512)")
    main(parser.parse_args())
