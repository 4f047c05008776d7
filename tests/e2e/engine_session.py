"""python -m tests.e2e.engine_session FOLDER spawned|forked: a process that serves a VllmEngine until its input ends."""

import asyncio
import json
import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection

import psutil

from slipstream.configs.data import ModelConfig
from slipstream.generators.engines.vllm.environment import engine_environment
from tests.contract.engines import VLLM_CONFIG, make_sampling

LATE = "ENGINE_SESSION_LATE"
"""Variable that the fork server lacks."""


async def main(folder: str) -> None:
    """Print all child processes, then answer one request per line of input."""
    from slipstream.generators.engines.vllm.engine import VllmEngine

    engine = VllmEngine(ModelConfig(max_length=64, dtype="float32", path=folder), VLLM_CONFIG, seed=0)
    await engine.start()
    write(pids=[child.pid for child in psutil.Process().children(recursive=True)])
    while line := await asyncio.to_thread(sys.stdin.readline):
        completion = await engine.generate([4, 5], make_sampling(), request_id=line.strip())
        write(tokens=completion.token_ids)


def report_environment(end: Connection) -> None:
    end.send(os.environ.get(LATE))


def write(**record: object) -> None:
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    os.environ.update(engine_environment(VLLM_CONFIG))
    # A role drains at Ctrl-C. This process ignores it.
    signal.signal(signal.SIGINT, lambda _number, _frame: None)
    if sys.argv[2] == "forked":
        from slipstream.generators.engines.vllm import process

        process.start_fork_server()
        os.environ[LATE] = "set after the fork"
        ours, theirs = multiprocessing.Pipe()
        context = process._EngineContext()
        context.Process(target=report_environment, args=(theirs,)).start()
        write(late=ours.recv() if ours.poll(30.0) else "")
    asyncio.run(main(sys.argv[1]))
