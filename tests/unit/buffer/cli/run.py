"""Runs a command of `python -m buffer` in this process."""

from slipstream.buffer.__main__ import main


def run(*arguments: object) -> int:
    """Return the exit code."""
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0
