import asyncio
import time
from collections.abc import Iterable

import msgspec
import numpy as np
import pytest
import structlog

from slipstream.broker.errors import ClientDiedError
from slipstream.broker.messages import (
    AnyMessage,
    LeaseRequest,
    Member,
    Message,
    Nack,
    Pong,
    Prompt,
    Prompts,
    ReturnLeases,
)
from slipstream.broker.transport.outbox import Outbox
from slipstream.buffer.codec import decode, encode
from slipstream.buffer.records import Lease
from slipstream.buffer.trajectory import Reward, Trajectory
from slipstream.configs.engines import ScriptedEngineConfig
from slipstream.configs.generators import RewardConfig
from slipstream.generators.engines.engine import EngineLoad, ScriptedEngine
from slipstream.generators.errors import EngineDiedError, EngineError, GeneratorError, PromptError
from slipstream.generators.generator import ConcurrencyLimit, Generator
from slipstream.generators.rewards.pool import RewardPool
from tests.builders import make_run, make_trajectory
from tests.cases import cases
from tests.fakes import NoBytes
from tests.unit.generators.rewards.scene import until

LEASE = Lease("3-0", "3", "train", 3, 3, 0, [0, 1])
PROMPT = Prompt(lease=LEASE, uid="u", prompt="1+1=", ground_truth="2", data_source="test", extra_info={})


class FakeClient:
    is_joined = True

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.put = self.outbox.add
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(decode(encode(message), AnyMessage))

    def send_status(self) -> None: ...


class FakeAgent:
    """Fails every prompt with the same error, answers it with the same trajectory, or never answers (None)."""

    waiting = ""

    def __init__(self, outcome: Exception | Trajectory | None) -> None:
        self.outcome = outcome

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def answer(self, prompt: Prompt, index: int) -> Trajectory:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        if self.outcome is None:
            await asyncio.Event().wait()
        return msgspec.structs.replace(self.outcome, id=f"3-0-{index}", group_id="3", index=index)


class Scene:
    def __init__(self, outcome: Exception | Trajectory | None = None) -> None:
        self.now = 0.0
        self.agent = FakeAgent(outcome)
        self.client = FakeClient()
        run = make_run(generators={"group_size": 2}, broker={"max_message_bytes": 4096})
        rewards = RewardPool(RewardConfig("tests.unit.generators.rewards.samples:by_response", num_workers=0))
        parts = {"engine": ScriptedEngine(ScriptedEngineConfig()), "agent": self.agent, "receiver": NoBytes()}
        parts |= {"client": self.client, "rewards": rewards, "clock": lambda: self.now}
        self.generator = Generator(run=run, member=Member("g", "1"), **parts)

    @property
    def status(self) -> Pong:
        return self.generator.status()

    @property
    def last_return(self) -> ReturnLeases:
        return [message for message in self.client.sent if isinstance(message, ReturnLeases)][-1]

    async def served(self, *messages: Message | ClientDiedError) -> "asyncio.Task[None]":
        """The running generator, which has been ready and received the messages."""
        running = asyncio.create_task(self.generator.run())
        await until(lambda: self.status.state == "unsynced")
        self.generator._set_state("ready", "")
        for message in messages:
            self.generator.receive(message)
        await asyncio.sleep(0.05)
        return running

    async def live(self, *messages: Message | ClientDiedError) -> None:
        await asyncio.wait_for(await self.served(*messages), timeout=10)

    async def end(self, running: "asyncio.Task[None]") -> None:
        self.generator.drain("the test is over")
        await asyncio.wait_for(running, timeout=10)


def test_the_reason_for_unsynced_weights_outlasts_a_late_answer_of_the_broker_and_a_long_one_is_truncated():
    scene = Scene()
    scene.generator._set_state("unsynced", "the probe found them wrong")
    scene.generator.receive(Prompts([], reason="pacing: enough is under way"))
    assert scene.status.reason == "the probe found them wrong"
    scene.generator._set_state("ready", "")
    scene.generator.receive(Prompts([], reason="pacing: enough is under way"))
    assert scene.status.reason == "pacing: enough is under way"
    scene.generator.receive(Nack(id="3-0-1", reason="x" * 400, is_fatal=True, lease_id="3-0"))
    assert (scene.last_return.lease_ids, len(scene.last_return.reason)) == (["3-0"], 256)


@pytest.mark.parametrize("error", [KeyError("a bug"), EngineDiedError("it is gone"), EngineError("out of range")])
def test_an_error_other_than_of_the_prompt_ends_the_generator_unchanged(error: Exception):
    scene = Scene(error)
    with pytest.raises(type(error), match=str(error)):
        asyncio.run(scene.live(Prompts([PROMPT])))
    assert scene.last_return.lease_ids == ["3-0"]


def test_a_dead_connection_ends_the_generator_and_a_drained_one_returns_what_it_has_not_answered():
    with pytest.raises(ClientDiedError, match="KeyError"):
        asyncio.run(Scene().live(ClientDiedError("the link to the broker ended: KeyError: 1")))

    async def scenario(scene: Scene) -> None:
        running = await scene.served(Prompts([PROMPT]))
        await scene.end(running)
        assert (scene.last_return.lease_ids, scene.status.gauges["running"]) == (["3-0"], 0)

    asyncio.run(scenario(Scene()))


def test_answers_leave_once_the_weights_are_verified_and_keep_their_lease_until_they_are_acknowledged():
    async def scenario(scene: Scene) -> None:
        running = await scene.served(Prompts([PROMPT]))
        assert (len(scene.client.outbox), scene.status.lease_ids) == (0, ["3-0"])
        scene.generator._weight_updates.is_verified.set()
        await until(lambda: len(scene.client.outbox) == 2)
        await until(lambda: scene.status.gauges["running"] == 0)
        assert scene.status.lease_ids == ["3-0"], "the broker renews only the leases that are listed"
        scene.client.outbox.acknowledge(["3-0-0", "3-0-1"])
        assert scene.status.lease_ids == []
        await scene.end(running)

    asyncio.run(scenario(Scene(make_trajectory())))


@pytest.mark.parametrize(("num_tokens", "fits"), [(10, True), (4000, False)])
def test_a_trajectory_over_the_message_limit_is_returned_with_its_size(num_tokens: int, fits: bool):
    mask = np.arange(num_tokens) >= 6
    arrays = {"token_ids": np.arange(num_tokens, dtype=np.int32), "model_mask": mask}
    scene = Scene(make_trajectory(**arrays, generator_logprobs=np.where(mask, -0.5, 0.0).astype(np.float32)))
    scene.generator._weight_updates.is_verified.set()
    scene.generator._set_state("ready", "")

    async def use() -> None:
        scene.generator._accept([PROMPT])
        await asyncio.gather(*scene.generator._tasks, return_exceptions=True)
        await asyncio.sleep(0)

    asyncio.run(use())
    assert len(scene.client.outbox) == (2 if fits else 0)
    if not fits:
        assert scene.last_return.lease_ids == ["3-0"]
        for reason in (scene.last_return.reason, scene.status.reason):
            assert "must fit into broker.max_message_bytes (4096)" in reason
            assert f"with {num_tokens} tokens has" in reason


BOOM = PromptError("prompt u must fit the chat template: boom 17")


async def keep_serving(scene: Scene, running: "asyncio.Task[None]", *, most: int) -> list[float]:
    """Answer requests with 200 members until the generator ends or has made `most` of them; returns their times."""
    times: list[float] = []
    ends_at = time.monotonic() + 20
    while not running.done() and len(times) < most:
        assert time.monotonic() < ends_at
        if sum(isinstance(message, LeaseRequest) for message in scene.client.sent) > len(times):
            times.append(scene.now)
            lease = msgspec.structs.replace(LEASE, indices=list(range(200)))
            scene.generator.receive(Prompts([msgspec.structs.replace(PROMPT, lease=lease)]))
        elif not scene.generator._tasks:
            # Time passes only between answers, so that a slow machine changes nothing.
            scene.now += 0.05
            scene.generator.wake()
        await asyncio.sleep(0.001)
    return times


def test_prompts_that_always_fail_are_requested_ever_less_often_and_end_the_generator_with_the_reason():
    async def scenario(scene: Scene) -> list[float]:
        running = await scene.served()
        times = await keep_serving(scene, running, most=50)
        with pytest.raises(GeneratorError, match=r"^the last 1201 answers failed .* with: prompt u must fit .* boom"):
            await asyncio.wait_for(running, timeout=10)
        assert [*scene.generator._problems.values()] == [f"a prompt fails: {BOOM}"]
        return times

    with structlog.testing.capture_logs() as logged:
        times = asyncio.run(scenario(Scene(BOOM)))
    gaps = np.diff(times)
    assert len(times) == 7
    assert (gaps[1:] > 1.5 * gaps[:-1]).all()
    lines = [entry for entry in logged if entry["event"] == "prompt_failed"]
    assert len(lines) <= 10


def test_an_answer_resets_the_count_of_failed_prompts():
    async def scenario(scene: Scene) -> None:
        running = await scene.served()
        scene.generator._weight_updates.is_verified.set()
        await keep_serving(scene, running, most=5)
        await until(lambda: not scene.generator._tasks)
        assert (scene.status.reason, scene.generator._num_prompt_errors) == (str(BOOM), 1000)
        scene.agent.outcome = make_trajectory()
        scene.generator.receive(Prompts([PROMPT]))
        await until(lambda: not scene.generator._tasks)
        assert (scene.status.reason, scene.generator._num_prompt_errors, scene.generator._paused_until) == ("", 0, 0.0)
        scene.now += 60
        scene.generator.wake()
        await until(lambda: num_logged() == 1000)
        await scene.end(running)

    def num_logged() -> int:
        lines = [entry for entry in logged if entry["event"] == "prompt_failed"]
        return sum(("prompt" in line) + line.get("more", 0) for line in lines)

    with structlog.testing.capture_logs() as logged:
        asyncio.run(scenario(Scene(BOOM)))


def test_the_first_failed_reward_of_each_kind_is_reported():
    async def scenario(scene: Scene) -> None:
        running = await scene.served()
        scene.generator._weight_updates.is_verified.set()
        for detail in ("ValueError: boom 1, at mine.py:2", "ValueError: boom 2, at mine.py:2", "TypeError: got 'a'"):
            scene.agent.outcome = make_trajectory(reward=Reward(total=0.0, status="error", detail=detail))
            scene.generator.receive(Prompts([PROMPT]))
            await until(lambda: not scene.generator._tasks)
        reported = [text for name, text in scene.status.gauges.items() if name.startswith("problem/")]
        problems = "ValueError: boom 1, at mine.py:2", "TypeError: got 'a'"
        assert reported == [f"an answer has no reward: {problem}" for problem in problems]
        assert scene.status.gauges["rewards_failed"] == 6
        await scene.end(running)

    asyncio.run(scenario(Scene()))


def limits(loads: Iterable[EngineLoad], *, most: int = 64) -> list[int]:
    concurrency = ConcurrencyLimit(least=8, most=most)
    observed = []
    for load in loads:
        concurrency.observe(load, running=concurrency.limit)
        observed.append(concurrency.limit)
    return observed


CUT = (0.95, 0, 1)


@cases(
    "loads, expected",
    pytest.param([(0.0, 0, 0)] * 3, [64] * 3, id="an idle engine changes nothing"),
    pytest.param([(0.99, 0, 0)] * 3, [64] * 3, id="a full cache alone changes nothing"),
    # 64 * 3/4 = 48, 48 * 3/4 = 36; an unchanged total means no new preemption; 36 * 3/4 = 27.
    pytest.param([(0.95, 0, n) for n in (0, 1, 5, 5, 6)], [64, 48, 36, 36, 27], id="preemptions take a quarter"),
    pytest.param([(0.5, 0, n) for n in (0, 60, 120)], [64] * 3, id="preemptions in a cache with room are ignored"),
    # Queued twice in a row: 64 - 20. Then one group more per observation.
    pytest.param([(0.5, n, 0) for n in (20, 20, 0)], [64, 44, 52], id="a lasting queue is subtracted"),
    pytest.param([(0.5, n, 0) for n in (60, 40, 10)], [64] * 3, id="a shrinking queue is ignored"),
    pytest.param([(0.5, n, 0) for n in (4, 30)], [64, 60], id="a growing queue counts at its former length"),
    pytest.param([CUT, *[(0.79, 0, 1)] * 4], [48, 56, 64, 64, 64], id="with room it grows by a group"),
    pytest.param([CUT, *[(0.81, 0, 1)] * 2], [48] * 3, id="without room it does not grow"),
    pytest.param([CUT, (0.5, 1, 1)], [48] * 2, id="with a queue it does not grow"),
)
def test_the_limit_follows_cache_queue_and_preemptions_between_a_group_and_its_maximum(loads, expected):
    assert limits(EngineLoad(*load) for load in loads) == expected

    falling = [EngineLoad(kv_usage=0.95, num_preempted=total) for total in range(1, 12)]
    assert limits(falling)[-1] == 8
    assert limits(falling, most=4)[-1] == 4


@cases(
    "observed",
    pytest.param([(0.95, 1, 32, 24)], id="a decrease starts from what was running"),
    pytest.param([(0.95, 1, 64, 48), (0.1, 1, 40, 48), (0.1, 1, 41, 56)], id="grows only if it is reached"),
    pytest.param(
        [(0.95, 1, 64, 48), (0.95, 2, 60, 48), (0.95, 3, 50, 48), (0.95, 3, 48, 48), (0.95, 4, 48, 36)],
        id="observations before a decrease takes effect are ignored",
    ),
)
def test_the_limit_follows_what_is_running(observed: list[tuple[float, int, int, int]]):
    concurrency = ConcurrencyLimit(least=8, most=64)
    for usage, total, running, limit in observed:
        concurrency.observe(EngineLoad(kv_usage=usage, num_preempted=total), running=running)
        assert concurrency.limit == limit


@pytest.mark.parametrize("room", [100, 250])
def test_the_limit_settles_below_the_capacity_of_an_engine(room: int):
    """The engine's cache holds `room` sequences; it preempts the excess, visible one observation later."""
    concurrency, preempted, seen = ConcurrencyLimit(least=8, most=256), 0, []
    for _ in range(100):
        running = concurrency.limit
        preempted += max(0, running - room)
        load = EngineLoad(min(1.0, running / room), num_waiting=max(0, running - room), num_preempted=preempted)
        concurrency.observe(load, running=running)
        seen.append(concurrency.limit)
    assert max(seen[20:]) <= room
    assert min(seen[20:]) >= 0.7 * room
