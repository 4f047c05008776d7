"""Fixture of the router's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes import RouterScene


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[RouterScene]:
    return RouterScene(tmp_path)
