"""Fixtures of the integration tests."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.configs.run import RunConfig
from slipstream.runtime.run_folder import RunFolder
from tests import runs


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a short path, because socket paths are limited in length."""
    with tempfile.TemporaryDirectory(prefix="slip-", ignore_cleanup_errors=True) as made:
        yield Path(made)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with the digits task. Kills the processes of its runs at the end."""
    yield runs.make_task(tmp_path, warm=False)
    runs.kill_processes_of(tmp_path)


@pytest.fixture
def server(config: RunConfig) -> Iterator[EmbeddedRedis]:
    """The embedded server of a run. The test module defines its `config`."""
    folder = RunFolder(config)
    folder.open()
    started = EmbeddedRedis(folder.store, max_memory_mib=64)
    started.start(timeout_s=20)
    yield started
    started.stop()
