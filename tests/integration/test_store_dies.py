"""A real server is repeatedly killed under load: nothing acknowledged is lost, and runs continue."""

import random
import re
import threading
import time
from pathlib import Path

import psutil
import pytest

from slipstream.buffer.codec import Packed
from slipstream.buffer.errors import StoreUnavailableError
from slipstream.buffer.redis.embedded import EmbeddedRedis, RedisSupervisor
from slipstream.buffer.redis.store import RedisStore
from tests import runs
from tests.builders import make_packed
from tests.contract.stores import lease_all, opened, running
from tests.runs import SMALL, Run, assert_reconciled, end, has_stepped, start_role, until

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


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_goes_on_by_itself_after_its_store_was_killed(folder):
    steps = 60
    with Run(folder, "killed-store", f"learner.max_steps={steps}").ended_at_last() as run:
        for number in range(1, 4):
            until(has_stepped(run, 10 * number), timeout_s=120, what="training goes on")
            kill_store(run.path)
            until(lambda: run.printed.count("the store is back") == number, timeout_s=30, what="a restart")  # noqa: B023
        assert run.await_end() == 0, run.printed[-3000:]
    assert run.printed.count("the store died (signal SIGKILL); restarting it") == 3
    assert "Traceback" not in run.printed + run.log("broker") + run.log("learner") + run.log("generator-0")
    assert " died (" not in run.printed.replace("the store died (", ""), "no role ended with it"
    # Every step is committed once. Metric rows belong to the learner and were never at risk.
    assert [row["step"] for row in runs.metrics(folder, "killed-store")] == list(range(1, steps + 1))
    assert_reconciled(run)
    runs.assert_none_left(folder)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_run_whose_store_keeps_nothing_ends_with_one_sentence(folder):
    settings = ("buffer.store.durability=fast", "learner.max_steps=100000")
    with Run(folder, "forgetful", *settings).ended_at_last() as run:
        until(has_stepped(run, 2), timeout_s=120, what="training has begun")
        kill_store(run.path)
        assert run.await_end(timeout_s=30) == 2, run.printed[-3000:]
    (last,) = re.findall(r"error: (.*)", run.printed)
    assert "buffer.store.durability=fast keeps nothing" in last
    assert "Traceback" not in run.printed
    runs.assert_none_left(folder)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_broker_started_by_hand_supervises_the_store_and_adopts_it_after_its_own_death(folder):
    settings = ("broker", *SMALL, "name=supervisor")
    log, run_folder = folder / "by-hand-broker.log", folder / "runs" / "supervisor"
    broker = start_role(folder, *settings)
    try:
        until(lambda: "listening" in log.read_text(), timeout_s=40, what="a broker")
        kill_store(run_folder)
        until(lambda: "the store is back" in log.read_text(), timeout_s=20, what="a restart")
        pid = (run_folder / "store" / "redis.pid").read_text()
        broker.kill()
        broker.wait(timeout=10)
        assert psutil.pid_exists(int(pid)), "the store outlives its supervisor"
        broker = start_role(folder, *settings)
        until(lambda: "listening" in log.read_text(), timeout_s=40, what="another broker")
        assert (run_folder / "store" / "redis.pid").read_text() == pid, "it was adopted"
        kill_store(run_folder)
        until(lambda: "the store is back" in log.read_text(), timeout_s=20, what="another restart")
    finally:
        end([broker])
    assert broker.returncode == 0
    runs.assert_none_left(folder)
