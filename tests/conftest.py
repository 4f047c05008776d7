"""Marks that follow from a test's folder, and the order of files."""

from pathlib import Path

import pytest

_FOLDERS_OF_PROCESSES = ("e2e", "integration")
_ORDER = (*_FOLDERS_OF_PROCESSES, "gpu", "shape", "contract", "unit")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests of several processes as slow: `make check` leaves them out.

    Folders with long files come first, and in each the files with the longest limits, so that no worker ends with a
    long file while the others are idle.
    """
    tests = Path(__file__).parent
    urgency: dict[Path, tuple[int, float]] = {}
    for item in items:
        folder = item.path.relative_to(tests).parts[0]
        if folder in _FOLDERS_OF_PROCESSES:
            item.add_marker(pytest.mark.slow)
        limit = item.get_closest_marker("timeout")
        own = -_ORDER.index(folder), float(limit.args[0]) if limit else 0.0
        urgency[item.path] = max(own, urgency.get(item.path, own))
    items.sort(key=lambda item: urgency[item.path], reverse=True)
