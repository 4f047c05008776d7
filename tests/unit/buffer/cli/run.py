"""Runs commands of `slipstream data` in this process."""

from pathlib import Path

import pytest

from slipstream.cli import main


def run(*arguments: object) -> int:
    """Return the exit code."""
    try:
        main(["data", *(str(argument) for argument in arguments)])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def complaint(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return the one-sentence error of a refused command, which prints nothing else and leaves no files."""
    before = sorted(Path().iterdir())
    assert run(*arguments) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("error: ")
    assert len(error.splitlines()) == 1
    assert sorted(Path().iterdir()) == before
    return error
