"""The archiver on a real store: both are killed and starved, and the archive has every group once."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from slipstream.broker import archiver as archiver_module
from slipstream.broker.archiver import ArchiverThread
from slipstream.buffer.archive.archive import Archive
from slipstream.buffer.archive.shards import ShardWriter
from slipstream.buffer.errors import StoreUnavailableError
from slipstream.buffer.redis.connection import connect
from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.buffer.redis.store import RedisStore
from slipstream.configs.buffer import ArchiveConfig
from tests.contract.stores import checkpoint, claim, commit, make_ready, open_run
from tests.runs import audited, until

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_GROUPS_PER_SHARD", 4), ("_FLUSH_S", 0.2), ("_TICK_S", 0.02)):
        monkeypatch.setattr(archiver_module, name, value)


@pytest.fixture
def server(short_folder: Path) -> Iterator[EmbeddedRedis]:
    started = EmbeddedRedis(short_folder, durability="strict", max_memory_mib=64)
    started.start(timeout_s=20)
    yield started
    started.stop()


@pytest.fixture
def store(server: EmbeddedRedis) -> Iterator[RedisStore]:
    opened = connect_to(server)
    open_run(opened, keeps_finished=True)
    yield opened
    opened.close()


def connect_to(server: EmbeddedRedis) -> RedisStore:
    return RedisStore(connect(server.url), "run")


def start_archiver(server: EmbeddedRedis, folder: Path) -> ArchiverThread:
    archiver = ArchiverThread(lambda: connect_to(server), folder, ArchiveConfig())
    archiver.start()
    return archiver


def retire(store: RedisStore, *, step: int, count: int) -> list[str]:
    """One step, from lease to checkpoint. Returns the groups it used."""
    make_ready(store, count)
    claimed = claim(store, step, count)
    commit(store, claimed)
    checkpoint(store, step)
    return claimed.group_ids


def groups_in(folder: Path) -> list[str]:
    """Group of every trajectory, in archive order."""
    return [stored.trajectory.group_id for stored in Archive(folder).read()]


def test_finished_groups_move_from_the_store_to_the_archive(server, store, tmp_path):
    archiver = start_archiver(server, tmp_path)
    group_ids = retire(store, step=1, count=3) + retire(store, step=2, count=2)
    until(lambda: store.counts().unarchived == 0, what="the archiver")
    make_ready(store, 1)
    claimed = claim(store, 3, 1)
    store.reject(claimed, group_ids=claimed.group_ids, reason="all_equal")
    assert archiver.stop(timeout_s=10), "a stopping archiver archives finished groups"
    archive = Archive(tmp_path)
    assert groups_in(tmp_path) == [group for group in [*group_ids, *claimed.group_ids] for _ in range(2)]
    endings = {("retired", "", (1,)), ("retired", "", (2,)), ("rejected", "all_equal", ())}
    assert {(stored.state, stored.reason, tuple(stored.steps)) for stored in archive.read()} == endings
    assert archive.check().is_sound
    assert [entry.group_ids for entry in archive.steps()] == [group_ids[:3], group_ids[3:]]
    assert store.ledger() == []
    assert audited(store, tmp_path).is_sound
    assert archiver.status().groups == 6
    gauges = store.roles()["archiver"]
    assert (gauges["state"], gauges["groups"], gauges["last_step"], gauges["reason"]) == ("gone", 6, 2, "")


def test_the_archiver_waits_for_a_killed_store_with_a_reason(server, store, tmp_path):
    archiver = start_archiver(server, tmp_path)
    first = retire(store, step=1, count=2)
    until(lambda: archiver.status().groups == 2, what="the first shard")
    assert server.pid is not None
    psutil.Process(server.pid).kill()
    until(lambda: "does not answer" in archiver.status().reason, what="the archiver to say why it waits")
    server.start(timeout_s=20)
    second = retire(store, step=2, count=2)
    until(lambda: archiver.status().groups == 4, what="the second shard")
    assert archiver.status().reason == ""
    assert archiver.stop(timeout_s=10)
    assert groups_in(tmp_path) == [group for group in first + second for _ in range(2)]
    assert audited(connect_to(server), tmp_path).is_sound


def test_a_second_archiver_waits_until_the_first_has_ended(server, store, tmp_path):
    other = ShardWriter(tmp_path)
    archiver = start_archiver(server, tmp_path)
    retire(store, step=1, count=2)
    until(lambda: "must have one writer" in archiver.status().reason, what="the archiver to say why it waits")
    other.close()
    until(lambda: archiver.status().groups == 2, what="the shard")
    assert archiver.stop(timeout_s=10)


def test_stopping_ends_also_when_the_store_is_gone(server, store, tmp_path):
    retire(store, step=1, count=1)
    server.stop()
    archiver = start_archiver(server, tmp_path)
    assert archiver.stop(timeout_s=10)
    with pytest.raises(StoreUnavailableError):
        store.counts()
