"""What a generator says of itself and hands back, and how it ends."""

import asyncio
from typing import Any

import pytest

from slipstream.broker.errors import ClientDiedError
from slipstream.broker.messages import AnyMessage, Member, Message, Nack, Prompt, Prompts, Refuse, ReturnLeases
from slipstream.broker.transport.client import PeerStatus
from slipstream.broker.transport.outbox import Outbox
from slipstream.buffer.codec import decode, encode
from slipstream.buffer.records import Lease
from slipstream.configs.generators import ScriptedEngineConfig
from slipstream.generators.engines.scripted_engine import ScriptedEngine
from slipstream.generators.errors import EngineDiedError, EngineError, GeneratorError, PromptError
from slipstream.generators.generator import Generator
from slipstream.generators.rewards.pool import RewardPool
from tests.builders import make_run

LEASE = Lease("3-0", "3", "train", 3, 3, 0, [0, 1])
PROMPT = Prompt(lease=LEASE, uid="u", prompt="1+1=", ground_truth="2", data_source="test", extra_info={})


class FakeLink:
    """Takes everything, delivers nothing."""

    is_joined = True

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(decode(encode(message), AnyMessage))

    def report(self) -> None:
        """Nobody asks."""


class FakeAgent:
    """Fails as it is told to."""

    def __init__(self, fault: Exception) -> None:
        self.fault = fault

    async def answer(self, prompt: Prompt, index: int) -> Any:
        raise self.fault


class Scene:
    def __init__(self, fault: Exception | None = None) -> None:
        self.link = FakeLink()
        self.generator = Generator(
            run=make_run(generators={"group_size": 2}),
            member=Member("g", "1"),
            link=self.link,  # type: ignore[arg-type]
            engine=ScriptedEngine(ScriptedEngineConfig()),
            agent=FakeAgent(fault or PromptError("too long")),
            rewards=RewardPool("tests.unit.generators.reward_samples:by_response", {}, num_workers=0, timeout_s=1.0),
        )

    @property
    def status(self) -> PeerStatus:
        return self.generator.status()

    def hand_back(self) -> ReturnLeases:
        """What it handed back last."""
        return [message for message in self.link.sent if isinstance(message, ReturnLeases)][-1]

    async def live(self, *messages: Message | ClientDiedError) -> None:
        """Until it ends by itself; it hears these as soon as it has started."""
        running = asyncio.create_task(self.generator.run())
        # The scripted engine starts at once.
        await asyncio.sleep(0.1)
        self.generator._become("ready", "")
        for message in messages:
            self.generator.receive(message)
        await asyncio.wait_for(running, timeout=10)


def test_why_it_holds_no_verified_weights_is_not_hidden_by_a_late_answer():
    scene = Scene()
    scene.generator._become("unsynced", "the probe found them wrong")
    scene.generator.receive(Prompts([], reason="pacing: enough is under way"))
    assert scene.status.reason == "the probe found them wrong"
    scene.generator._become("ready", "")
    scene.generator.receive(Prompts([], reason="pacing: enough is under way"))
    assert scene.status.reason == "pacing: enough is under way"


def test_a_long_reason_is_cut_and_the_lease_handed_back_all_the_same():
    scene = Scene()
    scene.generator.receive(Nack(id="3-0-1", reason="x" * 400, is_fatal=True, lease_id="3-0"))
    assert scene.hand_back().lease_ids == ["3-0"]
    assert len(scene.hand_back().reason) == 256


@pytest.mark.parametrize(
    "fault", [KeyError("a bug"), EngineDiedError("the engine is gone"), EngineError("out of range")]
)
def test_what_an_agent_cannot_mend_ends_the_generator_as_it_is(fault: Exception):
    scene = Scene(fault)
    with pytest.raises(type(fault), match=str(fault)):
        asyncio.run(scene.live(Prompts([PROMPT])))
    assert scene.hand_back().lease_ids == ["3-0"]


def test_a_link_that_died_ends_it_so_that_it_is_started_again():
    with pytest.raises(ClientDiedError, match="KeyError"):
        asyncio.run(Scene().live(ClientDiedError("the link to the broker ended: KeyError: 1")))


def test_a_broker_that_will_not_have_it_ends_it_for_good():
    with pytest.raises(GeneratorError, match="another model"):
        asyncio.run(Scene().live(Refuse("another model")))
