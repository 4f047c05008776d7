"""Fixtures of the integration tests."""

from collections.abc import Iterator

import pytest

from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.configs.run import RunConfig
from slipstream.runtime.run_folder import RunFolder


@pytest.fixture
def server(config: RunConfig) -> Iterator[EmbeddedRedis]:
    """The embedded server of a run. The test module defines its `config`."""
    folder = RunFolder(config)
    folder.open()
    started = EmbeddedRedis(folder.store, max_memory_mib=64)
    started.start(timeout_s=20)
    yield started
    started.stop()
