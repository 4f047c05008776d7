"""A real server is repeatedly killed under load: nothing acknowledged is lost, and runs continue."""

import random
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest

from slipstream.buffer.codec import Packed
from slipstream.buffer.errors import StoreUnavailableError
from slipstream.buffer.redis.embedded import EmbeddedRedis, RedisSupervisor
from slipstream.buffer.redis.run_store import open_run_store
from slipstream.buffer.redis.store import RedisStore
from tests import runs
from tests.builders import make_packed
from tests.contract.stores import lease_all, opened, running
from tests.runs import SMALL, end, start_role, until

GROUP_SIZE = 4
GROUPS_AT_ONCE = 50
NUM_THREADS = 3
NUM_KILLS = 6
LONGEST_GAP_S = 0.3
SEED = 11


class Inserter:
    """Behaves like generators and broker: sends each batch until it is acknowledged."""

    def __init__(self, url: str, number: int) -> None:
        self._store = opened(url)
        self._random = random.Random(number)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.acknowledged: list[Packed] = []
        self.error: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=30)
        assert self.error is None, self.error

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                for group_id in self._lease():
                    self._insert_group(group_id)
        except BaseException as error:
            self.error = error

    def _lease(self) -> list[str]:
        try:
            return [lease.group_id for lease in lease_all(self._store, GROUPS_AT_ONCE, group_size=GROUP_SIZE)]
        except StoreUnavailableError:
            return []

    def _insert_group(self, group_id: str) -> None:
        extras = {"padding": "x" * self._random.choice([0, 100, 3000])}
        batch = [make_packed(group_id, index, group_size=GROUP_SIZE, extras=extras) for index in range(GROUP_SIZE)]
        while not self._stopping.is_set():
            try:
                outcomes = {insertion.outcome for insertion in self._store.insert(batch)}
            except StoreUnavailableError:
                continue
            assert outcomes <= {"inserted", "duplicate"}, outcomes
            self.acknowledged += batch
            return


@pytest.mark.timeout(240)
@pytest.mark.parametrize("durability", ["standard", "strict"])
def test_whenever_the_store_is_killed_all_it_acknowledged_is_there_again(tmp_path, durability, monkeypatch):
    monkeypatch.setattr("slipstream.buffer.redis.embedded._WITHIN_S", 0.0)  # frequent deaths are intended here
    instants = random.Random(SEED)
    server = EmbeddedRedis(tmp_path / "store", durability=durability, max_memory_mib=2048)
    with running(RedisSupervisor(server, start_timeout_s=30)) as supervisor:
        store = opened(supervisor.server.url, retry_timeout_s=30)
        inserters = [Inserter(supervisor.server.url, number) for number in range(NUM_THREADS)]
        for each in inserters:
            each.start()
        checked = [0] * NUM_THREADS
        for kills in range(1, NUM_KILLS + 1):
            wait_for_progress(inserters, seconds=instants.uniform(0.0, LONGEST_GAP_S))
            psutil.Process(server.pid).kill()
            counted = [len(each.acknowledged) for each in inserters]
            until(lambda: supervisor.num_restarts == kills, timeout_s=30, what=f"restart {kills}")  # noqa: B023
            for number, each in enumerate(inserters):
                assert_stored(store, each.acknowledged[checked[number] : counted[number]])
            checked = counted
        for each in inserters:
            each.stop()
        everything = [packed for each in inserters for packed in each.acknowledged]
        assert_stored(store, everything)
        audit = store.audit()
        assert audit.is_sound, audit
        assert store.counts().accepted >= len(everything)
        print(f"{durability}: {supervisor.num_restarts} kills, {len(everything)} acknowledged, none lost, seed {SEED}")


def wait_for_progress(inserters: list[Inserter], *, seconds: float) -> None:
    """Wait for an insert from every thread and for a minimum time, so that a kill hits a busy server."""
    ends_at, before = time.monotonic() + seconds, [len(each.acknowledged) for each in inserters]
    until(
        lambda: (
            time.monotonic() >= ends_at
            and all(len(each.acknowledged) > was for each, was in zip(inserters, before, strict=True))
        ),
        timeout_s=30,
        what="progress of every thread",
    )


def assert_stored(store: RedisStore, acknowledged: list[Packed]) -> None:
    outcomes = {insertion.outcome for insertion in store.insert(acknowledged)}
    assert outcomes <= {"duplicate"}, "an acknowledged trajectory is missing"


def kill_store(run_folder: Path) -> int:
    """Send SIGKILL. Returns the old process id."""
    pid = int((run_folder / "store" / "redis.pid").read_text())
    psutil.Process(pid).kill()
    return pid


def scrape(port: int) -> str:
    try:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return answer.read().decode()
    except OSError:
        return ""


def has_logger(folder: Path) -> bool:
    for process in runs.processes_of(folder):
        with suppress(psutil.Error):
            if "slipstream.observe.loggers" in process.cmdline():
                return True
    return False


QUIET = """
class Quiet:
    def __init__(self, run):
        self.file = (run.folder / "quiet.txt").open("a")

    def log(self, step, metrics):
        print(step, metrics["learner/reward_mean"], file=self.file, flush=True)
"""
ROW = {"step": 1, "time_s": 1.0, "learner/reward_mean": 0.5}
ROW |= {"learner/wait_s": 0.5, "learner/train_s": 0.5, "learner/publish_s": 0.0}


@pytest.mark.timeout(120)
def test_a_broker_started_by_hand_has_observers_and_supervises_the_store_and_adopts_it_after_its_own_death(folder):
    (folder / "quiet.py").write_text(QUIET)
    with socket.create_server(("127.0.0.1", 0)) as chosen:
        port = chosen.getsockname()[1]
    observed = ("logging.backends=['quiet.py:Quiet']", f"metrics.prometheus_port={port}")
    settings = ("broker", *SMALL, "name=supervisor", *observed)
    log, run_folder = folder / "by-hand-broker.log", folder / "runs" / "supervisor"
    broker = start_role(folder, *settings)
    try:
        until(lambda: "listening" in log.read_text(), timeout_s=40, what="a broker")
        until(lambda: has_logger(folder), timeout_s=60, what="the logger")
        with open_run_store(run_folder, timeout_s=10) as store:
            store.append_metrics(ROW)
        quiet = run_folder / "quiet.txt"
        until(lambda: quiet.exists() and quiet.read_text() == "1 0.5\n", timeout_s=60, what="the row")
        until(lambda: 'slipstream_learner_reward_mean{run="supervisor"} 0.5' in scrape(port), timeout_s=60, what="it")
        kill_store(run_folder)
        until(lambda: "the store is back" in log.read_text(), timeout_s=20, what="a restart")
        pid = (run_folder / "store" / "redis.pid").read_text()
        broker.kill()
        broker.wait(timeout=10)
        assert psutil.pid_exists(int(pid)), "the store outlives its supervisor"
        until(lambda: not has_logger(folder) and not scrape(port), what="the end of its observers")
        broker = start_role(folder, *settings)
        until(lambda: "listening" in log.read_text(), timeout_s=40, what="another broker")
        assert (run_folder / "store" / "redis.pid").read_text() == pid, "it was adopted"
        kill_store(run_folder)
        until(lambda: "the store is back" in log.read_text(), timeout_s=20, what="another restart")
    finally:
        end([broker])
    assert broker.returncode == 0
    runs.assert_none_left(folder)
