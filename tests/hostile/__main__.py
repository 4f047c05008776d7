"""python -m tests.hostile [--frames N] [--seed N]: mutated frames against a real broker; exit code 1 if harmed."""

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from tests.hostile.siege import Siege


def main() -> None:
    """Run one attack and print its figures."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        try:
            figures = Siege(Path(folder), seed=arguments.seed).run(num_frames=arguments.frames)
        except AssertionError as error:
            console.print(f"harmed: {error}", markup=False)
            sys.exit(1)
    for name, figure in figures.items():
        console.print(f"{name}: {figure}", markup=False, highlight=False)
    console.print("unharmed: broker alive, memory flat, store unchanged, every refusal counted")


if __name__ == "__main__":
    main()
