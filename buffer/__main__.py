"""python -m buffer ls|show|stats|refused|export|import|verify: look into a run's store, or make and read archives."""

from slipstream.buffer.cli.app import app
from slipstream.buffer.errors import ReplayBufferError
from slipstream.runtime.command_line import fail_cleanly


@fail_cleanly(ReplayBufferError)
def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    app(arguments)


if __name__ == "__main__":
    main()
