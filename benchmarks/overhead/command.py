"""The command line that `benchmarks.overhead` starts each side with."""

import argparse


def side_arguments() -> argparse.Namespace:
    """--seconds of a round, --rounds, and overrides of the run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("overrides", nargs="*")
    return parser.parse_args()
