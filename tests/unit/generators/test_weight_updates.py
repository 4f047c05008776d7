import asyncio
import math
import re
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import pytest

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import NO_EPOCH, EpochOpened, Member, OpenEpoch, SnapshotSource, Update, UpdateApplied
from slipstream.broker.weights.fetcher import Fetcher
from slipstream.broker.weights.shared_buckets import SharedBuckets
from slipstream.broker.weights.snapshots import SnapshotStore
from slipstream.broker.weights.stream import StreamServer
from slipstream.broker.weights.transport import HostBuckets
from slipstream.buffer.trajectory import Sampling, VersionSpan
from slipstream.configs.engines import ScriptedEngineConfig
from slipstream.generators.engines.engine import VOCABULARY, Completion, ScriptedEngine
from slipstream.generators.weight_updates import WeightUpdates
from slipstream.learner.publishing.fetches import SnapshotServer
from tests.cases import cases
from tests.fakes import KEYS
from tests.unit.broker.weight_versions import make_version
from tests.unit.generators.rewards.scene import until

MEMBER = Member("generator-0", "1")
PATIENCE_S = 20.0
CANARY = [-1.0, -2.0]


class FakeReceiver:
    device = "cpu"

    def __init__(self) -> None:
        self.is_open, self.is_cancelled = Event(), Event()
        self.is_open.set()

    def open_epoch(self, opening: OpenEpoch, *, rank: int) -> None: ...

    def receive(self, update: Update, *, cancelled: Event) -> HostBuckets:
        while not self.is_open.wait(0.01):
            if cancelled.is_set():
                self.is_cancelled.set()
                raise WeightTransferError("it was aborted")
        return HostBuckets([])

    def close(self) -> None: ...


class Scene:
    def __init__(self, folder: Path) -> None:
        self.sent: list[Any] = []
        self.states: list[tuple[str, str]] = []
        self.engine, self.receiver = ScriptedEngine(ScriptedEngineConfig()), FakeReceiver()
        parts = {"receiver": self.receiver, "fetcher": Fetcher(KEYS), "engine": self.engine, "release": self.release}
        parts["set_state"] = lambda state, reason: self.states.append((state, reason))
        self.updates = WeightUpdates(member=MEMBER, client=self, **parts)
        self.server = SnapshotServer(shelf := SnapshotStore(folder), StreamServer(shelf, keys=KEYS))

    def send(self, message: Any) -> None:
        self.sent.append(message)

    async def release(self, reason: str) -> None:
        self.states.append(("released", reason))

    def command(self, version: int, *, epoch: int = 1, source: SnapshotSource | None = None) -> Update:
        update, _ = make_version(version, moved=version)
        fields = {"canary_token_ids": [[1, 2, 3]], "canary_logprobs": [CANARY], "timeout_s": PATIENCE_S}
        return msgspec.structs.replace(update, epoch=epoch, members=[MEMBER], source=source, **fields)

    def serve(self, version: int) -> Update:
        source = self.server.add(*make_version(version, moved=version), with_delta=True)
        return self.command(version, epoch=NO_EPOCH, source=source)

    async def apply(self, version: int) -> None:
        self.updates.submit(self.serve(version))
        await until(lambda: self.updates.version == version)

    async def answers(self, number: int, *commands: OpenEpoch | Update) -> None:
        """Submit commands and wait until `number` answers have been sent in all."""
        for command in commands:
            self.updates.submit(command)
        await until(lambda: len(self.sent) == number)

    def play(self, script: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def both() -> None:
            running = asyncio.create_task(self.updates.run())
            await script()
            running.cancel()

        asyncio.run(both())
        self.server.close()


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "weights")


async def wrong(token_ids: list[int]) -> list[float]:
    return [-9.0, -9.0]


def opening(epoch: int) -> OpenEpoch:
    return OpenEpoch(epoch, [MEMBER], "127.0.0.1", 1, PATIENCE_S)


def test_a_version_is_fetched_and_verified_without_a_group_and_a_repeated_command_only_answered(scene: Scene) -> None:
    async def script() -> None:
        command = scene.serve(3)
        await scene.answers(1, command)
        await scene.answers(2, msgspec.msgpack.decode(msgspec.msgpack.encode(command), type=Update))

    scene.play(script)
    answer, again = scene.sent
    assert answer == again
    assert (answer.epoch, answer.version, answer.error) == (NO_EPOCH, 3, "")
    assert scene.updates.version == scene.engine.version == 3
    assert scene.updates.is_verified.is_set()
    updating = [("updating", ""), ("updating", "checking the new weights")]
    assert scene.states == [("unsynced", "fetching version 3"), *updating, ("ready", "")]
    assert scene.updates.gauges["fetched_mib"] > 0.09
    assert scene.updates.gauges["updates"] == 1


def test_an_epoch_and_the_update_within_it_are_both_executed_and_a_superseded_command_is_skipped(scene: Scene) -> None:
    async def script() -> None:
        await scene.answers(2, opening(1), scene.command(1))
        await scene.answers(3, scene.command(2), opening(2), scene.serve(3), scene.serve(4))

    scene.play(script)
    assert [type(answer) for answer in scene.sent] == [EpochOpened, UpdateApplied, UpdateApplied]
    assert scene.sent[2].version == 4


def test_fetching_from_a_dead_learner_ends_with_the_next_command(scene: Scene) -> None:
    gone = SnapshotSource("tcp://127.0.0.1:9", "/not/shared")

    async def script() -> None:
        scene.updates.submit(scene.command(1, epoch=NO_EPOCH, source=gone))
        await until(lambda: bool(scene.states))
        await scene.apply(2)

    scene.play(script)
    assert [(answer.version, "cancelled" in answer.error) for answer in scene.sent] == [(1, True), (2, False)]


def test_a_broadcast_ends_with_a_command_of_another_epoch_and_decoding_never_stops(scene: Scene) -> None:
    async def script() -> None:
        await scene.apply(1)
        scene.receiver.is_open.clear()
        await scene.answers(2, opening(1))
        scene.updates.submit(scene.command(2))
        await asyncio.sleep(0.05)
        # A command of the same epoch says nothing.
        scene.updates.submit(scene.command(3))
        assert not scene.receiver.is_cancelled.wait(0.1)
        assert scene.updates.is_verified.is_set()
        await scene.apply(4)

    scene.play(script)
    assert scene.receiver.is_cancelled.is_set()
    assert [answer.version for answer in scene.sent if isinstance(answer, UpdateApplied) and answer.error] == [2]


def test_a_version_in_the_memory_of_the_learner_is_verified_before_anything_changes(scene: Scene) -> None:
    async def script() -> None:
        for version, damaged in ((1, 0), (2, 1)):
            update, packed = make_version(version, moved=version)
            memory = SharedBuckets(update.bucket_bytes)
            for own, bucket in zip(memory.tensors, packed, strict=True):
                own.copy_(bucket)
            memory.tensors[-1][5] ^= damaged
            source = SnapshotSource("", "", memory=memory.path)
            await scene.answers(version, scene.command(version, epoch=NO_EPOCH, source=source))
        assert scene.updates.is_verified.is_set()

    scene.play(script)
    assert scene.sent[0].error == ""
    assert "bucket 2 of 3 must have checksum" in scene.sent[1].error
    assert scene.updates.version == scene.engine.version == 1


async def sampled_with_an_offset(prompts: Sequence[list[int]], sampling: Sampling) -> list[Completion]:
    """Reports log-probabilities 0.01 nats above those of the same tokens in a prompt."""
    logprob = 0.01 - math.log(len(VOCABULARY))
    return [Completion([2], [logprob], [VersionSpan(0, 1)], "length") for _ in prompts]


async def silent(token_ids: list[int]) -> list[float]:
    await asyncio.Event().wait()
    return []


async def failing(token_ids: list[int]) -> list[float]:
    raise ValueError("operands of two shapes")


@pytest.mark.parametrize("again", [False, True], ids=["next", "the same version"])
@cases(
    "method, broken, reason",
    ("prompt_logprobs", wrong, r"agree with the learner's within .*, got 7\.5 at version "),
    ("prompt_logprobs", silent, "must answer the probe of version "),
    ("prompt_logprobs", failing, "operands of two shapes"),
    ("sample_probe", sampled_with_an_offset, r"same for sampled tokens .*, got 0\.01 at version "),
)
def test_a_failed_probe_leaves_the_weights_unverified_until_the_next_version(
    scene: Scene, method: str, broken: Any, reason: str, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script() -> None:
        await scene.apply(1)
        if broken is silent:
            monkeypatch.setattr("slipstream.generators.weight_updates._PROBE_TIMEOUT_S", 0.05)
        setattr(scene.engine, method, broken)
        await scene.answers(2, scene.command(1) if again else scene.serve(2))
        assert (scene.updates.is_verified.is_set(), scene.updates.version) == (False, 1)
        assert [state for state, _ in scene.states[-2:]] == ["unsynced", "released"]
        delattr(scene.engine, method)
        monkeypatch.undo()
        await scene.apply(3)
        assert scene.updates.is_verified.is_set()

    scene.play(script)
    assert re.search(reason + ("" if broken is failing else "1" if again else "2"), scene.sent[1].error)


def test_an_unreadable_snapshot_folder_counts_as_absent(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forbidden(type(Path())):  # type: ignore[misc]
        def is_dir(self) -> bool:
            raise PermissionError(13, "Permission denied", str(self))

    async def script() -> None:
        monkeypatch.setattr("slipstream.broker.weights.fetcher.Path", Forbidden)
        await scene.answers(1, scene.serve(1))

    scene.play(script)
    assert scene.sent[0].error == ""
    assert scene.updates.is_verified.is_set()
