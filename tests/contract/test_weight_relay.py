"""Generators lend versions: the learner serves few of them, and the weights are right whatever a lender does."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import pytest
import torch

from slipstream.broker.errors import NotYetError
from slipstream.broker.messages import Member, Members, MemberState, SnapshotSource, Update
from slipstream.broker.weights import buckets as flat
from slipstream.broker.weights import fetcher as fetcher_module
from slipstream.broker.weights import host_weights as host_weights_module
from slipstream.broker.weights.fetcher import Fetcher
from slipstream.broker.weights.host_weights import HostWeights, digest
from slipstream.broker.weights.shared_buckets import SharedBuckets
from slipstream.broker.weights.snapshots import SnapshotStore
from slipstream.broker.weights.stream import StreamServer
from slipstream.learner.publishing.fetches import Lenders, MemberTable
from tests.contract.test_channels import eventually
from tests.fakes import KEYS, FakeClock
from tests.unit.broker.weight_versions import make_version

TIMEOUT_S = 30.0
COLUMNS = 2**18
"""Columns of a big scene: three buckets of 2 MiB, 8 chunks each."""
NUM_BYTES = 3 * 32 * 1024
FAN_OUT = 4


class Scene:
    """A learner that serves versions, each with a hundred more changed weights, and generators that lend them on."""

    has_deltas = True

    def __init__(self, folder: Path, *, num_columns: int = 4096, make_store=SnapshotStore) -> None:
        self.folder = folder
        self.num_columns = num_columns
        self.store = make_store(folder / "weights")
        self.server = StreamServer(self.store, keys=KEYS, address=f"ipc://{folder}/learner.sock")
        self.fetchers: list[Fetcher] = []
        self.threads = ThreadPoolExecutor(24)
        self.cancelled = Event()

    def version(self, version: int) -> tuple[Update, list[torch.Tensor]]:
        return make_version(version, moved=100 * (version - 1), num_columns=self.num_columns)

    def publish(self, version: int) -> None:
        self.store.put(*self.version(version), with_delta=True)

    def join(self, weights: HostWeights | None = None) -> Fetcher:
        address = f"ipc://{self.folder}/lender-{len(self.fetchers)}.sock"
        self.fetchers.append(Fetcher(KEYS, lend_at=address, host_weights=weights))
        return self.fetchers[-1]

    def order(self, version: int, *lenders: str, is_lent=False, timeout_s=TIMEOUT_S, folder: object = "/no") -> Update:
        """`folder`: where the learner's versions are seen, if they are."""
        update, packed = self.version(version)
        source = SnapshotSource(self.server.address, str(folder), self.has_deltas, list(lenders), is_lent)
        digests = [digest(bucket) for bucket in packed]
        return msgspec.structs.replace(update, source=source, timeout_s=timeout_s, digests=digests)

    def begin(self, fetcher: Fetcher, version: int, *lenders: str, **order: Any) -> "Future[int]":
        """Fetch in a thread; the result is the number of bytes read."""
        return self.threads.submit(self.fetch, fetcher, version, *lenders, **order)

    def fetch(self, fetcher: Fetcher, version: int, *lenders: str, **order: Any) -> int:
        fetched = fetcher.fetch(self.order(version, *lenders, **order), cancelled=self.cancelled)
        packed = self.version(version)[1]
        assert all(torch.equal(got, expected) for got, expected in zip(fetched.tensors, packed, strict=True))
        return fetcher.num_bytes

    def close(self) -> None:
        self.cancelled.set()
        for fetcher in self.fetchers:
            fetcher.close()
        self.server.close()
        self.threads.shutdown()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with closing(Scene(tmp_path)) as made:
        yield made


def fetch_as_planned(scene: Scene, version: int, *, by_delta: bool) -> list[int]:
    """Let all generators, each on its own machine, fetch concurrently as planned; returns the bytes of each."""
    table = MemberTable(on_evict=lambda *_: None, clock=(clock := FakeClock()))
    members = [Member(f"g{number:02}", "1") for number in range(len(scene.fetchers))]
    # The plan sees tcp addresses; the sockets are in the folder of the test, which all can reach.
    reached = {f"tcp://10.0.0.{number}:1": fetcher for number, fetcher in enumerate(scene.fetchers)}
    states = zip(members, reached, strict=True)
    table.update(Members([MemberState(m, "ready", 0, "delta", m.peer_id, address) for m, address in states]))
    lenders = Lenders(table, fan_out=FAN_OUT, clock=clock)
    underway = []
    for place, together in lenders.assign(version, members, by_delta=by_delta).items():
        addresses = [reached[address].lends_at for address in place.lenders]
        for member in together:
            fetcher = scene.fetchers[members.index(member)]
            underway.append(scene.begin(fetcher, version, *addresses, is_lent=place.is_lent))
    return [each.result(TIMEOUT_S) for each in underway]


def test_sixteen_generators_cost_the_learner_as_much_as_fan_out_of_them(scene: Scene) -> None:
    for _ in range(16):
        scene.join()
    scene.publish(1)
    assert set(fetch_as_planned(scene, 1, by_delta=False)) == {NUM_BYTES}
    assert scene.server.num_bytes == FAN_OUT * NUM_BYTES
    assert sum(fetcher.num_bytes_lent for fetcher in scene.fetchers) == (16 - FAN_OUT) * NUM_BYTES
    scene.publish(2)
    before = scene.server.num_bytes
    (size,) = set(fetch_as_planned(scene, 2, by_delta=True))
    assert size < NUM_BYTES / 10
    assert scene.server.num_bytes - before == FAN_OUT * size
    assert not any(fetcher.lender_errors for fetcher in scene.fetchers)


def test_a_generator_waits_for_a_lender_that_is_told_later(scene: Scene) -> None:
    lender, fetcher = scene.join(), scene.join()
    underway = scene.begin(fetcher, 1, lender.lends_at)
    time.sleep(0.2)
    scene.publish(1)
    scene.fetch(lender, 1, is_lent=True)
    assert underway.result(TIMEOUT_S) == NUM_BYTES
    assert scene.server.num_bytes == NUM_BYTES
    assert fetcher.lender_errors == []


def test_a_bucket_is_lent_on_before_the_next_one_has_arrived(scene: Scene) -> None:
    scene.publish(1)
    gate, passed = Event(), Event()

    class Gated(HostWeights):
        def _read_bucket(self, files, version, index, **deadline):
            assert index != 2 or gate.wait(TIMEOUT_S)
            super()._read_bucket(files, version, index, **deadline)

    class Watched(HostWeights):
        def _read_bucket(self, files, version, index, **deadline):
            super()._read_bucket(files, version, index, **deadline)
            if index == 1:
                passed.set()

    lender, fetcher = scene.join(Gated()), scene.join(Watched())
    lending = scene.begin(lender, 1, is_lent=True)
    underway = scene.begin(fetcher, 1, lender.lends_at)
    assert passed.wait(TIMEOUT_S)
    assert not lending.done()
    gate.set()
    assert underway.result(TIMEOUT_S) == NUM_BYTES
    assert scene.server.num_bytes == NUM_BYTES


def test_a_lender_over_a_slow_link_is_not_taken_for_one_that_hangs(tmp_path, monkeypatch):
    class SlowStore(SnapshotStore):
        def read_part(self, version: int, name: str, *, offset: int, num_bytes: int) -> bytes:
            time.sleep(0.1)
            return super().read_part(version, name, offset=offset, num_bytes=num_bytes)

    # Less than the 0.8 s of a bucket, more than the 0.1 s of a chunk.
    monkeypatch.setattr(fetcher_module, "_GIVE_UP_S", 0.5)
    with closing(Scene(tmp_path, num_columns=COLUMNS, make_store=SlowStore)) as scene:
        scene.publish(1)
        first, second, last = (scene.join() for _ in range(3))
        size = sum(scene.version(1)[0].bucket_bytes)
        underway = [
            scene.begin(first, 1, is_lent=True),
            scene.begin(second, 1, first.lends_at, is_lent=True),
            scene.begin(last, 1, second.lends_at),
        ]
        assert [each.result(TIMEOUT_S) for each in underway] == [size] * 3
        assert scene.server.num_bytes == size


class Liar(HostWeights):
    """Flips a bit of every file with this prefix."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def read_part(self, version: int, name: str, *, offset: int, num_bytes: int) -> bytes:
        content = bytearray(super().read_part(version, name, offset=offset, num_bytes=num_bytes))
        if content and name.startswith(self._prefix):
            content[len(content) // 2] ^= 1
        return bytes(content)


def test_a_lender_that_alters_a_bucket_is_named_and_the_next_one_serves(scene: Scene) -> None:
    scene.publish(1)
    liar, honest, fetcher = scene.join(Liar("bucket-0001")), scene.join(), scene.join()
    for lender in (liar, honest):
        scene.fetch(lender, 1, is_lent=True)
    before = scene.server.num_bytes
    scene.fetch(fetcher, 1, liar.lends_at, honest.lends_at, is_lent=True)
    (error,) = fetcher.lender_errors
    assert (error.address, error.is_altered) == (liar.lends_at, True)
    assert "bucket 1 of 3 must have checksum" in error.reason
    assert scene.server.num_bytes == before
    # The liar's first bucket was right, and only the others were read again.
    assert honest.num_bytes_lent == 2 * NUM_BYTES / 3


@pytest.mark.parametrize("altered", ["delta.json", "delta-0002"])
def test_a_lender_that_alters_a_delta_is_named_and_the_learner_serves(scene: Scene, altered: str) -> None:
    liar, fetcher = scene.join(Liar(altered)), scene.join()
    scene.publish(1)
    for each in (liar, fetcher):
        scene.fetch(each, 1)
    scene.publish(2)
    scene.fetch(liar, 2, is_lent=True)
    before = scene.server.num_bytes
    scene.fetch(fetcher, 2, liar.lends_at)
    (error,) = fetcher.lender_errors
    assert error.is_altered
    assert scene.server.num_bytes - before < NUM_BYTES / 2


def test_a_lender_without_the_delta_costs_no_snapshot(scene: Scene) -> None:
    fetcher, joiner = scene.join(), scene.join()
    scene.publish(1)
    scene.fetch(fetcher, 1)
    scene.publish(2)
    scene.fetch(joiner, 2, is_lent=True)
    assert scene.fetch(fetcher, 2, joiner.lends_at) < NUM_BYTES / 10
    assert [error.is_altered for error in fetcher.lender_errors] == [False]


def test_a_lender_that_never_begins_is_gone_or_has_moved_on_is_passed_over(scene, monkeypatch):
    monkeypatch.setattr(fetcher_module, "_GIVE_UP_S", 0.5)
    scene.publish(1)
    lender, fetcher, last = (scene.join() for _ in range(3))
    assert scene.fetch(fetcher, 1, lender.lends_at) == NUM_BYTES
    assert "must begin to fetch it within 0.5 s" in fetcher.lender_errors[0].reason
    scene.fetch(lender, 1, is_lent=True)
    scene.publish(2)
    scene.fetch(lender, 2, is_lent=True)
    assert scene.fetch(last, 2, "ipc:///nobody/listens.sock", lender.lends_at) == NUM_BYTES
    assert "no process listens" in last.lender_errors[0].reason


def test_a_lender_whose_own_fetch_fails_holds_up_nobody(scene: Scene) -> None:
    lender, fetcher = scene.join(), scene.join()
    stuck = scene.begin(lender, 1, is_lent=True, timeout_s=0.5)
    underway = scene.begin(fetcher, 1, lender.lends_at)
    assert stuck.exception(TIMEOUT_S) is not None
    scene.publish(1)
    assert underway.result(TIMEOUT_S) == NUM_BYTES


def test_a_lender_gets_half_of_the_time(scene: Scene) -> None:
    class Teasing(HostWeights):
        """Claims forever to receive more."""

        def find(self, checksum: str) -> int | None:
            return 1

        def read_part(self, version: int, name: str, *, offset: int, num_bytes: int) -> bytes:
            raise NotYetError(time.monotonic_ns())

        def size_bytes(self, version: int, name: str) -> int:
            return 2**40

    scene.publish(1)
    teasing, fetcher = scene.join(Teasing()), scene.join()
    assert scene.fetch(fetcher, 1, teasing.lends_at, timeout_s=2.0) == NUM_BYTES
    assert "nothing more in time" in fetcher.lender_errors[0].reason


@pytest.fixture
def big(tmp_path: Path) -> Iterator[Scene]:
    with closing(Scene(tmp_path, num_columns=COLUMNS)) as made:
        made.publish(1)
        yield made


class SlowWeights(HostWeights):
    def read_part(self, *arguments: Any, **named: Any) -> bytes:
        time.sleep(0.05)
        return super().read_part(*arguments, **named)


def lend_slowly(pipe: Connection, learner: str, address: str) -> None:
    """A lender in another process: fetches version 1, then lends a chunk every 50 ms."""
    fetcher = Fetcher(KEYS, lend_at=address, host_weights=SlowWeights())
    update, _ = make_version(1, num_columns=COLUMNS)
    source = SnapshotSource(learner, "/not/shared", is_lent=True)
    fetcher.fetch(msgspec.structs.replace(update, source=source), cancelled=Event())
    pipe.send("lends")
    time.sleep(TIMEOUT_S)


@pytest.fixture
def lender(big: Scene) -> Iterator[BaseProcess]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=lend_slowly, args=(theirs, big.server.address, address_of(big)), daemon=True)
    process.start()
    assert ours.poll(TIMEOUT_S)
    yield process
    process.kill()
    process.join()


def address_of(scene: Scene) -> str:
    return f"ipc://{scene.folder}/other-process.sock"


@pytest.mark.slow
def test_a_lender_stopped_or_killed_in_mid_transfer_is_replaced(big: Scene, lender: BaseProcess, monkeypatch):
    for how, give_up_s, reason in (
        (signal.SIGSTOP, 0.5, "then nothing more in time"),
        (signal.SIGKILL, 10.0, "no process listens there now"),
    ):
        monkeypatch.setattr(fetcher_module, "_GIVE_UP_S", give_up_s)
        weights = HostWeights()
        fetcher, size = big.join(weights), sum(big.version(1)[0].bucket_bytes)
        before = big.server.num_bytes
        underway = big.begin(fetcher, 1, address_of(big))
        assert eventually(lambda weights=weights, size=size: weights.num_bytes >= size // 3)
        os.kill(lender.pid, how)
        assert underway.result(TIMEOUT_S) == size
        (error,) = fetcher.lender_errors
        assert not error.is_altered
        assert reason in error.reason
        # Received data is not fetched again.
        assert big.server.num_bytes - before <= size * 2 // 3
        os.kill(lender.pid, signal.SIGCONT)


def test_a_lender_whose_memory_is_being_made_says_that_the_version_comes(scene, monkeypatch):
    """Asked while its first fetch takes memory, and while one of another size takes other memory."""
    weights, asked = HostWeights(), []

    def ask(sizes: list[int]) -> SharedBuckets:
        update = orders[-1]
        assert weights.find(flat.combine(update.checksums)) == update.version
        for name in ("bucket-0000.bin", "bucket-0002.bin"):
            with pytest.raises(NotYetError):
                weights.size_bytes(update.version, name)
        asked.append(update.version)
        return SharedBuckets(sizes)

    monkeypatch.setattr(host_weights_module, "SharedBuckets", ask)
    lender = scene.join(weights)
    scene.publish(1)
    orders = [scene.order(1)]
    scene.fetch(lender, 1, is_lent=True)
    scene.num_columns *= 2
    scene.publish(2)
    orders.append(scene.order(2))
    scene.fetch(lender, 2, is_lent=True)
    assert asked == [1, 2]
