"""Errors of the embedded server before it starts."""

from pathlib import Path

import pytest

from slipstream.buffer.errors import StoreUnavailableError
from slipstream.buffer.redis.embedded import EmbeddedRedis


def test_a_folder_that_cannot_be_written_is_an_unavailable_store(tmp_path: Path):
    (tmp_path / "redis.socket-path").mkdir()
    with pytest.raises(StoreUnavailableError) as raised:
        EmbeddedRedis(tmp_path).start(timeout_s=5)
    assert str(tmp_path) in str(raised.value)
