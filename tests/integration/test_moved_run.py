"""A run continues elsewhere: other folders, addresses, and stores but the same ledger, after a kill of all roles."""

import re
import shutil
from pathlib import Path

import pytest
import redis

from slipstream.buffer.archive.archive import Archive, whole_ledger
from slipstream.buffer.records import StepEntry
from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.buffer.redis.run_store import open_run_store
from slipstream.configs.buffer import STORE_PASSWORD_VARIABLE
from slipstream.runtime.run_folder import find_run
from tests import runs
from tests.contract.stores import as_limited_user
from tests.integration.test_managed_store import PASSWORD, TlsDoor, make_certificate
from tests.runs import Run, has_stepped, until

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

STEPS = 24


def ledger_in(server: EmbeddedRedis, folder: Path) -> list[StepEntry]:
    with open_run_store(server.url, "mine", timeout_s=10) as store:
        return whole_ledger(store, Archive(folder / "elsewhere/mine/archive"))


def assert_went_on(server: EmbeddedRedis, folder: Path, before: list[StepEntry], *, from_step: int) -> None:
    """Check that the steps covered by the checkpoint are unchanged and every group was trained on in one step."""
    with open_run_store(server.url, "mine", timeout_s=10) as store:
        archive = Archive(folder / "elsewhere/mine/archive")
        after, audit = whole_ledger(store, archive), store.audit(archived=archive.steps)
        counts = store.counts()
    assert [entry.step for entry in after] == list(range(1, STEPS + 1))
    assert after[:from_step] == before[:from_step]
    assert {entry.config_hash for entry in after} == {before[0].config_hash}
    trained = [group for entry in after for group in entry.group_ids]
    assert len(trained) == len(set(trained)) == 4 * STEPS
    assert audit.is_sound, audit
    assert counts.outcomes == {"retired": 4 * STEPS}
    placed = counts.leased + counts.returned + counts.ready + counts.claimed + counts.used
    assert counts.admitted == placed + 4 * STEPS


def run_until_killed(folder: Path, *settings: str) -> None:
    """Run some steps past a checkpoint, then kill every process of the test's folder, including servers."""
    with Run(folder, "mine", f"learner.max_steps={STEPS}", *settings).ended_at_last() as run:
        until(has_stepped(run, 12), timeout_s=120, what="a checkpoint")
        assert_secret(folder, run)
        runs.kill_processes_of(folder)


def resumed_from(folder: Path, *settings: str) -> tuple[int, Run]:
    """Continue to the end. Returns the step that it resumed from."""
    with Run(folder, "mine", f"learner.max_steps={STEPS}", "resume=true", *settings).ended_at_last() as run:
        # At the new `runs_dir`, not the old one.
        run.path = find_run(["name=mine", f"runs_dir={folder}/elsewhere"], command="status")
        assert run.await_end() == 0, run.printed[-3000:]
    begun_at = re.findall(r"starting groups_returned=\d+ role=learner step=(\d+)", run.log("learner"))
    return int(begun_at[-1]), run


def assert_secret(folder: Path, run: Run) -> None:
    """Check that the store's password is in no file of the run and in no command line."""
    for path in (path for path in [*run.path.rglob("*"), folder / "mine.out"] if path.is_file()):
        assert PASSWORD.encode() not in path.read_bytes(), path
    for process in runs.processes_of(folder):
        assert PASSWORD not in " ".join(process.cmdline())


def move(folder: Path) -> None:
    """Copy the run folder and delete the old one."""
    shutil.copytree(folder / "runs/mine", folder / "elsewhere/mine", ignore=shutil.ignore_patterns("*.sock", "sockets"))
    shutil.rmtree(folder / "runs")


def test_a_run_on_a_managed_store_goes_on_elsewhere_with_another_address_of_a_copy(folder, monkeypatch):
    first, certificate = EmbeddedRedis(folder / "first"), make_certificate(folder, "first")
    first.start()
    as_limited_user(first, keys="{mine}:*", password=PASSWORD)
    door = TlsDoor(first, certificate)
    with monkeypatch.context() as environment:
        environment.setenv(STORE_PASSWORD_VARIABLE, PASSWORD)
        store = ("buffer/store=redis", f"buffer.store.url={door.url()}", f"buffer.store.tls_ca_file={certificate.file}")
        run_until_killed(folder, *store)
    door.close()
    move(folder)
    # Its log, as left by the kill.
    shutil.copytree(folder / "first", folder / "second", ignore=shutil.ignore_patterns("*.sock", "redis.pid"))
    shutil.rmtree(folder / "first")
    second, other = EmbeddedRedis(folder / "second"), make_certificate(folder, "second")
    second.start()
    before = ledger_in(second, folder)
    as_limited_user(second, keys="{mine}:*", password=PASSWORD)
    door = TlsDoor(second, other)
    with monkeypatch.context() as environment:
        environment.setenv(STORE_PASSWORD_VARIABLE, PASSWORD)
        store = ("buffer/store=redis", f"buffer.store.url={door.url()}", f"buffer.store.tls_ca_file={other.file}")
        from_step, run = resumed_from(folder, *store, "runs_dir=elsewhere", "broker.address=tcp://127.0.0.1:22100")
        assert_secret(folder, run)
    assert 10 <= from_step < STEPS
    assert_went_on(second, folder, before, from_step=from_step)
    denied = redis.Redis.from_url(second.url).execute_command("ACL LOG")
    assert denied == [], denied
    door.close()
    second.stop()
