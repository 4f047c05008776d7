"""Agents in other processes: environments, which the generator starts, and external programs.

External programs lease answers from the generator by HTTP, query the model, and finish the answers:

POST /v1/leases    {"wait_s": 20}            with the run's token: returns a row and a key, or 204 after `wait_s`
POST /v1/reward    {"reward": 0.5, ...}      with the key: finishes the answer; null = score it with the reward function
POST /v1/return    {"reason": "..."}         with the key: gives the answer back
"""

import asyncio
import hmac
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
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from slipstream.buffer.trajectory import Reward, ShortName
from slipstream.configs.generators import EnvironmentAgentConfig
from slipstream.generators import environments
from slipstream.generators.agents.episode import Access, AgentLoop, Episode
from slipstream.generators.agents.model_server import AgentAccess, ApiError, bearer_token, decode_json, read_body
from slipstream.generators.errors import GeneratorError
from slipstream.generators.rewards.reward import checked, failed_reward

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
        """Play one answer in the environment. Raises GeneratorError, EnvironmentDiedError."""
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


# --- external programs -----------------------------------------------------------------------------------------------
_LONGEST_WAIT_S = 60.0
_LOOK_EVERY_S = 1.0
"""Interval of connection checks: a disconnected agent must not get an answer."""
_REPORT_AFTER_S = 5.0
"""Shorter waits are normal between two answers."""
_LOG_INTERVAL_S = 30.0
SILENT_FRACTION = 0.5
"""Longest silence of an agent, as a fraction of `generators.answer_timeout_s`. The rest is for the next agent."""


class _Offer:
    """An answer offered to agents or lent to one."""

    def __init__(self, episode: Episode, access: Access) -> None:
        self.episode = episode
        self.access = access
        self.since = time.monotonic()
        loop = asyncio.get_running_loop()
        self.taken: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()
        """The agent's reason for returning the answer; empty if it finished."""


class AnswerQueue:
    """Answers for external agents."""

    def __init__(self, *, token: str) -> None:
        self._token = token
        self._offered: dict[Access, _Offer] = {}
        self._lent: dict[Access, _Offer] = {}
        self._changed = asyncio.Event()
        self._next_log_at = 0.0
        self._is_closed = False
        self.routes = [Route("/v1/leases", self._lend, methods=["POST"])]
        self.keyed_routes = {"/v1/reward": self._end, "/v1/return": self._take_back}

    @property
    def waiting(self) -> str:
        """Empty for short waits. Thread-safe."""
        waits = [time.monotonic() - offer.since for offer in list(self._offered.values())]
        if not waits or max(waits) < _REPORT_AFTER_S:
            return ""
        return (
            f"{len(waits)} answers wait for an agent, the oldest for {max(waits):.0f} s; "
            f"{len(self._lent)} are taken: start an agent (docs/agents.md)"
        )

    def close(self) -> None:
        """Send 204 to waiting agents."""
        self._is_closed = True
        self._changed.set()

    async def lend(self, episode: Episode, *, silence_timeout_s: float) -> None:
        """Have an agent write the answer, until it finishes, returns it, or is silent for `silence_timeout_s`.

        Offers the answer again if the agent is lost or returns it before the first model turn.
        """
        assert episode.door is not None
        access = episode.door
        try:
            while True:
                offer = self._offered[access] = _Offer(episode, access)
                self._changed.set()
                while not offer.taken.done():
                    await asyncio.wait([offer.taken], timeout=_LOG_INTERVAL_S)
                    now = time.monotonic()
                    if self.waiting and now >= self._next_log_at:
                        self._next_log_at = now + _LOG_INTERVAL_S
                        log.warning("waiting_for_agents", reason=self.waiting)
                problem = await self._wait_for_end(offer, silence_timeout_s=silence_timeout_s)
                if not problem or episode.turns:
                    return
                log.warning("lease_offered_again", prompt=episode.prompt.uid, reason=problem)
                episode.reward = None
                access.renew()
        finally:
            self._offered.pop(access, None)
            self._lent.pop(access, None)

    async def _wait_for_end(self, offer: _Offer, *, silence_timeout_s: float) -> str:
        episode = offer.episode
        while not offer.ended.done():
            if (left_s := silence_timeout_s - offer.access.idle_s()) <= 0:
                episode.reward = failed_reward("timeout", f"the agent was silent for {silence_timeout_s:g} s")
                episode.stop_reason = "agent_lost"
                return episode.reward.detail
            await asyncio.wait([offer.ended], timeout=left_s)
        if problem := offer.ended.result():
            episode.reward = failed_reward("error", f"the agent returned the answer: {problem}")
            episode.stop_reason = "aborted"
        return problem

    # --- routes --------------------------------------------------------------------------------------------------
    async def _lend(self, request: Request) -> Response:
        if not hmac.compare_digest(bearer_token(request).encode(), self._token.encode()):
            raise ApiError(
                401, "a lease requires the run's token (runs/NAME/token) as bearer token", code="invalid_api_key"
            )
        asked = decode_json(await read_body(request), _Lend)
        give_up_at = time.monotonic() + min(max(asked.wait_s, 0.0), _LONGEST_WAIT_S)
        while True:
            if await request.is_disconnected():
                return Response(status_code=204)
            if self._offered:
                break
            self._changed.clear()
            if self._is_closed or (left_s := give_up_at - time.monotonic()) <= 0:
                return Response(status_code=204)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(left_s, _LOOK_EVERY_S))
        access, offer = min(self._offered.items(), key=lambda each: each[1].since)
        self._lent[access] = self._offered.pop(access)
        offer.taken.set_result(None)
        access.renew()
        row, sampling = msgspec.to_builtins((offer.episode.prompt, offer.episode.sampling))
        own = {"purpose": row.pop("lease")["purpose"], "sampling": sampling}
        key = {"base_url": access.base_url, "api_key": access.api_key, "model": access.model}
        return JSONResponse({**row, **key, **own})

    async def _end(self, request: Request, access: AgentAccess) -> Response:
        ending = decode_json(await read_body(request), _Ending)
        offer, episode = self._lent_to(access), access.session.episode
        if not episode.turns:
            raise ApiError(
                409, "the model must write at least one turn before the answer ends: query it, or return the answer"
            )
        if ending.reward is not None:
            is_correct = ending.reward >= 1 if ending.is_correct is None else ending.is_correct
            reward = Reward(total=ending.reward, parts=ending.parts, turns=ending.turns, is_correct=is_correct)
            try:
                episode.reward = checked(reward)
            except ValueError as error:
                raise ApiError(400, str(error), param="reward") from None
        episode.metrics.update(ending.metrics)
        offer.ended.set_result("")
        return JSONResponse({"status": "over"})

    async def _take_back(self, request: Request, access: AgentAccess) -> Response:
        asked = decode_json(await read_body(request), _Return)
        self._lent_to(access).ended.set_result(asked.reason or "no reason given")
        return JSONResponse({"status": "returned"})

    def _lent_to(self, access: AgentAccess) -> _Offer:
        offer = self._lent.get(access)
        if offer is None or offer.ended.done():
            raise ApiError(409, "this answer is not lent to an agent, or has ended")
        return offer


class _Lend(msgspec.Struct):
    wait_s: float = 20.0


class _Ending(msgspec.Struct, forbid_unknown_fields=True):
    reward: float | None = None
    parts: dict[str, float] = {}
    turns: list[float] = []
    is_correct: bool | None = None
    metrics: dict[ShortName, float] = {}


class _Return(msgspec.Struct, forbid_unknown_fields=True):
    reason: str = ""
