"""A generator is told to stop in mid-work, with a real store, sockets and processes; its engine alone is scripted."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slipstream.buffer.accounting import StoreCounts
from slipstream.buffer.errors import ReplayBufferError
from slipstream.buffer.redis.run_store import COMMAND_TIMEOUT_S, open_run_store
from slipstream.buffer.store import Store
from slipstream.configs.base import ConfigError
from tests.e2e import runs
from tests.integration.test_roles_die import SMALL, end, start_role, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NAME = "stops"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make_task(tmp_path_factory.mktemp("stops"), warm=False)


@contextmanager
def started(folder: Path) -> Iterator[list["subprocess.Popen[str]"]]:
    """Broker, learner and one slow generator, as by hand."""
    address = f"broker.address=ipc://{folder}/{NAME}.sock"
    settings = (*SMALL, address, f"name={NAME}", "learner.max_steps=100000", "generators.engine.seconds_per_token=0.5")
    roles = [
        start_role(folder, "broker", *settings),
        start_role(folder, "learner", *settings),
        start_role(folder, "generators", "--id", "first", address),
    ]
    try:
        yield roles
    finally:
        end(roles)


@contextmanager
def looking(folder: Path) -> Iterator[Store]:
    with open_run_store(folder / "runs" / NAME, timeout_s=COMMAND_TIMEOUT_S) as store:
        yield store


def is_at_work(folder: Path) -> bool:
    try:
        with looking(folder) as store:
            return store.roles().get("first", {}).get("running", 0) > 0 and store.run_state().step > 0
    except (ReplayBufferError, ConfigError):
        # The broker has not begun the run yet.
        return False


def in_places(counts: StoreCounts) -> int:
    return counts.returned + counts.ready + counts.claimed + counts.used + sum(counts.outcomes.values())


def test_sigterm_in_mid_work_gives_the_leases_back_and_says_goodbye(folder: Path):
    with started(folder) as (_, _, generator):
        until(lambda: is_at_work(folder), timeout_s=120, what="a generator at work")
        generator.terminate()
        assert generator.wait(timeout=30) == 0
        with looking(folder) as store:
            until(lambda: store.roles()["first"]["state"] == "gone", timeout_s=20, what="a goodbye")
            counts = store.counts()
            assert counts.leased == 0
            assert counts.returned > 0
            assert counts.admitted == in_places(counts)
            # A goodbye is none, silence and lapsed leases are. It may have left inside a broadcast: then it is evicted.
            # The learner may find the scripted answers strange.
            texts = [event.text for event in store.events(limit=9) if event.role != "learner"]
            assert [text for text in texts if not text.startswith("evicted: ")] == []
    assert runs.processes_of(folder) == []
