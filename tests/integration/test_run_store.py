"""open_run_store on a run folder: of a live run, of a finished run, and with another key layout."""

from pathlib import Path

import msgspec
import pytest

from slipstream.buffer.errors import RunConflictError, StoreUnavailableError
from slipstream.buffer.redis.connection import connect
from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.buffer.redis.run_store import open_run_store
from slipstream.configs.base import ConfigError
from slipstream.configs.load import load
from tests.contract.stores import opened, running


def make_run_folder(folder: Path) -> EmbeddedRedis:
    """A run folder with an opened store. Returns its server, running."""
    run = load(["name=looked-into"])
    (folder / "store").mkdir(parents=True)
    (folder / "config.yaml").write_bytes(msgspec.yaml.encode(run))
    server = EmbeddedRedis(folder / "store")
    server.start(timeout_s=20)
    opened(server.url, run.name).close()
    return server


def test_the_store_of_a_run_that_is_over_is_started_and_stopped_again(tmp_path):
    server = make_run_folder(tmp_path / "run")
    server.stop()
    for _ in range(2):
        with open_run_store(tmp_path / "run", timeout_s=20, starts_server=True) as store:
            assert store.run_state().phase == "starting"
    with pytest.raises(StoreUnavailableError):
        open_run_store(server.url, "looked-into", timeout_s=0)


def test_the_store_of_a_live_run_keeps_running_and_another_layout_is_refused_by_name(tmp_path):
    server = make_run_folder(tmp_path / "run")
    with running(server):
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
