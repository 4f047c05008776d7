"""python -m tests.e2e.engine_session FOLDER: a process that serves a VllmEngine until it is killed."""

import asyncio
import json
import os
import signal
import sys

import psutil

from slipstream.configs.data import ModelConfig
from slipstream.generators.engines.vllm.environment import engine_environment
from tests.contract.engines import VLLM_CONFIG, make_sampling


async def main(folder: str) -> None:
    """Print the engine's process ids, then answer one request per line of input."""
    from slipstream.generators.engines.vllm.engine import VllmEngine

    engine = VllmEngine(ModelConfig(max_length=64, dtype="float32", path=folder), VLLM_CONFIG, seed=0)
    await engine.start()
    write(pids=[child.pid for child in psutil.Process().children(recursive=True)])
    while line := await asyncio.to_thread(sys.stdin.readline):
        completion = await engine.generate([4, 5], make_sampling(), request_id=line.strip())
        write(tokens=completion.token_ids)


def write(**record: object) -> None:
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    os.environ.update(engine_environment(VLLM_CONFIG))
    # A role drains at Ctrl-C. This process ignores it.
    signal.signal(signal.SIGINT, lambda _number, _frame: None)
    asyncio.run(main(sys.argv[1]))
