"""A store that refuses writes: trajectories are deferred, nothing is lost, and work continues when space is freed."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from slipstream.broker.ingest import Ingest
from slipstream.broker.messages import Ack, Nack, Put
from slipstream.buffer.codec import Packed
from slipstream.buffer.errors import StoreCannotWriteError, StoreUnavailableError
from slipstream.buffer.redis.connection import connect
from slipstream.buffer.redis.embedded import EmbeddedRedis, RedisSupervisor, find_redis_binary
from slipstream.buffer.redis.run_store import open_run_store
from slipstream.buffer.redis.store import RedisStore
from slipstream.buffer.store import StoreOutage
from tests import runs
from tests.builders import make_packed
from tests.contract.stores import lease_all, opened, running
from tests.runs import Run, assert_all_steps_once, assert_reconciled, has_stepped, until

GROUP_SIZE = 4
SENDER = b"generator-0"
NO_LIMIT = (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY)


@pytest.fixture
def limitable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers with a file size limit. Beyond it, writes fail as on a full disk, and the process stays alive."""
    wrapper = tmp_path / "bin" / "redis-server"
    wrapper.parent.mkdir()
    wrapper.write_text(f"#!/bin/sh\ntrap '' XFSZ\nexec {find_redis_binary()} \"$@\"\n")
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:/usr/bin:/bin")


@pytest.fixture
def server(tmp_path: Path, limitable: None) -> Iterator[EmbeddedRedis]:
    with running(EmbeddedRedis(tmp_path / "store", max_memory_mib=64)) as server:
        yield server


@pytest.fixture
def store(server: EmbeddedRedis) -> RedisStore:
    return opened(server.url)


def fill_disk(server: EmbeddedRedis) -> None:
    """From here on, the log may grow by at most 20 kB."""
    log = server.directory / "appendonly.aof"
    limit_files(server, (log.stat().st_size + 20_000, psutil.RLIM_INFINITY))


def limit_files(server: EmbeddedRedis, limits: tuple[int, int]) -> None:
    psutil.Process(server.pid).rlimit(psutil.RLIMIT_FSIZE, limits)


def make_batches(store: RedisStore, count: int) -> list[list[Packed]]:
    return [
        [make_packed(lease.group_id, index, group_size=GROUP_SIZE) for index in range(GROUP_SIZE)]
        for lease in lease_all(store, count, group_size=GROUP_SIZE)
    ]


def fill_disk_and_notice(server: EmbeddedRedis, store: RedisStore) -> None:
    batches = make_batches(store, 200)
    fill_disk(server)
    with pytest.raises(StoreCannotWriteError, match="No space left"):
        store.insert([packed for batch in batches for packed in batch])


def put(ingest: Ingest, batch: list[Packed]) -> list[Ack | Nack]:
    ingest.add(SENDER, Put([header for header, _ in batch]), [payload for _, payload in batch])
    return [answer for _, answer in ingest.flush()]


def test_a_full_disk_defers_trajectories_and_loses_none(server, store):
    said: list[str] = []
    outage = StoreOutage(report=said.append)
    ingest = Ingest(store, outage)
    batches = iter(make_batches(store, 200))
    acknowledged: list[Packed] = []
    fill_disk(server)
    batch = next(batches)
    while isinstance((answers := put(ingest, batch))[0], Ack):
        acknowledged += batch
        batch = next(batches)
    assert {(answer.reason, answer.is_fatal) for answer in answers} == {("store_cannot_write", False)}
    assert ingest.deferred == {"store_cannot_write": GROUP_SIZE}
    assert outage.reason == "store_cannot_write"
    assert "takes no writes" in said[0]
    assert "MISCONF" in said[0]

    limit_files(server, NO_LIMIT)
    retrying = opened(server.url, retry_timeout_s=20)  # wait until the server has noticed
    retrying.set_phase("training")
    assert put(ingest, batch) == [Ack([header.id for header, _ in batch])]
    assert ingest.reason == ""
    acknowledged += batch

    psutil.Process(server.pid).kill()
    server.start(timeout_s=20)
    assert {insertion.outcome for insertion in store.insert(acknowledged)} == {"duplicate"}
    assert store.run_state().phase == "training"
    assert store.audit().is_sound


def test_a_role_that_retries_waits_for_room_longer_than_for_a_silent_store_and_reports_it(server, store):
    fill_disk_and_notice(server, store)
    assert str(server.directory) in store.full_disk()
    retrying = open_run_store(server.url, "run", timeout_s=10, retry_timeout_s=0.3)
    seen: list[str] = []
    timer = threading.Timer(0.8, lambda: (seen.append(retrying.waiting_for), limit_files(server, NO_LIMIT)))
    timer.start()
    retrying.set_phase("training")
    timer.join(timeout=10)
    assert seen[0].startswith("waiting ")
    assert seen[0].endswith(f" s for room on the disk of the store at {server.url}")
    assert retrying.waiting_for == ""
    assert retrying.run_state().phase == "training"
    until(lambda: store.full_disk() == "", timeout_s=10, what="room")


def test_a_replica_is_distinguished_from_an_absent_store(server, store):
    admin = connect(server.url)
    (batch,) = make_batches(store, 1)
    store.put_images({"aa": b"1"})
    admin.replicaof("127.0.0.1", 1)
    try:
        with pytest.raises(StoreCannotWriteError, match="name a primary"):
            store.set_phase("training")
        store.put_images({"aa": b"1"})  # which is there
        with pytest.raises(StoreCannotWriteError):
            store.put_images({"aa": b"1", "bb": b"2"})
        ingest = Ingest(store, StoreOutage(report=lambda sentence: None))
        assert {answer.reason for answer in put(ingest, batch)} == {"store_cannot_write"}
    finally:
        admin.replicaof("NO", "ONE")


@pytest.mark.usefixtures("limitable")
def test_a_strict_store_ends_at_a_full_disk_having_acknowledged_only_what_is_on_it(tmp_path):
    server = EmbeddedRedis(tmp_path / "store", durability="strict", max_memory_mib=64)
    with running(RedisSupervisor(server, start_timeout_s=20)) as supervisor:
        store, retrying = opened(server.url), opened(server.url, retry_timeout_s=20)
        batches, acknowledged = make_batches(store, 200), []
        fill_disk(server)
        with contextlib.suppress(StoreUnavailableError):
            for batch in batches:
                store.insert(batch)
                acknowledged += batch
        assert 0 < len(acknowledged) < 200 * GROUP_SIZE
        # The supervisor's next server has no limit, so it has space again.
        assert {insertion.outcome for insertion in retrying.insert(acknowledged)} == {"duplicate"}
        died = supervisor.poll()[0]
        assert "exit code 1, last line of its log: " in died
        assert "Can't recover from AOF write error" in died
        assert retrying.audit().is_sound


def limit_all(processes: list[psutil.Process], size: int) -> None:
    for process in processes:
        process.rlimit(psutil.RLIMIT_FSIZE, (size, psutil.RLIM_INFINITY))


def waits_for(folder: Path) -> dict[str, str]:
    """Waiting role -> the awaited role and the reason, as `status` shows them."""
    waits = runs.status(folder, "full").get("waits", [])
    return {wait["waiter"]: f"{wait['blocked_on']}: {wait['reason']}" for wait in waits}


# In CI: the tests above, and the wait in the status in tests/unit/slipstream/observe/test_run_status.py.
@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_run_pauses_on_a_full_disk_by_name_and_goes_on_when_there_is_room(tmp_path: Path, limitable: None):
    folder = runs.make_task(tmp_path, warm=False)
    settings = ["learner.max_steps=14", "broker.lease_s=3"]
    # Python would cut the bytecode of modules that it imports on a full disk.
    with Run(folder, "full", *settings, PYTHONDONTWRITEBYTECODE="1").ended_at_last() as run:
        until(has_stepped(run, 6), timeout_s=120, what="training has begun")
        launcher = psutil.Process(run.launcher.pid)
        roles = launcher.children(recursive=True)
        limit_all([launcher, *roles], 1)
        until(lambda: "all roles" in waits_for(folder), timeout_s=60, what="a word in the status")
        steps = run.steps
        full_until = time.monotonic() + 8
        until(lambda: time.monotonic() > full_until, timeout_s=10, what="more than a silent store gets")
        reason = waits_for(folder)["all roles"]
        assert reason.startswith("the disk: ")
        assert str(folder / "runs" / "full" / "store") in reason
        assert run.steps == steps
        assert all(process.is_running() for process in roles)
        limit_all([launcher, *roles], psutil.RLIM_INFINITY)
        assert run.await_end() == 0, run.printed[-3000:]
    assert "restarted" not in run.printed
    assert "Traceback" not in run.log("learner") + run.log("broker") + run.log("generator-0")
    assert_all_steps_once(run, 14)
    assert_reconciled(run)
