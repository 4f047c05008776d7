"""A router and a generator over the in-memory transport, with a scripted engine."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from slipstream.broker.dataset import Dataset
from slipstream.broker.messages import Member, Message, OpenEpoch, Update
from slipstream.broker.router import Router
from slipstream.broker.transport.channels import MemoryBroker
from slipstream.buffer.trajectory import Reward
from slipstream.configs.engines import ScriptedEngineConfig
from slipstream.configs.generators import RewardConfig
from slipstream.generators.agents.runner import AgentRunner
from slipstream.generators.engines.engine import ScriptedEngine
from slipstream.generators.generator import Generator
from slipstream.generators.rewards.pool import RewardPool
from slipstream.generators.tokenization import PromptEncoder
from slipstream.launch.serial import SerialPeer, TurnClock
from tests.builders import make_run
from tests.contract.stores import AnyStore, make_memory_store, open_run
from tests.fakes import NoBytes, write_rows
from tests.tiny_model import make_tokenizer

CANARY = [-1.0, -2.0]
"""The fake engine's log-probabilities for any canary."""


ALWAYS_ONE = f"{__name__}:always_one"


class FakeEngine(ScriptedEngine):
    """A scripted engine with known canary log-probabilities, so that a probe can fail."""

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        return CANARY


class GeneratorScene:
    """A router, a generator, and a learner driven by the test, on one clock."""

    def __init__(
        self,
        folder: Path,
        *,
        make_store: Callable[[Callable[[], float]], AnyStore] = make_memory_store,
        reward: str = ALWAYS_ONE,
        **settings: Any,
    ) -> None:
        """`max_lag` is 1."""
        self.clock, self.hub = TurnClock(), MemoryBroker()
        self.run = make_run(staleness={"max_lag": 1}, generators={"max_concurrency": 8}, **settings)
        self.reward = reward
        self.store = make_store(self.clock)
        self.rows = Dataset(write_rows(folder / "rows.parquet"))
        self.config_json = msgspec.json.encode(self.run).decode()
        rules = {"group_filter": self.run.buffer.filter, "curriculum": self.run.data.curriculum}
        open_run(self.store, config_json=self.config_json, num_rows=len(self.rows), **rules)
        self.start_broker()
        self.learner, self.peer = (SerialPeer(self.hub, role, self.clock) for role in ("learner", "generator"))
        self.engine = FakeEngine(ScriptedEngineConfig())
        self.generator = make_generator(self)

    def start_broker(self) -> None:
        """Replace the router with a new one that knows only the store."""
        self.channel = self.hub.server()
        rows = {"train": self.rows, "heldout": {"sampled": self.rows, "greedy": self.rows}}
        self.router = Router(self.channel, self.store, run=self.run, clock=self.clock, **rows)

    async def turn(self, times: int = 20) -> None:
        for _ in range(times):
            self.clock.now += 0.05
            self.learner.client.step(timeout_s=0)
            self.router.step(timeout_s=0)
            self.peer.client.step(timeout_s=0)
            while self.peer.received:
                self.generator.receive(self.peer.received.popleft())
            self.generator.wake()
            # Versions are received in the generator's thread, which ends with it.
            with suppress(RuntimeError):
                await asyncio.get_running_loop().run_in_executor(self.generator._weight_updates._thread, int)
            for _ in range(10):
                await asyncio.sleep(0)

    def send(self, message: Message) -> None:
        self.learner.client.send(message)

    def deliver(self) -> None:
        """Open an epoch and send version 0 to the generator."""
        self.send(OpenEpoch(1, [self.peer.member], "127.0.0.1", 1, 1.0))
        self.send(make_update(self.peer.member, 0, CANARY))

    def received(self, kind: type) -> list:
        return [message for message in self.learner.received if isinstance(message, kind)]


def make_generator(scene: GeneratorScene) -> Generator:
    """A generator of the scene's run, with the scene's engine."""
    peer, pool = scene.peer, RewardPool(RewardConfig(scene.reward, num_workers=0))
    parts = {"run": scene.run, "engine": scene.engine, "rewards": pool}
    encoder = PromptEncoder(make_tokenizer(), max_prompt_tokens=16)
    agent = AgentRunner(encoder=encoder, generator_id=peer.member.peer_id, **parts)
    generator = Generator(
        member=peer.member, client=peer.client, agent=agent, receiver=NoBytes(), clock=scene.clock, **parts
    )
    peer.board.set_source(generator.status)
    return generator


def always_one(sample) -> Reward:
    return Reward(total=1.0, is_correct=True)


def make_update(member: Member, version: int, canary_logprobs: list[float]) -> Update:
    layout: dict[str, Any] = {"slots": [], "bucket_bytes": [], "checksums": []}
    canary = {"canary_token_ids": [[1, 2, 3]], "canary_logprobs": [canary_logprobs], "max_probe_diff": 1e-3}
    return Update(epoch=1, members=[member], version=version, timeout_s=1.0, **layout, **canary)


def play(scene: GeneratorScene, script) -> None:
    """Run the generator beside the script on one event loop, then drain it."""

    async def both() -> None:
        running = asyncio.create_task(scene.generator.run())
        await script()
        scene.generator.drain("the test is over")
        await scene.turn()
        await asyncio.wait_for(running, 5)

    asyncio.run(both())
