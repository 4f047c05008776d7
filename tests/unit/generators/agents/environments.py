"""Environments for a separate process. They import nothing from Slipstream or the tests."""

import asyncio
import json
import os
import signal
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any


async def post(model: SimpleNamespace, path: str, **body: object) -> dict:
    request = urllib.request.Request(
        model.base_url + path,
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {model.api_key}", "Content-Type": "application/json"},
    )
    return json.load(await asyncio.to_thread(urllib.request.urlopen, request))


async def ask(model: SimpleNamespace, messages: list[dict]) -> dict:
    answer = await post(model, "/chat/completions", messages=messages)
    return answer["choices"][0]["message"]


async def two_turns(row: dict, model: SimpleNamespace, *, hint: str = "sure?") -> dict:
    """A hint between two turns. Also prints, which must not break the protocol."""
    print(row["uid"], flush=True)
    messages = [*row["prompt"]]
    messages += [await ask(model, messages), {"role": "user", "content": hint}]
    last = await ask(model, messages)
    right = float("42" in last["content"])
    return {"reward": right + 0.25, "parts": {"right": right, "style": 0.25}, "metrics": {"hints": 1}}


async def counting(row: dict, model: SimpleNamespace) -> float:
    """Ends in another order than it began, with the number of the row."""
    number = int(row["uid"].partition("/")[2])
    await asyncio.sleep(0.01 * (number % 4))
    await ask(model, row["prompt"])
    return float(number)


async def failing(row: dict, model: SimpleNamespace, *, how: str) -> None:
    await ask(model, row["prompt"])
    match how:
        case "raise":
            raise ValueError("no such page")
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":  # as a crash in a library does
            os._exit(3)


async def blocking(row: dict, model: SimpleNamespace, *, seconds: float) -> float:
    """Block the event loop, except for the row `test/1`."""
    await ask(model, row["prompt"])
    if row["uid"] != "test/1":
        time.sleep(seconds)  # noqa: ASYNC251
    return 1.0


async def chatting(row: dict, model: Any) -> float:
    answer = await model.client.chat.completions.create(model=model.model, messages=row["prompt"])
    return float("42" in answer.choices[0].message.content)


async def odd(row: dict, model: SimpleNamespace, *, found: dict) -> dict:
    """Return numbers that JSON cannot express."""
    await ask(model, row["prompt"])
    return {key: float(value) for key, value in found.items()}


async def starting(row: dict, model: SimpleNamespace, *, file: str) -> float:
    await ask(model, row["prompt"])
    program = await asyncio.create_subprocess_exec("sleep", "60")
    Path(file).write_text(str(program.pid))
    return 1.0
