"""Two brokers on one store. One is killed under load, and every trajectory is trained on once and archived once."""

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slipstream.broker.messages import NO_EPOCH, LeaseRequest, Members, Pong, Prompts, Update, UpdateApplied, Welcome
from slipstream.broker.transport.client import preferred
from slipstream.broker.transport.session import Session, StatusBoard, join
from slipstream.buffer.archive.archive import Archive
from slipstream.buffer.codec import unpack
from slipstream.buffer.errors import RunConflictError
from slipstream.buffer.records import CheckpointPointer, Claim, StepEntry
from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.buffer.redis.run_store import open_run_store
from slipstream.buffer.redis.store import RedisStore
from slipstream.buffer.sampling import SamplingRules
from slipstream.configs.load import load
from slipstream.configs.run import RunConfig
from slipstream.observe.run_status import Monitor
from slipstream.runtime.credentials import Keys, derive_keys, make_token
from slipstream.runtime.process import LAUNCHER_VARIABLE
from slipstream.runtime.run_folder import RunFolder
from tests.builders import make_packed
from tests.fakes import write_rows
from tests.runs import audited, start, until

GROUP_SIZE, GENERATORS = 4, [f"generator-{number}" for number in range(10)]
PUT_EVERY_S = 0.05


def join_run(role: Any, run: RunConfig, keys: Keys, name: str, board: StatusBoard) -> Session:
    addresses = RunFolder(run).broker_addresses
    return join(
        role,
        address=addresses["broker"],
        brokers=addresses,
        keys=keys,
        max_message_bytes=run.broker.max_message_bytes,
        peer_id=name,
        status=board,
        timeout_s=30,
    )


_BROKER = (
    "import sys; from slipstream.broker import __main__, archiver; archiver._FLUSH_S = 1.0; __main__.main(sys.argv[1:])"
)


class ScriptedGenerator:
    """Requests one group at a time and puts its members one by one, over the real client."""

    def __init__(self, name: str, run: RunConfig, keys: Keys) -> None:
        self.name = name
        self.put: list[str] = []
        self._version = 0
        self._work: list[tuple[Any, int]] = []
        self._asked_at: float | None = None
        self._is_draining = False
        board = StatusBoard()
        self._session = join_run("generator", run, keys, name, board)
        board.set_source(self._status)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def drain(self) -> None:
        self._is_draining = True

    def end(self) -> bool:
        """Leave, and return whether everything was acknowledged."""
        self._thread.join(timeout=30)
        self._session.clients.stop(flush_s=20)
        return not len(self._session.client.outbox)

    def _status(self) -> Pong:
        held = {lease.id for lease, _ in list(self._work)} | self._session.client.outbox.lease_ids()
        return Pong(-1.0, "ready", self._version, lease_ids=sorted(held))

    def _run(self) -> None:
        while self._work or not self._is_draining:
            match self._session.inbox.get(timeout_s=PUT_EVERY_S):
                case Welcome() | Prompts(prompts=[]):
                    self._asked_at = None
                case Prompts(prompts=prompts):
                    self._work += [(prompt.lease, index) for prompt in prompts for index in prompt.lease.indices]
                case Update(version=version):
                    self._version = version
                    self._session.client.send(UpdateApplied(NO_EPOCH, version, self._session.member))
            if self._work:
                lease, index = self._work[0]
                packed = make_packed(lease.group_id, index, group_size=GROUP_SIZE, attempt=lease.attempt)
                self._session.client.put(*packed)
                self.put.append(packed[0].id)
                self._asked_at = None
                # Only now, so that either the work or the outbox always holds the lease.
                del self._work[0]
            elif self._session.client.is_joined and (not self._asked_at or time.monotonic() - self._asked_at > 5):
                self._asked_at = time.monotonic()
                self._session.client.send(LeaseRequest(GROUP_SIZE))


class ScriptedLearner:
    """Claims and commits every ready group, checkpoints, and follows the members of all brokers."""

    def __init__(self, run: RunConfig, keys: Keys, store: RedisStore) -> None:
        self._store = store
        self.members: list[str] = []
        self.applied: Counter[int] = Counter()
        board = StatusBoard()
        board.set_source(lambda: Pong(-1.0, "ready", -1))
        self.session = join_run("learner", run, keys, "learner", board)
        self._states: list[Any] = []
        self.step = 0
        self.trained: list[str] = []

    def poll(self) -> None:
        while (message := self.session.inbox.get(timeout_s=0)) is not None:
            match message:
                case Members(generators=states):
                    self._states, self.members = states, [each.member.peer_id for each in states]
                case UpdateApplied(version=version):
                    self.applied[version] += 1
        claim = partial(self._store.claim, version=0, num_groups=1, rules=SamplingRules(), lease_s=60)
        while isinstance(claimed := claim(step=self.step + 1), Claim):
            (members,) = self._store.fetch(claimed.group_ids)
            ids = [unpack(member).id for member in members]
            entry = StepEntry(claimed.step, 0, claimed.fence, 0, "hash", claimed.group_ids, [ids])
            self._store.commit(claimed, entry)
            self.step += 1
            self.trained += ids
            if self.step % 5 == 0:
                self.checkpoint()

    def checkpoint(self) -> None:
        pointer = CheckpointPointer(self.step, 0, f"step-{self.step}")
        self._store.checkpoint(pointer, fence=self._store.run_state().fence)

    def announce(self, version: int) -> None:
        members = [each.member for each in self._states]
        self.session.clients.send(Update(NO_EPOCH, members, version, [], [], [], [], [], 1.0, 1.0))


class Scene:
    """The store, two broker processes, ten generators, and a learner."""

    def __init__(self, folder: Path) -> None:
        rows = write_rows(folder / "rows.parquet")
        settings = [
            f"experiment=digits_cpu name=shards runs_dir={folder}/runs data.train={rows} data.eval={rows}",
            "broker.shards=2",
            f"generators.group_size={GROUP_SIZE} learner.max_steps=1000000",
            "staleness.max_lag=1000000 staleness.target_lag=1000000",
        ]
        self.settings = " ".join(settings).split()
        self.run = load(self.settings)
        self.folder = RunFolder(self.run)
        self.folder.make()
        self.keys = derive_keys(make_token(self.run))
        self.server = EmbeddedRedis(self.folder.store, max_memory_mib=256)
        self.server.start(timeout_s=20)
        self.brokers: dict[str, subprocess.Popen[str]] = {}
        for name in self.run.broker.names:
            self.start(name)
        self.store = open_run_store(self.server.url, self.run.name, timeout_s=20)
        until(lambda: len(self.live()) == 2, timeout_s=30, what="both brokers report")
        self.generators = [ScriptedGenerator(name, self.run, self.keys) for name in GENERATORS]
        self.learner = ScriptedLearner(self.run, self.keys, self.store)

    def start(self, name: str) -> None:
        shard = self.run.broker.names.index(name)
        command = [sys.executable, "-c", _BROKER, "--shard", str(shard), *self.settings]
        log, launcher = self.folder.path / f"{name}.log", {LAUNCHER_VARIABLE: str(os.getpid())}
        self.brokers[name] = start(log, command, self.folder.path, **launcher)

    def live(self) -> dict[str, bool]:
        """Brokers that reported within 3 s, and whether each is the chief."""
        with suppress(RunConflictError):
            roles, now = self.store.roles(), self.store.now()
            fresh = [(name, each) for name, each in roles.items() if now - each["reported_at"] < 3]
            return {name: each["is_chief"] for name, each in fresh if each.get("role") == "broker"}
        return {}  # no broker has opened the run

    def brokers_of_generators(self) -> dict[str, str]:
        now = self.store.now()
        return {
            name: gauges["broker"]
            for name, gauges in self.store.roles().items()
            if gauges.get("role") == "generator" and now - gauges["reported_at"] < 3
        }

    def await_(self, condition: Any, what: str) -> None:
        def is_met() -> bool:
            self.learner.poll()
            return bool(condition())

        until(is_met, timeout_s=40, what=what)

    def close(self) -> None:
        self.learner.session.clients.stop()
        for process in self.brokers.values():
            process.terminate()
            process.wait(timeout=20)
        self.store.close()
        self.server.stop()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with closing(Scene(tmp_path)) as made:
        yield made


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_broker_is_killed_under_load_and_nothing_is_lost_or_trained_on_twice(scene: Scene):
    own = {name: preferred(name, scene.run.broker.names)[0] for name in GENERATORS}
    assert set(own.values()) == {"broker", "broker-1"}
    scene.await_(lambda: scene.brokers_of_generators() == own, "each generator is at the broker of its hash")
    scene.await_(lambda: scene.learner.members == GENERATORS, "the learner has the members of both")
    scene.learner.announce(1)
    scene.await_(lambda: scene.learner.applied[1] == len(GENERATORS), "an order reaches the generators of both")
    scene.await_(lambda: len(list(scene.folder.archive.glob("*.parquet"))) > 0, "the chief archives")

    chief, other = sorted(live := scene.live(), key=lambda name: not live[name])
    scene.brokers[chief].kill()
    scene.brokers[chief].wait()
    scene.await_(lambda: scene.live() == {other: True}, "the other one is the chief")
    scene.await_(lambda: set(scene.brokers_of_generators().values()) == {other}, "the generators leave the dead one")
    put = {each.name: len(each.put) for each in scene.generators}
    archived = len(list(scene.folder.archive.glob("*.parquet")))
    scene.await_(lambda: all(len(each.put) > put[each.name] + 2 * GROUP_SIZE for each in scene.generators), "all go on")
    scene.await_(lambda: scene.learner.members == GENERATORS, "the learner has all members")
    scene.learner.announce(2)
    scene.await_(lambda: scene.learner.applied[2] >= len(GENERATORS), "an order reaches them where they are")
    scene.await_(lambda: len(list(scene.folder.archive.glob("*.parquet"))) > archived, "the new chief archives")
    status = Monitor(scene.store, scene.run).status()
    assert [role.name for role in status.roles if role.is_chief and role.is_alive] == [other]

    scene.start(chief)
    scene.await_(lambda: scene.live() == {other: True, chief: False}, "the restarted one serves, and the chief stays")
    scene.await_(lambda: scene.brokers_of_generators() == own, "its generators come back")

    for generator in scene.generators:
        generator.drain()
    assert all(generator.end() for generator in scene.generators)
    scene.await_(lambda: scene.store.counts().ready == 0, "all is trained on")
    scene.learner.checkpoint()
    scene.await_(lambda: scene.store.counts().unarchived == 0, "all is archived")
    steps = list(range(1, scene.learner.step + 1))
    scene.await_(lambda: [entry.step for entry in Archive(scene.folder.archive).steps()] == steps, "so is the ledger")
    put = Counter(each for generator in scene.generators for each in generator.put)
    trained = Counter(scene.learner.trained)
    assert (len(put - trained), len(trained - put)) == (0, 0), "lost, or of unknown origin"
    assert max(trained.values()) == 1, "trained on twice"
    archived = Counter(stored.trajectory.id for stored in Archive(scene.folder.archive).read())
    assert archived == trained
    counts, audit = scene.store.counts(), audited(scene.store, scene.folder.archive)
    assert audit.is_sound, audit
    assert counts.accepted == sum(put.values())
    assert counts.refused == {}
