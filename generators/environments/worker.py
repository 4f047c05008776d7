"""python worker.py: an environment in a process of its own, driven over stdin and stdout in lines of JSON.

    in   {"environment": "gsm8k-v1", "arguments": {...}, "max_turns": 16}        first; answered by {"ready": true}
         {"ping": 3}                                                             answered by {"pong": 3}
         {"id": 7, "row": {...}, "model": {"base_url": ..., "api_key": ..., "model": ...}}
         {"cancel": 7}
         {"tasks": 100}                                                          answered by {"tasks": [...]}, so many
    out  {"id": 7, "reward": 1.0, "parts": {...}, "metrics": {...}, "is_correct": true}, or {"id": 7, "error": "..."}

It needs the standard library alone, and whatever the environment imports: no other process shares its libraries.
"""

import asyncio
import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class FunctionEnvironment:
    """An environment that is a coroutine function: (row, model) -> reward, or a record with one."""

    def __init__(self, path: str, arguments: dict[str, Any]) -> None:
        module_name, _, name = path.rpartition(":")
        if module_name.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(module_name).stem, module_name)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(module_name)
        self._function = getattr(module, name)
        self._arguments = arguments

    async def open(self) -> None:
        """Nothing to open: its module is imported."""

    def tasks(self, number: int) -> list[dict[str, Any]]:
        """None: its rows come from a file of the user's."""
        return []

    async def play(self, row: dict[str, Any], model: dict[str, str]) -> dict[str, Any]:
        found = await self._function(row, SimpleNamespace(**model), **self._arguments)
        return found if isinstance(found, dict) else {"reward": float(found)}


def load(environment: str, arguments: dict[str, Any], max_turns: int) -> Any:
    """Build the environment of this name."""
    # A user's own modules lie beside the run.
    sys.path.append(str(Path.cwd()))
    if ":" in environment:
        return FunctionEnvironment(environment, arguments)
    # Imported only now: most processes have no verifiers.
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
                case {"cancel": number}:
                    if number in self._playing:
                        self._playing[number].cancel()
                case {"tasks": number}:
                    self._send({"tasks": self._environment.tasks(number)})
                case {"id": number, "row": row, "model": model}:
                    self._playing[number] = asyncio.create_task(self._play(number, row, model))

    async def _play(self, number: int, row: dict[str, Any], model: dict[str, str]) -> None:
        try:
            self._send({"id": number, **await self._environment.play(row, model)})
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._send({"id": number, "error": f"{type(error).__name__}: {error}"})
        finally:
            del self._playing[number]


async def main() -> None:
    """Serve stdin; what the environment prints goes to stderr, where it cannot be taken for an answer."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def send(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")

    lines = asyncio.StreamReader(limit=64 * 2**20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    await Worker(send).run(lines)
    # Threads of the environment's, and whatever else it left, do not keep the process.
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main())
