"""python worker.py: runs an environment in a separate process, controlled by JSON lines on stdin and stdout.

    in   {"environment": "gsm8k-v1", "arguments": {...}, "max_turns": 16}        first; answered by {"ready": true}
         {"ping": 3}                                                             answered by {"pong": 3}
         {"id": 7, "row": {...}, "model": {"base_url": ..., "api_key": ..., "model": ...}}
         {"cancel": 7}
         {"tasks": 100}                                                          answered by {"tasks": [...]}
    out  {"beat": true}                    once a second, from a thread, even if the environment blocks the event loop
         {"id": 7, "reward": 1.0, "parts": {...}, "metrics": {...}, "is_correct": true}, or {"id": 7, "error": "..."}

It imports only the standard library and the environment, so that any versions of libraries work.
"""

import asyncio
import importlib
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_LOOK_EVERY_S = 1.0


class Model(SimpleNamespace):
    """Access to the model for one answer. Clients share connections, because making one takes 50 ms."""

    base_url: str
    api_key: str

    @cached_property
    def client(self) -> Any:
        return _shared_client(self.base_url).with_options(api_key=self.api_key)


@cache
def _shared_client(base_url: str) -> Any:
    # Local import, because openai is optional.
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=base_url, api_key="of each answer", max_retries=0)


class FunctionEnvironment:
    """Environment of a coroutine function: (row, model) -> reward, or a dict with `reward`."""

    def __init__(self, path: str, arguments: dict[str, Any]) -> None:
        module_name, _, name = path.rpartition(":")
        if module_name.endswith(".py"):
            spec: Any = importlib.util.spec_from_file_location(Path(module_name).stem, module_name)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(module_name)
        self._function = getattr(module, name)
        self._arguments = arguments

    async def open(self) -> None:
        """No-op: a function needs no setup."""

    def tasks(self, number: int) -> list[dict[str, Any]]:
        """Empty: rows come from the user's dataset."""
        return []

    async def play(self, row: dict[str, Any], model: dict[str, str]) -> dict[str, Any]:
        found = await self._function(row, Model(**model), **self._arguments)
        record = found if isinstance(found, dict) else {"reward": found}
        try:
            return {**record, "reward": float(record["reward"])}
        except (KeyError, TypeError, ValueError):
            raise TypeError(f"it must return a number, or a dict with a number `reward`, got {found!r:.80}") from None


def load(environment: str, arguments: dict[str, Any], max_turns: int) -> Any:
    """Build an environment from its arguments."""
    # The user's modules are in the working directory.
    sys.path.append(str(Path.cwd()))
    if ":" in environment:
        return FunctionEnvironment(environment, arguments)
    # Local import, because verifiers is optional.
    from slipstream_harness import VerifiersEnvironment

    return VerifiersEnvironment(environment, arguments, max_turns=max_turns)


class Worker:
    """Answers requests until stdin ends."""

    def __init__(self, send: Any) -> None:
        self._send = send
        self._environment: Any = None
        self._playing: dict[int, asyncio.Task[None]] = {}

    async def run(self, lines: asyncio.StreamReader) -> None:
        try:
            first = json.loads(await lines.readline())
            self._environment = load(first["environment"], first["arguments"], first["max_turns"])
            await self._environment.open()
        except Exception as error:
            self._send({"failed": f"{type(error).__name__}: {error}"})
            return
        self._send({"ready": True})
        while line := await lines.readline():
            match json.loads(line):
                case {"ping": number}:
                    self._send({"pong": number})
                case {"cancel": number} if number in self._playing:
                    self._playing[number].cancel()
                case {"tasks": number}:
                    self._send({"tasks": self._environment.tasks(number)})
                case {"id": number, "row": row, "model": model}:
                    self._playing[number] = asyncio.create_task(self._play(number, row, model))

    async def _play(self, number: int, row: dict[str, Any], model: dict[str, str]) -> None:
        try:
            self._send({**await self._environment.play(row, model), "id": number})
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._send({"id": number, "error": f"{type(error).__name__}: {error}"})
        finally:
            del self._playing[number]


def end() -> None:
    """Exit even if threads run, and kill the process group if this process leads it."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def end_after(parent: int, send: Any) -> None:
    """Send signs of life, and exit with the parent."""
    while os.getppid() == parent:
        # A dead parent does not read.
        with suppress(OSError):
            send({"beat": True})
        time.sleep(_LOOK_EVERY_S)
    end()


async def main() -> None:
    """Serve requests on stdin. Prints go to stderr."""
    answers, lock = os.fdopen(os.dup(1), "w", buffering=1), threading.Lock()
    os.dup2(2, 1)

    def send(message: dict[str, Any]) -> None:
        # NaN is not JSON: the generator would kill this process.
        with lock:
            answers.write(json.dumps(message, allow_nan=False) + "\n")

    threading.Thread(target=end_after, args=(os.getppid(), send), daemon=True).start()
    lines = asyncio.StreamReader(limit=64 * 2**20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    await Worker(send).run(lines)
    end()


if __name__ == "__main__":
    asyncio.run(main())
