"""`python -m slipstream` is the console script `slipstream`."""

import os
import shutil
import sys
from pathlib import Path


def main(arguments: list[str] | None = None, *, program: str = "") -> None:
    """Run the command line. Ctrl-C ends it without a traceback, even during imports.

    `program`: the words that start it (default: as it was started).
    """
    try:
        from slipstream.cli import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    if not program:
        is_module = sys.argv[0].endswith("__main__.py")
        program = f"{as_typed(sys.executable)} -m slipstream" if is_module else as_typed(sys.argv[0])
    run(arguments, program=program)


def as_typed(path: str) -> str:
    """Shortest name by which a shell in this folder finds a program."""
    file = Path(path).absolute()
    if shutil.which(file.name) == str(file):
        return file.name
    near = os.path.relpath(path)
    return path if near.startswith(os.pardir) or os.sep not in near else near


if __name__ == "__main__":
    main()
