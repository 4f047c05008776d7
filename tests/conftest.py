"""Marks that follow from a test's folder."""

from pathlib import Path

import pytest

_FOLDERS_OF_PROCESSES = {"integration", "e2e"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests of several processes as slow: `make check` leaves them out, CI runs exactly them after it."""
    tests = Path(__file__).parent
    for item in items:
        if item.path.relative_to(tests).parts[0] in _FOLDERS_OF_PROCESSES:
            item.add_marker(pytest.mark.slow)
