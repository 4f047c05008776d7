"""python -m buffer ls|show|stats|refused|export|import|verify: look into a run's store, or make and read archives."""

from buffer.commands.app import app
from buffer.errors import BufferFault
from configs.exits import fail_cleanly


@fail_cleanly(BufferFault)
def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    app(arguments)


if __name__ == "__main__":
    main()
