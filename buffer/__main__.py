"""python -m buffer ls|show|stats|refused|export|import|verify: inspect a run's store, or make and read archives."""

import sys

from slipstream.buffer.cli.app import app
from slipstream.buffer.errors import ReplayBufferError
from slipstream.runtime.command_line import fail_cleanly, run_app


@fail_cleanly(ReplayBufferError)
def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and dispatch."""
    run_app(app, sys.argv[1:] if arguments is None else arguments, program="python -m buffer")


if __name__ == "__main__":
    main()
