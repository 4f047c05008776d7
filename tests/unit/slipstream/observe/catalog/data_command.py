"""Runs a command of `slipstream data` in this process."""

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


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    """Return the lines of a command that succeeds, with runs of blanks collapsed."""
    assert run(*arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return [" ".join(line.split()) for line in out.splitlines() if line.strip()]


def complaint(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return the one sentence of a refused command, which prints nothing else and leaves no file."""
    capsys.readouterr()
    before = sorted(Path().iterdir())
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert (out, sorted(Path().iterdir())) == ("", before)
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    return err
