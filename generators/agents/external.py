"""External agents: programs that lease answers from the generator by HTTP, query the model, and finish the answers.

POST /v1/leases    {"wait_s": 20}            with the run's token: returns a row and a key, or 204 after `wait_s`
POST /v1/reward    {"reward": 0.5, ...}      with the key: finishes the answer; null = score it with the reward function
POST /v1/return    {"reason": "..."}         with the key: gives the answer back
"""

import asyncio
import hmac
import time
from contextlib import suppress

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from slipstream.buffer.trajectory import Reward, ShortName
from slipstream.generators.agents.episode import Access, Episode
from slipstream.generators.agents.model_server import AgentAccess, ApiError, bearer_token, decode_json, read_body
from slipstream.generators.rewards.reward import checked, failed_reward

_LONGEST_WAIT_S = 60.0
_LOOK_EVERY_S = 1.0
"""Interval of connection checks: a disconnected agent must not get an answer."""
_REPORT_AFTER_S = 5.0
"""Shorter waits are normal between two answers."""
_LOG_INTERVAL_S = 30.0
SILENT_FRACTION = 0.5
"""Longest silence of an agent, as a fraction of `generators.answer_timeout_s`. The rest is for the next agent."""

log = structlog.get_logger(__name__)


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
