"""python -m tests.e2e.engine_session FOLDER: a process with a VllmEngine that answers until it is killed."""

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
    """Say which processes there are, then answer one request per line of input."""
    from slipstream.generators.engines.vllm.engine import VllmEngine

    engine = VllmEngine(ModelConfig(path=folder), VLLM_CONFIG, seed=0)
    await engine.start()
    say(pids=[child.pid for child in psutil.Process().children(recursive=True)])
    while line := await asyncio.to_thread(sys.stdin.readline):
        completion = await engine.generate([4, 5], make_sampling(), request_id=line.strip())
        say(tokens=completion.token_ids)


def say(**record: object) -> None:
    """One line of JSON."""
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    os.environ.update(engine_environment(VLLM_CONFIG))
    # A role takes Ctrl-C as a wish to drain; this one takes no notice.
    signal.signal(signal.SIGINT, lambda _number, _frame: None)
    asyncio.run(main(sys.argv[1]))
