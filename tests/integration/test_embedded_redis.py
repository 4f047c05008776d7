"""EmbeddedRedis: starts, is adopted, stops, dies, and returns with everything that it acknowledged."""

import os
import re
import shutil
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import redis

from slipstream.buffer.errors import RunConflictError, StoreUnavailableError
from slipstream.buffer.records import CheckpointPointer, Insertion, make_entry
from slipstream.buffer.redis import embedded
from slipstream.buffer.redis.connection import connect
from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.buffer.redis.run_store import open_run_store
from slipstream.buffer.sampling import SamplingRules
from slipstream.configs.base import ConfigError
from slipstream.configs.buffer import STORE_PASSWORD_VARIABLE
from slipstream.configs.load import load
from tests.builders import make_packed
from tests.contract.stores import lease_all, opened, renew, running
from tests.runs import processes_of, until

GROUP_SIZE = 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def server(folder: Path) -> Iterator[EmbeddedRedis]:
    with running(EmbeddedRedis(folder, max_memory_mib=64)) as server:
        yield server


def test_the_server_is_private_to_its_folder_and_its_user(server, folder):
    client = connect(server.url)
    assert client.config_get("port")["port"] == "0"
    assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
    assert client.config_get("appendfsync")["appendfsync"] == "no", "an owner syncs"
    assert stat.S_IMODE((folder / "redis.sock").stat().st_mode) == 0o700
    assert int((folder / "redis.pid").read_text()) == server.pid
    assert os.getsid(server.pid) == server.pid, "Ctrl-C in the terminal does not reach it"


def test_a_second_start_adopts_the_running_server_and_may_stop_it(server, folder):
    opened(server.url).set_phase("training")
    second = EmbeddedRedis(folder, durability="strict", max_memory_mib=32)
    second.start(timeout_s=20)
    assert second.pid == server.pid
    client = connect(second.url)
    assert client.config_get("appendfsync")["appendfsync"] == "always", "the newest settings apply"
    process = psutil.Process(server.pid)
    second.stop()
    assert not process.is_running()
    server.stop()
    with pytest.raises(StoreUnavailableError, match="no store answered"):
        open_run_store(server.url, "run", timeout_s=0)


def test_two_starters_at_once_share_one_server(folder):
    servers = [EmbeddedRedis(folder) for _ in range(3)]
    starters = [threading.Thread(target=each.start) for each in servers]
    for each in starters:
        each.start()
    for each in starters:
        each.join(timeout=30)
    assert len({each.pid for each in servers}) == 1
    for each in servers:
        each.stop()


def cut_transaction(*, in_command: bool) -> bytes:
    """The start of a transaction as in the log: a set value, and possibly half of another."""
    whole = b"*1\r\n$5\r\nMULTI\r\n*3\r\n$3\r\nSET\r\n$4\r\nhalf\r\n$1\r\n1\r\n"
    return whole + b"*3\r\n$3\r\nSET\r\n$5\r\nother\r\n$100\r\nabc" if in_command else whole


@pytest.mark.parametrize(("in_command", "has_room"), [(False, True), (True, True), (True, False)])
def test_half_a_transaction_at_the_end_of_the_log_is_never_executed_however_often_it_dies(folder, in_command, has_room):
    server = EmbeddedRedis(folder, max_memory_mib=64)
    if not has_room:
        # As on a full disk: the server's output is lost.
        server.log_path = Path(os.devnull)
    server.start(timeout_s=20)
    client = connect(server.url)
    client.set("before", 1)
    psutil.Process(server.pid).kill()
    [log] = [*folder.glob("appendonly.aof"), *folder.glob("appendonlydir/*.incr.aof")]
    with log.open("ab") as file:
        file.write(cut_transaction(in_command=in_command))
    for number in range(2):
        server.start(timeout_s=20)
        client.transaction(lambda pipe, number=number: pipe.set(f"after-{number}", 1).set("last", number))
        psutil.Process(server.pid).kill()
    with running(server):
        assert sorted(client.keys()) == [b"after-0", b"after-1", b"before", b"last"]
        assert [each.pid for each in processes_of(folder) if each.name() == "redis-server"] == [server.pid]
    assert not [*folder.glob("*.load")]


def test_a_server_starts_on_damaged_files_though_it_dies_while_it_loads_a_log_that_was_cut(tmp_path):
    (tmp_path / "redis.socket-path").write_bytes(b"/tmp/\xff")
    (tmp_path / "appendonly.aof").write_bytes(b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$1\r\n1\r\n" * 200_000 + b"*3\r\n")
    with running(EmbeddedRedis(tmp_path)) as server:
        assert connect(server.url).get("a") == b"1"


def test_a_full_store_refuses_trajectories_until_the_learner_made_room(folder):
    with running(EmbeddedRedis(folder, durability="fast", max_memory_mib=8)) as server:
        store = opened(server.url)
        extras = {"padding": "x" * 200_000}
        leased = lease_all(store, 200, group_size=GROUP_SIZE)
        groups = iter(leased)
        insertions = [Insertion(outcome="inserted")]
        while all(insertion.outcome == "inserted" for insertion in insertions):
            refused_group = next(groups).group_id
            members = [make_packed(refused_group, n, group_size=GROUP_SIZE, extras=extras) for n in range(GROUP_SIZE)]
            insertions = store.insert(members)
        assert insertions[-1] == Insertion(outcome="refused", reason="store_full")

        admin = connect(server.url)
        limit = admin.config_get("maxmemory")["maxmemory"]
        admin.config_set("maxmemory", 1)  # full even for the smallest write
        with pytest.raises(redis.OutOfMemoryError):
            admin.set("anything", 1)
        ready = store.counts().ready
        assert ready >= 1
        assert renew(store, [each.id for each in leased], lease_s=60) == 200 - ready
        claim = store.claim(step=1, num_groups=ready, version=0, rules=SamplingRules(), lease_s=60)
        store.renew_claim(claim, lease_s=60)
        store.append_metrics({"step": 1})
        store.report_role("learner-0", {"step": 1})
        assert store.roles()["learner-0"]["step"] == 1
        assert store.audit().is_sound
        assert list(store.groups())
        store.quarantine("malformed", b"junk")
        store.set_phase("training")
        store.commit_version(1)
        store.commit(claim, make_entry(claim, store.fetch(claim.group_ids), version=0, seed=0, config_hash=""))
        assert store.checkpoint(CheckpointPointer(1, 1, "step-00000001"), fence=claim.fence) == ready
        admin.config_set("maxmemory", limit)
        assert store.insert(members)[-1] == Insertion(outcome="inserted", group_is_ready=True)


def test_a_directory_too_deep_for_a_socket_gets_a_short_one(tmp_path):
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    with running(EmbeddedRedis(deep)) as server:
        socket = (deep / "redis.socket-path").read_text().strip()
        assert len(socket) < 107
        assert stat.S_IMODE(Path(socket).parent.stat().st_mode) == 0o700
        assert server.url == EmbeddedRedis(deep).url, "every process of the run derives the same"
        assert opened(server.url).counts().accepted == 0
    assert not Path(socket).parent.exists()


def test_another_users_short_folder_is_rejected(tmp_path):
    server = EmbeddedRedis(tmp_path / ("d" * 60) / ("e" * 60))
    socket = Path(server.url.removeprefix("unix://"))
    socket.parent.symlink_to(tmp_path)
    try:
        with pytest.raises(ConfigError, match="must be a folder, got a symbolic link"):
            server.start()
        assert server.pid is None
    finally:
        socket.parent.unlink()


def test_a_directory_with_odd_characters_is_fine(tmp_path):
    with running(EmbeddedRedis(tmp_path / "a b%20c?d'e")) as server:
        assert opened(server.url).counts().accepted == 0


def test_a_server_that_cannot_start_says_why(folder):
    folder.mkdir()
    (folder / "appendonly.aof").write_text("not an append-only file\n")
    server = EmbeddedRedis(folder)
    with pytest.raises(StoreUnavailableError, match=r"died at its start; the end of .*redis\.log: .*Bad file format"):
        server.start(timeout_s=20)
    server.stop()


def test_a_folder_that_cannot_be_written_is_an_unavailable_store(tmp_path):
    (tmp_path / "redis.socket-path").mkdir()
    with pytest.raises(StoreUnavailableError, match=re.escape(str(tmp_path))):
        EmbeddedRedis(tmp_path).start(timeout_s=5)


ABSENT = r"no store answered at .* within 0\.2 s .*start the run's broker"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("unix:///nowhere/redis.sock", ABSENT),
        ("redis://127.0.0.1:1/0", ABSENT),
        ("localhost", r"must be a redis://, rediss:// or unix:// .*, got 'localhost'"),
    ],
)
def test_an_absent_store_and_an_invalid_address_are_named_with_a_remedy(url, words):
    with pytest.raises(StoreUnavailableError, match=words):
        open_run_store(url, "run", timeout_s=0.2)


def test_a_server_that_may_evict_is_refused(server):
    connect(server.url).config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(StoreUnavailableError, match=r"maxmemory-policy .* must be noeviction, got allkeys-lru"):
        open_run_store(server.url, "run", timeout_s=5)
    connect(server.url).config_set("maxmemory", 0)
    open_run_store(server.url, "run", timeout_s=5).close()


def test_a_password_is_refused_by_name_because_the_embedded_server_has_none(server, folder, monkeypatch):
    monkeypatch.setenv(STORE_PASSWORD_VARIABLE, "secret")
    with pytest.raises(StoreUnavailableError, match=f"has no password, but {STORE_PASSWORD_VARIABLE} is set: unset it"):
        EmbeddedRedis(folder).start()
    with pytest.raises(
        StoreUnavailableError, match=f"must take the password in {STORE_PASSWORD_VARIABLE}, got: .*called without any"
    ):
        open_run_store(server.url, "run", timeout_s=5)


def test_two_runs_share_a_server_without_meeting(server):
    one, other = opened(server.url, "one"), opened(server.url, "other")
    for store in (one, other):
        group_id = lease_all(store, 1, group_size=GROUP_SIZE)[0].group_id
        store.insert([make_packed(group_id, index, group_size=GROUP_SIZE) for index in range(GROUP_SIZE)])
    one.open_evaluation("e", purpose="greedy", version=0, rows=[1])
    claim = one.claim(step=1, num_groups=1, version=0, rules=SamplingRules(), lease_s=60)
    one.commit(claim, make_entry(claim, one.fetch(claim.group_ids), version=0, seed=0, config_hash=""))
    one.checkpoint(CheckpointPointer(1, 1, "step-00000001"), fence=claim.fence)
    one.report_role("learner-0", {})
    one.append_metrics({})
    one.quarantine("malformed", b"")
    assert (other.counts().ready, other.run_state().step, other.roles(), other.metrics().rows) == (1, 0, {}, [])
    keys = connect(server.url).keys("*")
    assert all(key.startswith((b"{one}:", b"{other}:")) for key in keys), keys


def test_a_server_that_cannot_be_watched_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = subprocess.run

    def refuse(words: list[str], **settings: Any) -> Any:
        if any("idle_stop" in word for word in map(str, words)):
            raise BlockingIOError("no more processes")
        return run(words, **settings)

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(StoreUnavailableError, match="no more processes"):
        EmbeddedRedis(tmp_path / "store").start()
    assert processes_of(tmp_path) == []


def test_a_server_that_nobody_uses_saves_and_ends_and_one_in_use_stays(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path / "store", idle_timeout_s=0.6)
    server.start()
    store = open_run_store(server.url, "run", timeout_s=10)
    store.open_run("run", config_json="{}", num_rows=10, seed=7)
    time.sleep(1.5)
    assert store.run_state().phase == "starting"
    store.close()
    unused_since = time.monotonic()
    until(lambda: not server.is_alive, timeout_s=10, what="its end")
    assert time.monotonic() - unused_since > 0.5
    server.start()
    with open_run_store(server.url, "run", timeout_s=10) as store:
        assert store.run_state().run_id == "run"
    server.stop()
    until(lambda: processes_of(tmp_path) == [], timeout_s=5, what="the end of those who watched it")


def test_a_server_is_watched_by_a_python_that_cannot_open_a_pidfd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Like those of uv and conda, which are built for old kernels.
    lacking = "import os, signal\nfor each in os, signal:\n    each.pidfd_open = each.pidfd_send_signal = None\n"
    program = tmp_path / "idle_stop.py"
    program.write_text(lacking + embedded._IDLE_STOP.read_text())
    monkeypatch.setattr(embedded, "_IDLE_STOP", program)
    server = EmbeddedRedis(tmp_path / "store", idle_timeout_s=0.4)
    server.start()
    until(lambda: not server.is_alive, timeout_s=10, what="its end")


@pytest.mark.parametrize("is_suspended", [False, True])
def test_an_unused_server_with_a_deleted_folder_ends(tmp_path: Path, is_suspended: bool) -> None:
    server = EmbeddedRedis(tmp_path / "store", idle_timeout_s=0.6)
    server.start()
    with open_run_store(server.url, "run", timeout_s=10) as store:
        store.open_run("run", config_json="{}", num_rows=10, seed=7)
        found = processes_of(tmp_path)
        assert found
        if is_suspended:
            os.kill(server.pid, signal.SIGSTOP)
        shutil.rmtree(tmp_path / "store")
    if is_suspended:
        # Longer than the response timeout, so the connection is dropped.
        time.sleep(0.5)
        os.kill(server.pid, signal.SIGCONT)
    until(lambda: not psutil.wait_procs(found, timeout=0)[1], timeout_s=10, what="the end of the server and its watch")


def test_the_store_of_a_live_run_keeps_running_and_another_layout_is_refused_by_name(tmp_path):
    run = load(["name=looked-into"])
    (tmp_path / "run/store").mkdir(parents=True)
    (tmp_path / "run/config.yaml").write_bytes(msgspec.yaml.encode(run))
    with running(EmbeddedRedis(tmp_path / "run/store")) as server:
        opened(server.url, run.name).close()
        with open_run_store(tmp_path / "run", timeout_s=20, starts_server=True) as store:
            assert store.run_state().step == 0
        with open_run_store(server.url, "looked-into", timeout_s=1) as store:
            assert store.run_state().step == 0
        connect(server.url).hset("{looked-into}:run", "layout", 1)
        with (
            pytest.raises(RunConflictError, match="stored with key layout 1"),
            open_run_store(tmp_path / "run", timeout_s=20, starts_server=True),
        ):
            pass


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="must be a run folder"), open_run_store(tmp_path, timeout_s=1):
        pass
