"""Generator: its status, the leases it returns, and how it ends."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from slipstream.broker.errors import ClientDiedError
from slipstream.broker.messages import AnyMessage, Member, Message, Nack, Prompt, Prompts, Refuse, ReturnLeases
from slipstream.broker.transport.client import PeerStatus
from slipstream.broker.transport.outbox import Outbox
from slipstream.buffer.codec import decode, encode
from slipstream.buffer.records import Lease
from slipstream.buffer.trajectory import Trajectory, TrajectoryHeader
from slipstream.configs.engines import ScriptedEngineConfig
from slipstream.configs.generators import RewardConfig
from slipstream.generators.engines.scripted_engine import ScriptedEngine
from slipstream.generators.errors import EngineDiedError, EngineError, GeneratorError, PromptError
from slipstream.generators.generator import Generator
from slipstream.generators.rewards.pool import RewardPool
from tests.builders import make_run, make_trajectory

LEASE = Lease("3-0", "3", "train", 3, 3, 0, [0, 1])
PROMPT = Prompt(lease=LEASE, uid="u", prompt="1+1=", ground_truth="2", data_source="test", extra_info={})


class FakeClient:
    """Records sent messages."""

    is_joined = True

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(decode(encode(message), AnyMessage))

    def send_status(self) -> None:
        """No status is requested."""

    def put(self, header: TrajectoryHeader, payload: bytes) -> None:
        self.outbox.add(header, payload)


class FakeAgent:
    """Fails every prompt with the same error, or answers it with the same trajectory."""

    waiting = ""

    def __init__(self, outcome: Exception | Trajectory) -> None:
        self.outcome = outcome

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def answer(self, prompt: Prompt, index: int) -> Trajectory:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class Scene:
    def __init__(self, outcome: Exception | Trajectory | None = None) -> None:
        self.client = FakeClient()
        self.generator = Generator(
            run=make_run(generators={"group_size": 2}, broker={"max_message_bytes": 4096}),
            member=Member("g", "1"),
            client=self.client,  # type: ignore[arg-type]
            engine=ScriptedEngine(ScriptedEngineConfig()),
            agent=FakeAgent(outcome or PromptError("too long")),
            rewards=RewardPool(RewardConfig("tests.unit.generators.rewards.samples:by_response", num_workers=0)),
        )

    @property
    def status(self) -> PeerStatus:
        return self.generator.status()

    def last_return(self) -> ReturnLeases:
        return [message for message in self.client.sent if isinstance(message, ReturnLeases)][-1]

    async def live(self, *messages: Message | ClientDiedError) -> None:
        """Run until the generator ends. It receives `messages` after it has started."""
        running = asyncio.create_task(self.generator.run())
        # The scripted engine starts at once.
        await asyncio.sleep(0.1)
        self.generator._set_state("ready", "")
        for message in messages:
            self.generator.receive(message)
        await asyncio.wait_for(running, timeout=10)


def test_the_reason_for_unsynced_weights_outlasts_a_late_answer_of_the_broker():
    scene = Scene()
    scene.generator._set_state("unsynced", "the probe found them wrong")
    scene.generator.receive(Prompts([], reason="pacing: enough is under way"))
    assert scene.status.reason == "the probe found them wrong"
    scene.generator._set_state("ready", "")
    scene.generator.receive(Prompts([], reason="pacing: enough is under way"))
    assert scene.status.reason == "pacing: enough is under way"


def test_a_long_reason_is_truncated_and_the_lease_returned():
    scene = Scene()
    scene.generator.receive(Nack(id="3-0-1", reason="x" * 400, is_fatal=True, lease_id="3-0"))
    assert scene.last_return().lease_ids == ["3-0"]
    assert len(scene.last_return().reason) == 256


@pytest.mark.parametrize(
    "error", [KeyError("a bug"), EngineDiedError("the engine is gone"), EngineError("out of range")]
)
def test_an_error_other_than_of_the_prompt_ends_the_generator_unchanged(error: Exception):
    scene = Scene(error)
    with pytest.raises(type(error), match=str(error)):
        asyncio.run(scene.live(Prompts([PROMPT])))
    assert scene.last_return().lease_ids == ["3-0"]


def test_a_dead_connection_ends_the_generator_so_that_it_is_restarted():
    with pytest.raises(ClientDiedError, match="KeyError"):
        asyncio.run(Scene().live(ClientDiedError("the link to the broker ended: KeyError: 1")))


def test_a_refusal_of_the_broker_ends_the_generator_for_good():
    with pytest.raises(GeneratorError, match="another model"):
        asyncio.run(Scene().live(Refuse("another model")))


class WritingAgent(FakeAgent):
    """Answers every prompt immediately, or never."""

    def __init__(self, *, answers: bool) -> None:
        self._answers = answers

    async def answer(self, prompt: Prompt, index: int) -> Any:
        if not self._answers:
            await asyncio.Event().wait()
        return make_trajectory(prompt.lease.group_id, index)


async def served(scene: Scene, agent: FakeAgent) -> "asyncio.Task[None]":
    """The running generator, with two answers of one prompt in progress."""
    scene.generator._agent = agent  # type: ignore[assignment]
    running = asyncio.create_task(scene.generator.run())
    await until(lambda: scene.status.state == "unsynced")
    scene.generator._set_state("ready", "")
    scene.generator.receive(Prompts([PROMPT]))
    await asyncio.sleep(0.05)
    return running


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_answers_leave_once_the_weights_are_verified_and_keep_their_lease_until_they_are_acknowledged():
    async def scenario(scene: Scene) -> None:
        running = await served(scene, WritingAgent(answers=True))
        assert len(scene.client.outbox) == 0
        assert scene.status.lease_ids == ["3-0"]
        scene.generator._weight_updates.is_verified.set()
        await until(lambda: len(scene.client.outbox) == 2)
        await until(lambda: scene.status.gauges["running"] == 0)
        assert scene.status.lease_ids == ["3-0"], "the broker renews only the leases that are listed"
        scene.client.outbox.acknowledge(["3-0-0", "3-0-1"])
        assert scene.status.lease_ids == []
        scene.generator.drain("the test is over")
        await asyncio.wait_for(running, timeout=10)

    asyncio.run(scenario(Scene()))


def test_a_drained_generator_returns_what_it_has_not_answered():
    async def scenario(scene: Scene) -> None:
        running = await served(scene, WritingAgent(answers=False))
        scene.generator.drain("ordered to")
        await asyncio.wait_for(running, timeout=10)
        assert scene.last_return().lease_ids == ["3-0"]
        assert scene.status.gauges["running"] == 0

    asyncio.run(scenario(Scene()))


@pytest.mark.parametrize(("num_tokens", "fits"), [(10, True), (4000, False)])
def test_a_trajectory_over_the_message_limit_is_returned_with_its_size(num_tokens: int, fits: bool):
    mask = np.arange(num_tokens) >= 6
    logprobs = np.where(mask, -0.5, 0.0).astype(np.float32)
    tokens = np.arange(num_tokens, dtype=np.int32)
    scene = Scene(make_trajectory(token_ids=tokens, model_mask=mask, generator_logprobs=logprobs))
    scene.generator._weight_updates.is_verified.set()
    scene.generator._set_state("ready", "")

    async def use() -> None:
        scene.generator._accept([PROMPT])
        await asyncio.gather(*scene.generator._tasks, return_exceptions=True)
        await asyncio.sleep(0)

    asyncio.run(use())
    # Both members of the group are one trajectory here.
    assert len(scene.client.outbox) == int(fits)
    if not fits:
        assert scene.last_return().lease_ids == ["3-0"]
        for reason in (scene.last_return().reason, scene.status.reason):
            assert "must fit into broker.max_message_bytes (4096)" in reason
            assert f"with {num_tokens} tokens has" in reason
