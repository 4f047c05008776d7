"""Makes prompts of a task that a tiny model learns in minutes: reversing digits, or adding two-digit numbers.

    python -m scripts.make_digits_data --task=reverse --digits=5 --out=data/digits

Training and held-out prompts never overlap; the same seed gives the same files.
"""

import argparse
import random
from pathlib import Path

from configs.base import ConfigError
from configs.exits import fail_cleanly
from scripts.prompt_file import make_row, write_pair


def reverse(number: int, digits: int) -> tuple[str, str]:
    """48213 -> ("48213=", "31284"); leading zeros stay."""
    text = f"{number:0{digits}d}"
    return f"{text}=", text[::-1]


def addition(number: int) -> tuple[str, str]:
    """Pair number 0..8099 of the 90 x 90 pairs of two-digit numbers: 2468 -> ("37+48=", "85")."""
    left, right = 10 + number // 90, 10 + number % 90
    return f"{left}+{right}=", str(left + right)


def make_problems(task: str, *, digits: int, count: int, seed: int) -> list[tuple[str, str]]:
    """`count` different (prompt, answer) pairs in random order. Raises ConfigError when there are not so many."""
    available = 10**digits if task == "reverse" else 8100
    if count > available:
        raise ConfigError(
            f"--train-rows + --heldout-rows must be <= {available}, the number of {task} problems, got {count}."
        )
    numbers = random.Random(seed).sample(range(available), count)
    return [reverse(number, digits) if task == "reverse" else addition(number) for number in numbers]


def make_files(folder: Path, *, task: str, digits: int, train_rows: int, heldout_rows: int, seed: int) -> None:
    """Write both files. Raises ConfigError."""
    problems = make_problems(task, digits=digits, count=train_rows + heldout_rows, seed=seed)
    splits = {"train": problems[:train_rows], "heldout": problems[train_rows:]}
    rows = {
        split: [
            make_row(prompt, ground_truth=answer, data_source=f"digits/{task}", index=index, split=split)
            for index, (prompt, answer) in enumerate(pairs)
        ]
        for split, pairs in splits.items()
    }
    write_pair(folder, train=rows["train"], heldout=rows["heldout"])


@fail_cleanly()
def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=["reverse", "addition"], default="reverse")
    parser.add_argument("--digits", type=int, default=5, help="length of the numbers to reverse")
    parser.add_argument("--train-rows", type=int, default=20_000)
    parser.add_argument("--heldout-rows", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("data/digits"), help="folder to write to")
    options = vars(parser.parse_args(arguments))
    make_files(options.pop("out"), **options)


if __name__ == "__main__":
    main()
