"""Functions of the user, found by the path that a setting names."""

from pathlib import Path

import pytest

from slipstream.configs.base import ConfigError
from slipstream.runtime.import_path import find_function


@pytest.mark.parametrize("content", ["import sys; sys.exit(1)", "raise RuntimeError('no')", "def f(:"])
def test_a_file_that_cannot_be_imported_is_named_and_ends_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "mine.py").write_text(content)
    with pytest.raises(ConfigError, match=r"^reward\.function='.*mine\.py:f': importing '.*mine\.py' failed: \w+: "):
        find_function(f"{tmp_path}/mine.py:f", setting="reward.function")
