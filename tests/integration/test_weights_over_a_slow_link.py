"""Two machines (network namespaces) and a link with a limited rate: a version crosses it once, and the generator's
engine decodes meanwhile and pauses only after the last byte.
"""

import asyncio
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from torch import Tensor

from slipstream.broker.messages import NO_EPOCH, Member, OpenEpoch, Update
from slipstream.broker.weights import buckets
from slipstream.broker.weights.collective import CollectiveReceiver, CollectiveSender
from slipstream.broker.weights.fetcher import Fetcher
from slipstream.broker.weights.snapshots import SnapshotStore
from slipstream.broker.weights.stream import StreamServer
from slipstream.broker.weights.transport import HostBuckets
from slipstream.buffer.trajectory import Sampling
from slipstream.configs.cluster import ClusterConfig
from slipstream.configs.engines import ScriptedEngineConfig
from slipstream.generators.engines.engine import ScriptedEngine
from slipstream.generators.weight_updates import WeightUpdates
from slipstream.learner.publishing.fetches import SnapshotServer
from tests.fakes import KEYS
from tests.machines import Machine, enter, network
from tests.unit.broker.weight_versions import announce, pack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

MEMBER = Member("generator-0", "1")
SUBNET = "10.76.0"
NETWORK = ClusterConfig(interface=f"{SUBNET}.0/24", ports="21000-21009")
RATE = "200mbit"
BUCKET_BYTES, NUM_BUCKETS = 2 << 20, 8
PAYLOAD = BUCKET_BYTES * NUM_BUCKETS
MAX_OVERHEAD = 0.10
"""Headers take 4.6 % of a packet of 1,500 bytes, acknowledgments about 2 %, and encryption and messages the rest."""
TIMEOUT_S = 60.0
STEPS_HALFWAY = 5


def make_version(version: int) -> tuple[Update, list[Tensor]]:
    chance = torch.Generator().manual_seed(0)
    tensors = {f"layer.{i}": torch.randn(BUCKET_BYTES // 4, generator=chance) for i in range(NUM_BUCKETS)}
    layout = buckets.plan([(name, each.shape, each.dtype) for name, each in tensors.items()], bucket_bytes=BUCKET_BYTES)
    packed = pack(tensors.items(), *layout)
    update = announce(*layout, buckets.checksums(packed), version=version, timeout_s=TIMEOUT_S)
    fields = {"members": [MEMBER], "canary_token_ids": [[2, 3, 4]], "canary_logprobs": [[-1.0, -2.0]]}
    return msgspec.structs.replace(update, **fields), packed


# --- the generator's machine -----------------------------------------------------------------------------------------
class Timeline:
    """Events of an update, each with the number of steps that the engine had made."""

    def __init__(self, num_steps: Any) -> None:
        self.num_steps = num_steps
        self.events: list[tuple[str, int]] = []

    def add(self, event: str) -> None:
        self.events.append((event, self.num_steps.value))

    def around(self, receive: Callable[..., HostBuckets]) -> Callable[..., HostBuckets]:
        def watched(update: Update, *, cancelled: Event) -> HostBuckets:
            self.add("begin")
            received = receive(update, cancelled=cancelled)
            self.add("received")
            return received

        return watched


class WatchedEngine(ScriptedEngine):
    """Counts its steps, and notes its switch."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(ScriptedEngineConfig(seconds_per_token=0.002, tokens_per_response=1))
        self._timeline = timeline

    async def decode(self) -> None:
        """Answer requests of one token, one after the other."""
        sampling = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=1, seed=0)
        while True:
            await self.generate([2, 3], sampling, request_id="one")
            with self._timeline.num_steps.get_lock():
                self._timeline.num_steps.value += 1

    async def switch(self, update: Update) -> float:
        self._timeline.add("switch")
        return await super().switch(update)


class Answers:
    """In place of the connection to the broker."""

    def __init__(self, pipe: Connection, timeline: Timeline) -> None:
        self._pipe, self._timeline = pipe, timeline

    def send(self, message: Any) -> None:
        self._pipe.send((message, self._timeline.events))
        self._timeline.events = []


def serve_generator(machine: Machine, pipe: Connection, num_steps: Any) -> None:
    """Execute the commands that arrive in the pipe, until it closes."""
    enter(machine)
    torch.set_num_threads(1)
    timeline = Timeline(num_steps)
    engine, receiver, fetcher = WatchedEngine(timeline), CollectiveReceiver(device="cpu"), Fetcher(KEYS)
    receiver.receive = timeline.around(receiver.receive)  # type: ignore[method-assign]
    fetcher.fetch = timeline.around(fetcher.fetch)  # type: ignore[method-assign]

    async def release(_: str) -> None: ...

    async def serve() -> None:
        client: Any = Answers(pipe, timeline)
        parts = {"client": client, "engine": engine, "receiver": receiver, "fetcher": fetcher, "release": release}
        updates = WeightUpdates(member=MEMBER, set_state=lambda *_: None, **parts)
        loop, closed = asyncio.get_running_loop(), asyncio.Event()

        def read() -> None:
            with suppress(EOFError):
                while True:
                    loop.call_soon_threadsafe(updates.submit, pipe.recv())
            loop.call_soon_threadsafe(closed.set)

        threading.Thread(target=read, daemon=True).start()
        tasks = [asyncio.create_task(each) for each in (updates.run(), engine.decode())]
        pipe.send("here")
        await closed.wait()
        for task in tasks:
            task.cancel()

    asyncio.run(serve())


# --- the learner's machine -------------------------------------------------------------------------------------------
class Halfway(list[Tensor]):
    """Buckets of which the second half is sent only after the engine has made steps."""

    def __init__(self, packed: list[Tensor], num_steps: Any) -> None:
        super().__init__(packed)
        self._num_steps, self._before = num_steps, num_steps.value

    def __iter__(self) -> Iterator[Tensor]:
        for index, bucket in enumerate(super().__iter__()):
            if index == len(self) // 2:
                ends_at = time.monotonic() + TIMEOUT_S / 2
                while self._num_steps.value < self._before + STEPS_HALFWAY:
                    if time.monotonic() > ends_at:
                        raise TimeoutError("the engine must make steps while half of a version has arrived")
                    time.sleep(0.001)
            yield bucket


def serve_learner(machine: Machine, pipe: Connection, num_steps: Any, folder: Path) -> None:
    """Open an epoch, broadcast, or serve the version, as the pipe says, until it closes."""
    enter(machine)
    torch.set_num_threads(1)
    (first, packed), (second, _) = make_version(1), make_version(2)
    sender = CollectiveSender(machine.address, device="cpu")
    shelf = SnapshotStore(folder / "weights")
    server = SnapshotServer(
        shelf, StreamServer(shelf, keys=KEYS, address=f"tcp://{machine.address}:*", cluster=NETWORK)
    )
    pipe.send("here")
    with suppress(EOFError):
        while True:
            match pipe.recv():
                case "open":
                    pipe.send(OpenEpoch(1, [MEMBER], *sender.address, timeout_s=TIMEOUT_S))
                    sender.open_epoch(1, num_members=1, timeout_s=TIMEOUT_S)
                case "broadcast":
                    pipe.send(first)
                    sender.broadcast(Halfway(packed, num_steps), timeout_s=TIMEOUT_S)
                case "serve":
                    source = server.add(second, packed)
                    source = msgspec.structs.replace(source, folder="/on/another/machine")
                    pipe.send(msgspec.structs.replace(second, epoch=NO_EPOCH, source=source))
    server.close()
    sender.close()


# --- both ------------------------------------------------------------------------------------------------------------
class Scene(NamedTuple):
    learner: Connection
    generator: Connection
    there: Machine
    is_limited: bool

    def order(self, words: str) -> tuple[Any, list[tuple[str, int]], int]:
        """Let the learner do something and the generator follow: its answer, its events, and the bytes on the link."""
        before = self.there.num_bytes()
        self.learner.send(words)
        self.generator.send(answer_of(self.learner))
        answer, events = answer_of(self.generator)
        return answer, events, self.there.num_bytes() - before


def answer_of(pipe: Connection) -> Any:
    assert pipe.poll(TIMEOUT_S), "the process must answer in time"
    return pipe.recv()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    context = multiprocessing.get_context("spawn")
    num_steps = context.Value("q", 0)
    names = [f"slip{os.getpid()}{letter}" for letter in "lg"]
    with network(tmp_path, names, subnet=SUBNET) as (here, there):
        is_limited = here.limit_rate(RATE)
        if not is_limited:
            print("this kernel has no token bucket filter: the rate of the link is not limited")
        pipes, processes = [], []
        for target, machine, more in ((serve_learner, here, [tmp_path]), (serve_generator, there, [])):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=target, args=(machine, theirs, num_steps, *more), daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            assert [answer_of(pipe) for pipe in pipes] == ["here", "here"]
            yield Scene(*pipes, there, is_limited)
        finally:
            for pipe, process in zip(pipes, processes, strict=True):
                pipe.close()
                process.join(5)
                process.kill()


def test_a_version_crosses_a_slow_link_once_while_the_engine_decodes(scene: Scene) -> None:
    assert scene.order("open")[0].error == ""
    for version, transport in ((1, "broadcast"), (2, "serve")):
        applied, events, num_bytes = scene.order(transport)
        assert (applied.error, applied.version) == ("", version)
        assert PAYLOAD <= num_bytes <= (1 + MAX_OVERHEAD) * PAYLOAD, f"{num_bytes / PAYLOAD:.3f} of the payload"
        assert [event for event, _ in events] == ["begin", "received", "switch"], "the pause begins after the last byte"
        steps = dict(events)
        # At this rate the bytes take 0.7 s, in which a blocked engine makes no step.
        least = STEPS_HALFWAY if scene.is_limited or transport == "broadcast" else 0
        made = steps["received"] - steps["begin"]
        assert made >= least
        print(f"{transport}: {num_bytes / PAYLOAD:.3f} of the payload, {made} steps meanwhile")
