import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any
from unittest import mock

import httpx
import pytest

from slipstream.buffer.codec import encode, unpack
from slipstream.buffer.trajectory import Trajectory
from slipstream.configs.base import ConfigError
from slipstream.generators.agents import agent_processes, loops
from slipstream.generators.agents.runner import AgentRunner
from tests.builders import make_prompt
from tests.fakes import TOKEN
from tests.unit.generators.agents.scene import QUESTION, RecordingScorer, WritingEngine, make_runner

Agent = Callable[["Outside"], Awaitable[None]]


class Outside:
    def __init__(self, address: str, runner: AgentRunner) -> None:
        self.runner = runner
        self._http = httpx.AsyncClient(base_url=address)

    async def post(self, path: str, key: str, **body: Any) -> httpx.Response:
        return await self._http.post(path, headers={"Authorization": f"Bearer {key}"}, json=body)

    async def take(self, *, wait_s: float = 5.0) -> dict[str, Any]:
        answer = await self.post("/v1/leases", TOKEN, wait_s=wait_s)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def ask(self, lease: dict[str, Any]) -> None:
        answer = await self.post("/v1/chat/completions", lease["api_key"], messages=QUESTION)
        assert answer.status_code == 200, answer.text


def play(agent: Agent, *, silence_timeout_s: float = 5.0, answer_timeout_s: float = 600.0) -> tuple[Trajectory, Any]:
    engine, scorer = WritingEngine(["it is 42"] * 3), RecordingScorer()
    generators = {"agent": {"kind": "external"}, "sampling": {"max_tokens": 400}, "answer_timeout_s": answer_timeout_s}
    with mock.patch.object(loops, "SILENT_FRACTION", silence_timeout_s / answer_timeout_s):
        run = {"generators": generators, "model": {"max_length": 2000}}
        runner = make_runner(engine, scorer=scorer, token=TOKEN, **run)

    async def both() -> Trajectory:
        await runner.start()
        try:
            assert runner._model_server
            answer = asyncio.create_task(runner.answer(make_prompt(QUESTION, extra_info={"n": 3}), 1))
            await asyncio.wait_for(agent(Outside(runner._model_server.address, runner)), 20)
            return await asyncio.wait_for(answer, 20)
        finally:
            await runner.close()

    return unpack(encode(asyncio.run(both()))), scorer


def test_an_agent_takes_a_row_talks_and_posts_its_reward(monkeypatch: pytest.MonkeyPatch):
    async def agent(outside: Outside) -> None:
        await asyncio.sleep(0.3)
        assert re.match(r"1 answers wait for an agent, the oldest for \d s; 0 are taken: start", outside.runner.waiting)
        lease = await outside.take()
        assert outside.runner.waiting == ""
        assert (lease["prompt"], lease["ground_truth"], lease["extra_info"]) == (QUESTION, "31284", {"n": 3})
        assert (lease["purpose"], lease["model"]) == ("train", "test")
        early = await outside.post("/v1/reward", lease["api_key"], reward=1.0)
        assert (early.status_code, "must write at least one turn" in early.text) == (409, True)
        await outside.ask(lease)
        wrong = await outside.post("/v1/reward", lease["api_key"], reward=1.0, parts={"x" * 70: 1.0})
        assert wrong.status_code == 400
        body = {"reward": 0.5, "parts": {"style": 0.5}, "is_correct": True, "metrics": {"clicks": 2}}
        assert (await outside.post("/v1/reward", lease["api_key"], **body)).status_code == 200
        await asyncio.sleep(0.05)
        # Nothing is trained on twice, or changed after its end.
        assert (await outside.post("/v1/reward", lease["api_key"], reward=9.0)).status_code == 401

    monkeypatch.setattr(agent_processes, "_REPORT_AFTER_S", 0.2)
    trajectory, scorer = play(agent)
    reward = trajectory.reward
    assert (reward.total, reward.parts, reward.is_correct) == (0.5, {"style": 0.5}, True)
    assert (trajectory.metrics["clicks"], trajectory.num_turns, scorer.samples) == (2.0, 1, [])


@pytest.mark.parametrize("leaves", ["returns", "dies"])
def test_an_answer_without_a_turn_goes_to_the_next_agent_with_another_key(leaves: str):
    async def agent(outside: Outside) -> None:
        first = await outside.take()
        if leaves == "returns":
            await outside.post("/v1/return", first["api_key"], reason="no time")
        second = await outside.take()
        assert second["uid"] == first["uid"]
        late = await outside.post("/v1/chat/completions", first["api_key"], messages=QUESTION)
        assert late.status_code == 401
        await outside.ask(second)
        await outside.post("/v1/reward", second["api_key"])

    trajectory, scorer = play(agent, silence_timeout_s=2.0 if leaves == "dies" else 30.0)
    assert (trajectory.reward.total, trajectory.reward.status, trajectory.num_turns) == (1.0, "ok", 1)
    assert [sample.response for sample in scorer.samples] == ["it is 42"], "scored by the function of the run"


@pytest.mark.parametrize(
    ("leaves", "status", "reason"), [("returns", "error", "aborted"), ("dies", "timeout", "agent_lost")]
)
def test_an_answer_that_was_begun_is_masked_and_counted(leaves: str, status: str, reason: str):
    async def agent(outside: Outside) -> None:
        lease = await outside.take()
        await outside.ask(lease)
        if leaves == "returns":
            await outside.post("/v1/return", lease["api_key"], reason="no time")
        assert (await outside.post("/v1/leases", TOKEN, wait_s=2.0)).status_code == 204

    trajectory, scorer = play(agent, silence_timeout_s=1.5 if leaves == "dies" else 30.0)
    assert (trajectory.reward.status, trajectory.stop_reason, scorer.samples) == (status, reason, [])


def test_an_agent_is_not_silent_while_the_model_writes(monkeypatch: pytest.MonkeyPatch):
    original = WritingEngine.generate

    async def slow(self: WritingEngine, *arguments: Any, **settings: Any) -> Any:
        await asyncio.sleep(3.5)
        return await original(self, *arguments, **settings)

    async def agent(outside: Outside) -> None:
        lease = await outside.take()
        await outside.ask(lease)
        await outside.post("/v1/reward", lease["api_key"], reward=1.0)

    monkeypatch.setattr(WritingEngine, "generate", slow)
    assert play(agent, silence_timeout_s=2.5)[0].reward.total == 1.0


def test_without_a_token_no_agent_is_let_in_and_an_answer_that_none_takes_goes_back():
    async def agent(outside: Outside) -> None:
        assert (await outside.post("/v1/leases", "another token")).status_code == 401
        assert (await outside.post("/v1/leases", "x")).status_code == 401

    with pytest.raises(Exception, match=r"the agent ended without one: .* within 0.3 s"):
        play(agent, answer_timeout_s=0.3)
    with pytest.raises(ConfigError, match="may be `external` only if the roles run as processes"):
        make_runner(WritingEngine([]), generators={"agent": {"kind": "external"}})
