"""A generator gets SIGTERM during work, with a real store, sockets, and processes, and a scripted engine."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slipstream.buffer.errors import ReplayBufferError
from slipstream.buffer.redis.run_store import COMMAND_TIMEOUT_S, open_run_store
from slipstream.configs.base import ConfigError
from tests import runs
from tests.runs import SMALL, end, start_role, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NAME = "stops"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make_task(tmp_path_factory.mktemp("stops"), warm=False)


@contextmanager
def started(folder: Path) -> Iterator[list["subprocess.Popen[str]"]]:
    """Start a broker, a learner, and one slow generator."""
    settings = (*SMALL, f"name={NAME}", "learner.max_steps=100000", "generators.engine.seconds_per_token=0.5")
    roles = [
        start_role(folder, "broker", *settings),
        start_role(folder, "learner", *settings),
        start_role(folder, "generators", "--id", "first", f"name={NAME}"),
    ]
    try:
        yield roles
    finally:
        end(roles)


def is_at_work(folder: Path) -> bool:
    try:
        with open_run_store(folder / "runs" / NAME, timeout_s=COMMAND_TIMEOUT_S) as store:
            # The generator's last report is older than its leases, so it may have answered them all since.
            running = store.roles().get("first", {}).get("running", 0) > 0
            return running and store.counts().leased > 0 and store.run_state().step > 0
    except (ReplayBufferError, ConfigError):
        # The broker has not created the run yet.
        return False


def test_sigterm_during_work_returns_the_leases_and_sends_bye(folder: Path):
    with started(folder) as (_, _, generator):
        until(lambda: is_at_work(folder), timeout_s=120, what="a generator at work")
        generator.terminate()
        assert generator.wait(timeout=30) == 0
        with open_run_store(folder / "runs" / NAME, timeout_s=COMMAND_TIMEOUT_S) as store:
            until(lambda: store.roles()["first"]["state"] == "gone", timeout_s=20, what="a Bye")
            counts = store.counts()
            assert counts.leased == 0
            assert counts.returned > 0
            placed = counts.returned + counts.ready + counts.claimed + counts.used
            assert counts.admitted == placed + sum(counts.outcomes.values())
            # A Bye is no event, unlike silence and expired leases. A generator that leaves in a broadcast is evicted,
            # and the learner may raise alerts about the scripted responses.
            texts = [event.text for event in store.events(limit=9) if event.role != "learner"]
            assert [text for text in texts if not text.startswith("evicted: ")] == []
    runs.assert_none_left(folder)
