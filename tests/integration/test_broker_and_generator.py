"""Router and generator over the in-memory transport: leases become trajectories, updates are applied and probed."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.broker.dataset import Dataset
from slipstream.broker.messages import Drain, EpochOpened, Member, Message, OpenEpoch, Refuse, Update, UpdateApplied
from slipstream.broker.router import Router
from slipstream.broker.transport.memory_channels import MemoryBroker
from slipstream.buffer.trajectory import Reward
from slipstream.configs.generators import ScriptedEngineConfig
from slipstream.generators.agents.single_turn import SingleTurn
from slipstream.generators.engines.scripted_engine import ScriptedEngine
from slipstream.generators.errors import GeneratorError
from slipstream.generators.generator import Generator
from slipstream.generators.rewards.pool import RewardPool
from slipstream.generators.tokenization import PromptEncoder
from slipstream.launch.serial import SerialPeer, TurnClock
from tests.builders import make_run
from tests.contract.stores import AnyStore, make_memory_store, open_run
from tests.tiny_model import make_tokenizer

CANARY = [-1.0, -2.0]
"""Log-probabilities of the fake engine for any canary."""


class FakeEngine(ScriptedEngine):
    """Scripted, with log-probabilities of its own, so that a probe can fail."""

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        return CANARY


class Scene:
    def __init__(
        self,
        folder: Path,
        *,
        make_store: Callable[[Callable[[], float]], AnyStore] = make_memory_store,
        reward: str = "tests.integration.test_broker_and_generator:always_one",
        buffer: dict[str, Any] | None = None,
        generators: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """`buffer` and `generators` are merged into `max_lag=1` and `max_concurrency=8`."""
        self.clock, hub = TurnClock(), MemoryBroker()
        self.run = make_run(
            buffer={"staleness": {"max_lag": 1}} | (buffer or {}),
            generators={"max_concurrency": 8} | (generators or {}),
            **settings,
        )
        self.reward = reward
        self.store = make_store(self.clock)
        rows = Dataset(write_rows(folder / "rows.parquet"))
        config_json = msgspec.json.encode(self.run).decode()
        open_run(self.store, config_json=config_json, num_rows=len(rows), group_filter=self.run.buffer.filter)
        self.router = Router(
            hub.server(), self.store, run=self.run, config_json=config_json, train=rows, heldout=rows, clock=self.clock
        )
        self.learner, self.peer = SerialPeer(hub, "learner", self.clock), SerialPeer(hub, "generator", self.clock)
        self.engine = FakeEngine(ScriptedEngineConfig())
        self.generator = make_generator(self)

    async def turn(self, times: int = 20) -> None:
        for _ in range(times):
            self.clock.advance(0.05)
            self.learner.client.step(timeout_s=0)
            self.router.step(timeout_s=0)
            self.peer.client.step(timeout_s=0)
            while self.peer.received:
                self.generator.receive(self.peer.received.popleft())
            self.generator.wake()
            for _ in range(10):
                await asyncio.sleep(0)

    def send(self, message: Message) -> None:
        self.learner.client.send(message)

    def received(self, kind: type) -> list:
        return [message for message in self.learner.received if isinstance(message, kind)]


def make_generator(scene: Scene) -> Generator:
    pool = RewardPool(scene.reward, {}, num_workers=0, timeout_s=1.0)
    agent = SingleTurn(
        run=scene.run,
        engine=scene.engine,
        rewards=pool,
        encoder=PromptEncoder(make_tokenizer(), max_prompt_tokens=16),
        generator_id="generator-0",
    )
    generator = Generator(
        run=scene.run,
        member=scene.peer.member,
        client=scene.peer.client,
        engine=scene.engine,
        agent=agent,
        rewards=pool,
        clock=scene.clock,
    )
    scene.peer.board.set_source(generator.status)
    return generator


def always_one(sample) -> Reward:
    return Reward(total=1.0, is_correct=True)


def write_rows(path: Path) -> Path:
    rows = [
        {
            "data_source": "test",
            "prompt": f"{n}=",
            "reward_model": {"style": "rule", "ground_truth": str(n)},
            "extra_info": {"index": n},
        }
        for n in range(10)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def make_update(member: Member, version: int, canary_logprobs: list[float]) -> Update:
    return Update(
        epoch=1,
        members=[member],
        version=version,
        slots=[],
        bucket_bytes=[],
        checksums=[],
        canary_token_ids=[[1, 2, 3]],
        canary_logprobs=[canary_logprobs],
        max_probe_diff=1e-3,
        timeout_s=1.0,
    )


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def play(scene: Scene, script) -> None:
    """Run the generator beside the script on one event loop, then drain it."""

    async def both() -> None:
        running = asyncio.create_task(scene.generator.run())
        await script()
        scene.generator.drain("the test is over")
        await scene.turn()
        await asyncio.wait_for(running, 5)

    asyncio.run(both())


def test_nothing_is_leased_before_weights_are_verified_and_then_groups_become_ready(scene: Scene):
    async def script() -> None:
        await scene.turn()
        assert scene.store.counts().admitted == 0
        member = scene.peer.member
        scene.send(OpenEpoch(1, [member], "127.0.0.1", 1, 1.0))
        scene.send(make_update(member, 0, CANARY))
        await scene.turn()
        assert [opened.error for opened in scene.received(EpochOpened)] == [""]
        assert [(applied.version, applied.error) for applied in scene.received(UpdateApplied)] == [(0, "")]
        assert scene.store.counts().ready == 4
        assert scene.store.counts().accepted == 8

    play(scene, script)


def test_weights_that_fail_the_probe_stop_the_generator_and_report_the_reason(scene: Scene):
    async def script() -> None:
        member = scene.peer.member
        await scene.turn()
        scene.send(OpenEpoch(1, [member], "127.0.0.1", 1, 1.0))
        wrong = [value - 0.5 for value in CANARY]
        scene.send(make_update(member, 0, wrong))
        await scene.turn()
        (applied,) = scene.received(UpdateApplied)
        assert "must agree with the learner's" in applied.error
        assert scene.generator.status().state == "unsynced"
        assert scene.store.counts().admitted == 0

    play(scene, script)


def test_a_drained_generator_returns_its_leases(scene: Scene):
    async def script() -> None:
        member = scene.peer.member
        await scene.turn()
        scene.send(OpenEpoch(1, [member], "127.0.0.1", 1, 1.0))
        scene.send(make_update(member, 0, CANARY))
        await scene.turn()

    play(scene, script)
    assert scene.store.counts().leased == 0


class InterruptedEngine(FakeEngine):
    """Drains the generator during `moment`: start | probe."""

    def __init__(self, moment: str) -> None:
        super().__init__(ScriptedEngineConfig())
        self._moment = moment
        self.drain: Callable[[str], None] = print

    async def start(self) -> None:
        if self._moment == "start":
            self.drain("stop signal")

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        if self._moment == "probe":
            # Until the serving loop sleeps: it must not see the drain before the update completes.
            for _ in range(5):
                await asyncio.sleep(0)
            self.drain("stop signal")
        return await super().prompt_logprobs(token_ids)


@pytest.mark.parametrize("moment", ["start", "probe"])
def test_a_drain_is_final_whatever_completes_after_it(scene: Scene, moment: str):
    scene.engine = InterruptedEngine(moment)
    scene.generator = make_generator(scene)
    scene.engine.drain = scene.generator.drain

    async def live() -> None:
        running = asyncio.create_task(scene.generator.run())
        await scene.turn()
        scene.send(OpenEpoch(1, [scene.peer.member], "127.0.0.1", 1, 1.0))
        scene.send(make_update(scene.peer.member, 0, CANARY))
        await scene.turn()
        await asyncio.wait_for(running, 5)

    asyncio.run(live())
    assert scene.store.counts().leased == 0


class LoadingEngine(FakeEngine):
    """Loads forever."""

    def __init__(self) -> None:
        super().__init__(ScriptedEngineConfig())
        self.is_cancelled = False

    async def start(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.is_cancelled = True


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_drain_or_refusal_does_not_wait_for_the_model_to_load(scene: Scene, is_refused: bool):
    scene.engine = LoadingEngine()
    scene.generator = make_generator(scene)

    async def live() -> None:
        running = asyncio.create_task(scene.generator.run())
        await scene.turn()
        scene.generator.receive(Refuse("another model") if is_refused else Drain("not needed any more"))
        await asyncio.wait_for(running, 5)

    if is_refused:
        with pytest.raises(GeneratorError, match="another model"):
            asyncio.run(live())
    else:
        asyncio.run(live())
    assert scene.engine.is_cancelled
