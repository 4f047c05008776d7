"""RedisSupervisor: restarts a server that dies, makes its log durable, and gives up when a restart would not help."""

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from slipstream.buffer.errors import StoreLostError, StoreUnavailableError
from slipstream.buffer.redis.connection import connect
from slipstream.buffer.redis.embedded import EmbeddedRedis, RedisSupervisor
from slipstream.buffer.redis.run_store import open_run_store
from tests.contract.stores import opened, running
from tests.runs import until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def server(folder: Path) -> EmbeddedRedis:
    return EmbeddedRedis(folder, max_memory_mib=64)


@pytest.fixture
def supervisor(server: EmbeddedRedis) -> Iterator[RedisSupervisor]:
    with running(RedisSupervisor(server, start_timeout_s=20)) as supervisor:
        yield supervisor


def kill(server: EmbeddedRedis) -> None:
    assert server.pid is not None
    psutil.Process(server.pid).kill()


def test_a_killed_store_is_restarted_and_a_retrying_client_only_notices_a_delay(server, supervisor, folder):
    leftover = folder / "temp-rewriteaof-12345.aof"
    leftover.write_bytes(b"a rewrite of the log that the kill interrupts")
    store = opened(supervisor.server.url, retry_timeout_s=20)
    first = server.pid
    store.set_phase("training")
    killed_at = time.monotonic()
    kill(server)
    assert store.run_state().phase == "training", "no error, and nothing lost"
    took_s = time.monotonic() - killed_at
    store.set_phase("finishing")
    assert took_s < 10
    assert not leftover.exists()
    assert server.pid != first
    until(lambda: supervisor.num_restarts == 1, what="a restart")
    died, back = supervisor.poll()
    assert died == "the store died (signal SIGKILL); restarting it"
    assert back.startswith("the store is back after ")
    assert back.endswith("restart 1)")
    assert supervisor.poll() == [], "reported once"


def test_a_store_started_by_another_process_is_also_supervised(server, folder):
    # Its parent is not the supervisor's process, so only the supervisor's polling notices its end.
    server.start(timeout_s=20)
    with running(RedisSupervisor(EmbeddedRedis(folder, max_memory_mib=64), start_timeout_s=20)) as supervisor:
        kill(server)
        until(lambda: supervisor.num_restarts == 1, what="a restart")
        assert "the store died" in supervisor.poll()[0]
        assert opened(supervisor.server.url).counts().accepted == 0


def test_a_store_that_keeps_nothing_ends_the_run_with_one_sentence(folder):
    server = EmbeddedRedis(folder, durability="fast", max_memory_mib=64)
    with running(RedisSupervisor(server, start_timeout_s=20)) as supervisor:
        kill(server)
        with pytest.raises(StoreLostError, match=r"died \(.*\) and buffer\.store\.durability=fast keeps nothing"):
            until(supervisor.poll, what="news")
    assert not server.is_alive


def test_a_store_that_dies_again_and_again_is_lost_with_the_end_of_its_log(server, supervisor, folder):
    (folder / "appendonly.aof").write_text("not an append-only file\n")
    kill(server)
    said: list[str] = []
    with pytest.raises(StoreLostError, match=r"died 5 times within 60 s .*redis\.log: .*Bad file format"):
        until(lambda: said.extend(supervisor.poll()), what="the end")
    assert any("died at its start" in sentence for sentence in said)


def test_the_log_is_synced_also_after_a_rewrite_has_replaced_it(server, supervisor, folder):
    log = folder / "appendonly.aof"
    store, admin = opened(supervisor.server.url), connect(supervisor.server.url)
    before = log.stat().st_ino
    until(lambda: before in synced_inodes(), what="the log")
    admin.bgrewriteaof()
    until(lambda: log.stat().st_ino != before, what="a new log")
    store.set_phase("training")
    until(lambda: synced_inodes() & {before, log.stat().st_ino} == {log.stat().st_ino}, what="the new log alone")


def synced_inodes() -> set[int]:
    files = (Path(file.path) for file in psutil.Process().open_files())
    return {file.stat().st_ino for file in files if file.exists()}


def test_a_suspended_store_delays_a_client_without_retries_rarely(server, supervisor):
    # Its loop must keep answering pings.
    store = open_run_store(supervisor.server.url, "run", timeout_s=10, answer_timeout_s=0.3)
    store.open_run("run", config_json="{}", num_rows=100, seed=0)
    process = psutil.Process(server.pid)
    process.suspend()
    started_at = time.monotonic()
    for _ in range(40):
        with pytest.raises(StoreUnavailableError, match="does not answer"):
            store.counts()
    # A wait each time would be 12 seconds.
    assert time.monotonic() - started_at < 3
    process.resume()

    def answers() -> bool:
        try:
            return store.counts().accepted == 0
        except StoreUnavailableError:
            return False

    until(answers, what="an answer")
    assert supervisor.num_restarts == 0
