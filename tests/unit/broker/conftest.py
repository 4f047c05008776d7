"""Fixture of the router's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.broker.router_scene import Scene


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    return Scene(tmp_path)
