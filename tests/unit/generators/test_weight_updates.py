"""Orders about weights: each answered once, what is overtaken skipped, nothing verified that the probe did not see."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slipstream.broker.messages import NO_EPOCH, EpochOpened, Member, OpenEpoch, Update, UpdateApplied
from slipstream.broker.weights.records import SnapshotSource
from slipstream.broker.weights.snapshot_store import SnapshotStore
from slipstream.broker.weights.stream import StreamServer
from slipstream.configs.generators import ScriptedEngineConfig
from slipstream.generators.engines.scripted_engine import ScriptedEngine
from slipstream.generators.errors import EngineError
from slipstream.generators.weight_updates import WeightUpdates
from slipstream.learner.publishing.fetches import SnapshotServer
from tests.unit.broker.weight_versions import make_version

MEMBER = Member("generator-0", "1")
PATIENCE_S = 20.0
CANARY = [-1.0, -2.0]


class FakeReceiver:
    """A weight group in which everything arrives."""

    def open_epoch(self, opening: OpenEpoch, *, rank: int) -> None: ...

    def receive(self, slots: Any, **layout: Any) -> list[Any]:
        return []

    def close(self) -> None: ...


class Scene:
    """An adoption over a scripted engine, and a learner that lends."""

    def __init__(self, folder: Path) -> None:
        self.said: list[Any] = []
        self.states: list[tuple[str, str]] = []
        self.engine = ScriptedEngine(ScriptedEngineConfig(), receiver=FakeReceiver())
        self.adoption = WeightUpdates(
            member=MEMBER,
            link=self,  # type: ignore[arg-type]
            engine=self.engine,
            become=lambda state, reason: self.states.append((state, reason)),
            hand_back=self.hand_back,
        )
        self.lender = SnapshotServer(shelf := SnapshotStore(folder), StreamServer(shelf))

    def send(self, message: Any) -> None:
        self.said.append(message)

    async def hand_back(self, reason: str) -> None:
        self.states.append(("handed back", reason))

    def order(
        self, version: int, *, epoch: int = 1, source: SnapshotSource | None = None, logprobs: list[float] = CANARY
    ) -> Update:
        update, _ = make_version(version, moved=version)
        canary = {"canary_token_ids": [[1, 2, 3]], "canary_logprobs": [logprobs]}
        return msgspec.structs.replace(
            update, epoch=epoch, members=[MEMBER], source=source, timeout_s=PATIENCE_S, **canary
        )

    def lend(self, version: int) -> Update:
        source = self.lender.lend(*make_version(version, moved=version), with_delta=True)
        return self.order(version, epoch=NO_EPOCH, source=source)

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not reached():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def play(self, script: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def both() -> None:
            running = asyncio.create_task(self.adoption.run())
            await script()
            running.cancel()

        asyncio.run(both())
        self.lender.close()


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "weights")


async def wrong(token_ids: list[int]) -> list[float]:
    """Not what the learner computes."""
    return [-9.0, -9.0]


def opening(epoch: int) -> OpenEpoch:
    return OpenEpoch(epoch, [MEMBER], "127.0.0.1", 1, PATIENCE_S)


def test_a_version_is_fetched_and_verified_without_a_group(scene: Scene) -> None:
    async def script() -> None:
        scene.adoption.take(scene.lend(3))
        await scene.until(lambda: bool(scene.said))

    scene.play(script)
    (answer,) = scene.said
    assert (answer.epoch, answer.version, answer.error) == (NO_EPOCH, 3, "")
    assert scene.adoption.version == scene.engine.version == 3
    assert scene.adoption.is_verified.is_set()
    assert scene.states == [("unsynced", "fetching version 3 from the learner"), ("updating", ""), ("ready", "")]
    assert scene.adoption.gauges["fetched_mib"] > 0.09


def test_an_order_said_again_is_answered_again_and_carried_out_once(scene: Scene) -> None:
    async def script() -> None:
        order = scene.lend(3)
        scene.adoption.take(order)
        await scene.until(lambda: bool(scene.said))
        scene.adoption.take(msgspec.msgpack.decode(msgspec.msgpack.encode(order), type=Update))
        await scene.until(lambda: len(scene.said) == 2)

    scene.play(script)
    assert scene.said[0] == scene.said[1]
    assert scene.adoption.gauges["updates"] == 1


def test_an_epoch_and_the_update_within_it_are_both_carried_out(scene: Scene) -> None:
    async def script() -> None:
        scene.adoption.take(opening(1))
        scene.adoption.take(scene.order(4))
        await scene.until(lambda: len(scene.said) == 2)

    scene.play(script)
    assert [type(answer) for answer in scene.said] == [EpochOpened, UpdateApplied]


def test_what_a_later_order_overtakes_is_skipped(scene: Scene) -> None:
    async def script() -> None:
        for order in (scene.order(1), opening(2), scene.lend(2), scene.lend(3)):
            scene.adoption.take(order)
        await scene.until(lambda: bool(scene.said))

    scene.play(script)
    assert [answer.version for answer in scene.said] == [3]


def test_fetching_from_a_learner_that_is_gone_ends_when_the_next_one_speaks(scene: Scene) -> None:
    gone = SnapshotSource("127.0.0.1", 9, "/not/shared")

    async def script() -> None:
        scene.adoption.take(scene.order(1, epoch=NO_EPOCH, source=gone))
        await scene.until(lambda: bool(scene.states))
        scene.adoption.take(scene.lend(2))
        await scene.until(lambda: scene.adoption.version == 2)

    scene.play(script)
    assert [(answer.version, "given up" in answer.error) for answer in scene.said] == [(1, True), (2, False)]


def test_nothing_is_verified_after_a_probe_that_differs(scene: Scene) -> None:
    async def script() -> None:
        scene.adoption.take(scene.lend(1))
        await scene.until(lambda: scene.adoption.version == 1)
        scene.engine.prompt_logprobs = wrong  # type: ignore[method-assign]
        scene.adoption.take(scene.lend(2))
        await scene.until(lambda: len(scene.said) == 2)

    scene.play(script)
    assert not scene.adoption.is_verified.is_set()
    assert scene.adoption.version == 1
    assert [state for state, _ in scene.states[-2:]] == ["unsynced", "handed back"]


@pytest.mark.parametrize("fault", [EngineError("no answer"), ValueError("operands of two shapes")])
def test_whatever_goes_wrong_after_the_swap_is_answered_and_what_runs_is_given_up(
    scene: Scene, fault: Exception
) -> None:
    async def script() -> None:
        scene.adoption.take(scene.lend(1))
        await scene.until(lambda: scene.adoption.version == 1)
        well = scene.engine.prompt_logprobs
        scene.engine.prompt_logprobs = failing  # type: ignore[method-assign]
        scene.adoption.take(scene.lend(2))
        await scene.until(lambda: len(scene.said) == 2)
        assert not scene.adoption.is_verified.is_set()
        assert [state for state, _ in scene.states[-2:]] == ["unsynced", "handed back"]
        scene.engine.prompt_logprobs = well  # type: ignore[method-assign]
        scene.adoption.take(scene.lend(3))
        await scene.until(lambda: len(scene.said) == 3)

    async def failing(token_ids: list[int]) -> list[float]:
        raise fault

    scene.play(script)
    assert str(fault) in scene.said[1].error
    assert scene.adoption.is_verified.is_set()
    assert scene.adoption.version == 3


def test_a_version_adopted_once_more_and_spoilt_is_not_verified(scene: Scene) -> None:
    async def script() -> None:
        scene.adoption.take(scene.lend(1))
        await scene.until(lambda: scene.adoption.version == 1)
        scene.engine.prompt_logprobs = wrong  # type: ignore[method-assign]
        scene.adoption.take(scene.order(1))
        await scene.until(lambda: len(scene.said) == 2)

    scene.play(script)
    assert scene.engine.version == scene.adoption.version == 1
    assert not scene.adoption.is_verified.is_set()


def test_a_probe_that_is_never_answered_ends(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.generators.weight_updates._PROBE_TIMEOUT_S", 0.05)

    async def never(token_ids: list[int]) -> list[float]:
        await asyncio.Event().wait()
        return []

    async def script() -> None:
        scene.engine.prompt_logprobs = never  # type: ignore[method-assign]
        scene.adoption.take(scene.lend(1))
        await scene.until(lambda: bool(scene.said))

    scene.play(script)
    assert "must answer the probe of version 1" in scene.said[0].error
    assert not scene.adoption.is_verified.is_set()


def test_a_folder_that_may_not_be_searched_is_as_if_it_were_not_there(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forbidden(type(Path())):  # type: ignore[misc]
        def is_dir(self) -> bool:
            raise PermissionError(13, "Permission denied", str(self))

    async def script() -> None:
        monkeypatch.setattr("slipstream.broker.weights.fetcher.Path", Forbidden)
        scene.adoption.take(scene.lend(1))
        await scene.until(lambda: bool(scene.said))

    scene.play(script)
    assert scene.said[0].error == ""
    assert scene.adoption.is_verified.is_set()
