"""Runs a command of `slipstream data` in this process."""

from slipstream.cli import main


def run(*arguments: object) -> int:
    """Return the exit code."""
    try:
        main(["data", *(str(argument) for argument in arguments)])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0
