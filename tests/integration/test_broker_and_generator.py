"""Router and generator over the in-memory transport: leases become trajectories, and updates are applied and probed."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.broker.messages import Drain, EpochOpened, Refuse, UpdateApplied
from slipstream.configs.engines import ScriptedEngineConfig
from slipstream.generators.errors import GeneratorError
from tests.integration.generator_scene import FakeEngine, GeneratorScene, make_generator, play

pytestmark = pytest.mark.core


@pytest.fixture
def scene(tmp_path: Path) -> GeneratorScene:
    return GeneratorScene(tmp_path)


def test_leases_start_after_weights_are_verified_and_groups_become_ready(scene: GeneratorScene):
    async def script() -> None:
        await scene.turn()
        assert scene.store.counts().admitted == 0
        scene.deliver()
        await scene.turn()
        assert [opened.error for opened in scene.received(EpochOpened)] == [""]
        assert [(applied.version, applied.error) for applied in scene.received(UpdateApplied)] == [(0, "")]
        assert scene.store.counts().ready == 4
        assert scene.store.counts().accepted == 8

    play(scene, script)
    assert scene.store.counts().leased == 0, "a drained generator returns its leases"


class InterruptedEngine(FakeEngine):
    """Drains the generator at `moment`: start | probe."""

    def __init__(self, moment: str) -> None:
        super().__init__(ScriptedEngineConfig())
        self._moment = moment
        self.drain: Callable[[str], None] = print

    async def start(self) -> None:
        if self._moment == "start":
            self.drain("stop signal")

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        if self._moment == "probe":
            # Wait until the serving loop sleeps: it must not see the drain before the update completes.
            for _ in range(5):
                await asyncio.sleep(0)
            self.drain("stop signal")
        return await super().prompt_logprobs(token_ids)


@pytest.mark.parametrize("moment", ["start", "probe"])
def test_a_drain_is_final_regardless_of_later_completions(scene: GeneratorScene, moment: str):
    scene.engine = InterruptedEngine(moment)
    scene.generator = make_generator(scene)
    scene.engine.drain = scene.generator.drain

    async def live() -> None:
        running = asyncio.create_task(scene.generator.run())
        await scene.turn()
        scene.deliver()
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
def test_a_drain_or_refusal_does_not_wait_for_the_model_to_load(scene: GeneratorScene, is_refused: bool):
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
