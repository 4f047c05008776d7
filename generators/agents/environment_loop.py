"""EnvironmentLoop: runs an environment, which acts as agent and grader, in a separate process."""

import asyncio
import itertools
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import structlog

from slipstream.buffer.trajectory import Reward
from slipstream.configs.generators import EnvironmentAgentConfig
from slipstream.generators import environments
from slipstream.generators.agents.episode import AgentLoop, Episode
from slipstream.generators.errors import GeneratorError
from slipstream.generators.rewards.reward import checked

_WORKER = Path(environments.__file__).with_name("worker.py")
_PING_EVERY_S = 1.0
_START_TIMEOUT_S = 600.0
"""Importing an environment, which may load a data set."""
_SILENCE_TIMEOUT_S = 60.0
"""Longest time without a sign of life. A thread gives one every second, unless a call holds the GIL."""
_MOST_STARTS = 3
"""Consecutive starts without an answer before the generator gives up."""
_LONGEST_LINE = 64 * 2**20

log = structlog.get_logger(__name__)


class EnvironmentDiedError(Exception):
    """The environment's process ended before it answered."""


class EnvironmentLoop(AgentLoop):
    """One process serves all answers. Life cycle: start -> run* -> close."""

    def __init__(self, config: EnvironmentAgentConfig, *, setting: str, answer_timeout_s: float) -> None:
        self._config = config
        self._answer_timeout_s = answer_timeout_s
        self._setting = setting
        self._process: asyncio.subprocess.Process | None = None
        self._serving: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()
        self._heard_at = self._replied_at = 0.0
        self._num_starts = 0
        self._problem = ""
        self.waiting = ""
        """Reason that answers wait for the process, or empty."""

    async def start(self) -> None:
        """Start the process without waiting for it. Raises GeneratorError after `_MOST_STARTS` failures."""
        if self._serving is None or self._serving.done():
            if self._num_starts >= _MOST_STARTS:
                raise GeneratorError(f"{self._setting} must name an environment that answers: {self._problem}")
            self._ready = asyncio.get_running_loop().create_future()
            # Otherwise asyncio logs the exception as unhandled.
            self._ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())
            self._serving = asyncio.create_task(self._serve(self._ready))

    async def close(self) -> None:
        if self._serving:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)

    async def run(self, episode: Episode) -> None:
        """Raises GeneratorError, EnvironmentDiedError."""
        await self.start()
        assert self._ready is not None
        await asyncio.shield(self._ready)
        assert episode.door is not None
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        row = msgspec.to_builtins(episode.prompt)
        row["purpose"] = row.pop("lease")["purpose"]
        door = episode.door
        model = {"base_url": door.base_url, "api_key": door.api_key, "model": door.model}
        try:
            self._send({"id": number, "row": row, "model": model})
            found = await answer
        finally:
            if self._answers.pop(number, answer).cancelled():
                self._send({"cancel": number})
        self._num_starts = 0
        if "error" in found:
            raise RuntimeError(f"the environment {self._config.environment} failed: {found['error']}")
        total = float(found["reward"])
        reward = Reward(
            total=total,
            parts={name: float(part) for name, part in found.get("parts", {}).items()},
            turns=[float(share) for share in found.get("turns", [])],
            is_correct=bool(found.get("is_correct", total >= 1)),
        )
        episode.reward = checked(reward)
        episode.metrics.update({name: float(number) for name, number in found.get("metrics", {}).items()})

    # --- the process ---------------------------------------------------------------------------------------------
    async def _serve(self, ready: asyncio.Future[None]) -> None:
        config, problem, self._process = self._config, "", None
        name = f"the environment {config.environment}"
        self._num_starts += 1
        try:
            process = self._process = await asyncio.create_subprocess_exec(
                config.python or sys.executable,
                str(_WORKER),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LONGEST_LINE,
                # A separate group, to kill its tool servers, browsers, etc. too.
                process_group=0,
                # Requests to the model server must bypass any proxy.
                env=os.environ | {"NO_PROXY": "127.0.0.1,localhost", "PYTHONUNBUFFERED": "1"},
            )
            name += f" (process {process.pid})"
            self._send({each: getattr(config, each) for each in ("environment", "arguments", "max_turns")})
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(self._watch(name, ready))
                try:
                    await self._read(process, ready)
                finally:
                    watching.cancel()
            problem = f"{name} exited"
        except* msgspec.MsgspecError as errors:
            problem = f"{name} must write JSON lines to stdout, got other output: {errors.exceptions[0]}"
        except* (OSError, GeneratorError) as errors:
            problem = str(errors.exceptions[0])
        finally:
            self.waiting = ""
            if self._process:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                await self._process.wait()
            self._fail(problem, ready)

    def _fail(self, problem: str, ready: asyncio.Future[None]) -> None:
        self._problem = problem or "it was closed"
        if problem:
            log.warning("environment_ended", setting=self._setting, reason=problem)
        if not ready.done():
            ready.set_exception(GeneratorError(f"{self._setting} must name an environment that starts: {problem}"))
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EnvironmentDiedError(self._problem))

    async def _read(self, process: asyncio.subprocess.Process, ready: asyncio.Future[None]) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            self._heard_at = time.monotonic()
            message = msgspec.json.decode(line, type=dict[str, Any])
            if "beat" not in message:
                self._replied_at = self._heard_at
            match message:
                case {"ready": True}:
                    ready.set_result(None)
                case {"failed": reason}:
                    raise GeneratorError(f"the environment {self._config.environment} cannot be loaded: {reason}")
                case {"id": number}:
                    if (answer := self._answers.get(number)) and not answer.done():
                        answer.set_result(message)

    async def _watch(self, name: str, ready: asyncio.Future[None]) -> None:
        """Ping the process and report silence. Raises GeneratorError."""
        self._replied_at = time.monotonic()
        for number in itertools.count():
            await asyncio.sleep(_PING_EVERY_S)
            now = time.monotonic()
            is_ready, quiet_s = ready.done(), now - self._replied_at
            if is_ready:
                self._send({"ping": number})
            if is_ready and now - self._heard_at >= _SILENCE_TIMEOUT_S:
                raise GeneratorError(f"{name} must give a sign of life within {_SILENCE_TIMEOUT_S:g} s, but did not")
            # The environment may block the loop that answers.
            limit_s = max(self._answer_timeout_s, _SILENCE_TIMEOUT_S) if is_ready else _START_TIMEOUT_S
            if quiet_s >= limit_s:
                raise GeneratorError(f"{name} must answer within {limit_s:g} s, but did not")
            is_late = quiet_s >= min(limit_s, _SILENCE_TIMEOUT_S)
            is_news = is_late and (not self.waiting or number % 10 == 0)
            self.waiting = f"{name} is alive, but has not answered for {quiet_s:.0f} s" if is_late else ""
            if is_news:
                log.warning("environment_silent", reason=self.waiting)

    def _send(self, message: dict[str, Any]) -> None:
        if self._process and self._process.stdin and self._process.returncode is None:
            with suppress(OSError, RuntimeError):
                self._process.stdin.write(json.dumps(message).encode() + b"\n")
