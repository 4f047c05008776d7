"""Tables of test cases, one case per line."""

from typing import Any

import pytest


def cases(names: str, *rows: Any) -> pytest.MarkDecorator:
    """Run the test once for each row. Example: @cases("text, length", ("a", 1), ("", 0))."""
    return pytest.mark.parametrize(names, rows)
