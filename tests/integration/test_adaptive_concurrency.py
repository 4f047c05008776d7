"""A generator whose engine runs out of memory lowers its concurrency and shows it in its status."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from slipstream.broker.messages import OpenEpoch
from slipstream.buffer.role_reports import role_statuses
from slipstream.buffer.trajectory import Sampling
from slipstream.configs.engines import ScriptedEngineConfig
from slipstream.generators.engines.engine import Completion, EngineLoad
from tests.integration.generator_scene import CANARY, FakeEngine, GeneratorScene, make_generator, make_update, play


class CrowdedEngine(FakeEngine):
    """Reports the load set by the test. Answers only while its gate is open."""

    def __init__(self) -> None:
        super().__init__(ScriptedEngineConfig())
        self.reported = EngineLoad()
        self.gate = asyncio.Event()

    def current_load(self) -> EngineLoad:
        return self.reported

    async def generate(
        self, prompt_token_ids: list[int], sampling: Sampling, *, request_id: str, stop: Sequence[str] = ()
    ) -> Completion:
        await self.gate.wait()
        return await super().generate(prompt_token_ids, sampling, request_id=request_id)


@pytest.fixture
def scene(tmp_path: Path) -> GeneratorScene:
    opened = GeneratorScene(tmp_path)
    opened.engine = CrowdedEngine()
    opened.generator = make_generator(opened)
    return opened


def test_the_limit_follows_the_engine_and_is_the_capacity_in_the_status(scene: GeneratorScene):
    def capacity() -> int | None:
        roles = scene.store.roles()
        statuses = role_statuses(roles, run=scene.run, now=scene.store.now(), announced_version=0)
        return next(status.capacity for status in statuses if status.role == "generator")

    def gauges() -> tuple[float, ...]:
        status = scene.generator.status()
        return tuple(status.gauges[name] for name in ("running", "max_concurrency", "kv_usage", "preemptions"))

    async def script() -> None:
        member = scene.peer.member
        await scene.turn()
        scene.send(OpenEpoch(1, [member], "127.0.0.1", 1, 1.0))
        scene.send(make_update(member, 0, CANARY))
        await scene.turn(40)
        assert gauges() == (8, 8, 0.0, 0)
        assert capacity() == 8
        scene.engine.reported = EngineLoad(kv_usage=0.9512, num_preempted=3)
        await scene.turn(50)
        assert gauges() == (8, 6, 0.951, 3), "8 * 3/4; running requests continue"
        assert capacity() == 6
        scene.store.open_evaluation("e", purpose="greedy", version=0, rows=list(range(10)))
        scene.engine.gate.set()
        await scene.turn(1)
        scene.engine.gate.clear()
        await scene.turn(50)
        # Space for 6 admits three rows, space for 3 one more, space for 2 another.
        assert gauges() == (5, 6, 0.951, 3)
        scene.engine.gate.set()

    play(scene, script)
