"""Generators of unequal throughput with a real router and a learner that only counts, in simulated time."""

import asyncio
import selectors
from collections import Counter, deque
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from slipstream.broker.dataset import Dataset
from slipstream.broker.messages import Hello, Member, Message, UpdateApplied
from slipstream.broker.router import Router
from slipstream.broker.transport.channels import MemoryBroker
from slipstream.broker.transport.client import BrokerClient
from slipstream.broker.transport.session import StatusBoard
from slipstream.buffer.codec import unpack
from slipstream.buffer.records import Claim, StepEntry
from slipstream.buffer.sampling import SamplingRules
from slipstream.configs.engines import ScriptedEngineConfig
from slipstream.generators.engines.engine import ScriptedEngine
from tests.builders import make_run
from tests.fakes import write_rows
from tests.integration.generator_scene import ALWAYS_ONE, make_generator, make_update
from tests.memory_store.store import MemoryStore

GROUPS_PER_STEP, GROUP_SIZE = 8, 2
STEPS, WARM_UP = 30, 12
TICK_S = 0.02
LONGEST_STEP_S = 600.0
FAST, SLOW = 0.1, 1.0
"""Seconds per token."""


T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    """Never waits for a timer. `now` is the loop's time."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if not timeout:
            return super().select(timeout)
        events = super().select(0)
        self.now += 0.0 if events else timeout
        return events


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Starts at 0 s. Code on this loop must not block."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Simulated seconds."""
        return self._jumping.now


def simulate(work: Coroutine[Any, Any, T], *, loop: SimulatedLoop) -> T:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(work)


class SimulatedPeer:
    """A role's client and its received messages."""

    def __init__(self, hub: MemoryBroker, role: str, name: str, loop: SimulatedLoop) -> None:
        self.member = Member(name, "1")
        self.board = StatusBoard()
        self.received: deque[Message] = deque()
        hello = Hello(role, name, "1", "here", 1)
        self.client = BrokerClient(
            hub.client(), hello=hello, status=self.board, on_message=self.received.append, clock=loop.time
        )


class SimulatedRun:
    """A generator for each of `speeds` (name -> seconds per token), and a learner with instant steps."""

    def __init__(self, folder: Path, speeds: dict[str, float], *, max_lag: int, max_concurrency: int) -> None:
        self.loop, self.reward = SimulatedLoop(), ALWAYS_ONE
        self.clock = self.loop.time
        self.run = make_run(
            staleness={"max_lag": max_lag},
            generators={"group_size": GROUP_SIZE, "max_concurrency": max_concurrency},
            learner={"prompts_per_step": GROUPS_PER_STEP, "max_steps": 10 * STEPS},
        )
        self.store = MemoryStore(clock=self.loop.time)
        rows = Dataset(write_rows(folder / "rows.parquet"))
        plain = msgspec.json.encode(self.run).decode()
        self.store.open_run("test", config_json=plain, num_rows=len(rows), seed=0)
        hub = MemoryBroker()
        self.router = Router(
            hub.server(), self.store, run=self.run, train=rows, heldout={"sampled": rows}, clock=self.loop.time
        )
        self.learner = SimulatedPeer(hub, "learner", "learner", self.loop)
        self.peers = [SimulatedPeer(hub, "generator", name, self.loop) for name in speeds]
        configs = [ScriptedEngineConfig(tokens_per_response=10, seconds_per_token=speed) for speed in speeds.values()]
        engines = [ScriptedEngine(config) for config in configs]
        self.generators = [make_generator(self, *pair) for pair in zip(self.peers, engines, strict=True)]
        self._ticked = asyncio.Event()
        self.committed_at: list[float] = []
        self.made_by: Counter[str] = Counter()

    def play(self) -> float:
        """Run all steps. Returns seconds per step after the warm-up."""
        simulate(self._play(), loop=self.loop)
        return (self.committed_at[-1] - self.committed_at[WARM_UP]) / (len(self.committed_at) - 1 - WARM_UP)

    async def _play(self) -> None:
        ticking = asyncio.create_task(self._tick())
        running = [asyncio.create_task(generator.run()) for generator in self.generators]
        async with asyncio.timeout(STEPS * LONGEST_STEP_S):
            await self._publish(0)
            for step in range(1, STEPS + 1):
                await self._train(step)
                await self._publish(step)
        for generator in self.generators:
            generator.drain("the test is over")
        await asyncio.gather(*running)
        ticking.cancel()

    async def _tick(self) -> None:
        while True:
            self.learner.client.step(timeout_s=0)
            self.router.step(timeout_s=0)
            for peer, generator in zip(self.peers, self.generators, strict=True):
                peer.client.step(timeout_s=0)
                while peer.received:
                    generator.receive(peer.received.popleft())
                generator.wake()
            self._ticked.set()
            await asyncio.sleep(TICK_S)

    async def _turn(self) -> None:
        """Run until every task has had a turn."""
        self._ticked.clear()
        await self._ticked.wait()

    async def _train(self, step: int) -> None:
        asked = {"step": step, "version": step - 1, "num_groups": GROUPS_PER_STEP, "lease_s": 1e9}
        while not isinstance(claim := self.store.claim(rules=SamplingRules(), **asked), Claim):
            await self._turn()
        groups = [[unpack(payload) for payload in group] for group in self.store.fetch(claim.group_ids)]
        self.made_by.update(trajectory.generator_id for group in groups for trajectory in group)
        ids = [[trajectory.id for trajectory in group] for group in groups]
        self.store.commit(claim, StepEntry(step, step - 1, claim.fence, 0, "hash", claim.group_ids, ids))
        self.committed_at.append(self.loop.time())

    async def _publish(self, version: int) -> None:
        """Announce a version, wait until every generator has applied it, and commit it."""
        members = [peer.member for peer in self.peers]
        while self.learner.client.welcome is None or any(g.status().state == "starting" for g in self.generators):
            await self._turn()
        self.store.announce_version(version)
        update = make_update(members[0], version, [-1.0, -1.0])
        self.learner.client.send(msgspec.structs.replace(update, members=members))
        adopted: set[Member] = set()
        while len(adopted) < len(members):
            await self._turn()
            answers = [each for each in self.learner.received if isinstance(each, UpdateApplied)]
            assert not any(answer.error for answer in answers)
            adopted = {answer.member for answer in answers if answer.version == version}
        self.learner.received.clear()
        self.store.commit_version(version)


@pytest.mark.parametrize(("max_lag", "max_concurrency"), [(0, 4), (0, 16), (1, 64), (4, 16)])
def test_a_generator_ten_times_slower_holds_up_no_batch(tmp_path: Path, max_lag: int, max_concurrency: int):
    settings = {"max_lag": max_lag, "max_concurrency": max_concurrency}
    alone = SimulatedRun(tmp_path, {"fast": FAST}, **settings)
    both = SimulatedRun(tmp_path, {"slow": SLOW, "fast": FAST}, **settings)
    # Two turns: the second observes the end of the first.
    assert both.play() <= alone.play() + 2 * TICK_S


def test_a_slow_generator_takes_the_work_beyond_the_fast_ones_capacity(tmp_path: Path):
    settings = {"max_lag": 4, "max_concurrency": 4}
    alone = SimulatedRun(tmp_path, {"fast": FAST}, **settings)
    both = SimulatedRun(tmp_path, {"slow": SLOW, "fast": FAST}, **settings)
    assert both.play() < 0.95 * alone.play()
    assert both.made_by["slow"] > 0.05 * both.made_by["fast"]
