"""`python -m slipstream` is the console script `slipstream`."""

import sys


def main(arguments: list[str] | None = None, *, program: str = "slipstream") -> None:
    """Run the command line. Ctrl-C ends it without a traceback, even during imports."""
    try:
        from slipstream.cli import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    run(arguments, program=program)


if __name__ == "__main__":
    main()
