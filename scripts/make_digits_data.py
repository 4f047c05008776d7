"""Make prompts of a task that a small model learns in minutes: reversing digits, adding numbers, reading pictures.

    python -m slipstream.scripts.make_digits_data --task=reverse --digits=5 --out=data/digits

Training and held-out prompts never overlap; the same seed gives the same files.
"""

import io
import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

from slipstream.configs.base import require
from slipstream.runtime.command_line import fail_cleanly, make_parser

HELDOUT = "heldout.parquet"
"""Written last: if it exists, both files are complete."""
TRAIN = "train.parquet"


def make_row(
    prompt: str | list[dict[str, str]], *, ground_truth: Any, data_source: str, index: int, split: str
) -> dict[str, Any]:
    """Build one row in verl's format.

    Example: {"data_source": "digits/reverse", "prompt": "48213=", "reward_model": {"style": "rule",
        "ground_truth": "31284"}, "extra_info": {"index": 17, "split": "train"}}
    """
    return {
        "data_source": data_source,
        "prompt": prompt,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"index": index, "split": split},
    }


def split_rows(
    problems: Sequence[Any], num_train: int, convert: Callable[..., dict[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Convert the first problems to training prompts, the rest to held-out ones.

    `convert(problem, index=..., split=...)` returns a row.
    """
    rows: dict[str, list[dict[str, Any]]] = {}
    for split, part in {"train": problems[:num_train], "heldout": problems[num_train:]}.items():
        rows[split] = [convert(problem, index=index, split=split) for index, problem in enumerate(part)]
    return rows


def write_pair(folder: Path, *, train: list[dict[str, Any]], heldout: list[dict[str, Any]]) -> None:
    """Write `train.parquet`, then `heldout.parquet`, each atomically."""
    write_file(folder / TRAIN, train)
    write_file(folder / HELDOUT, heldout)
    print(f"{folder}: {len(train)} prompts to train on, {len(heldout)} held out")


def write_file(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write Parquet or, by its extension, JSON lines, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    if path.suffix == ".jsonl":
        unfinished.write_bytes(msgspec.json.Encoder().encode_lines(rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), unfinished, compression="zstd")
    # Atomic, so that an interrupted preparation is repeated.
    unfinished.replace(path)


def reverse(number: int, digits: int) -> tuple[str, str]:
    """Prompt and answer, with leading zeros: 48213 -> ("48213=", "31284")."""
    text = f"{number:0{digits}d}"
    return f"{text}=", text[::-1]


def addition(number: int) -> tuple[str, str]:
    """Prompt and answer of one of 90 x 90 pairs of two-digit numbers: 2468 -> ("37+48=", "85")."""
    left, right = 10 + number // 90, 10 + number % 90
    return f"{left}+{right}=", str(left + right)


SEGMENTS = {
    "a": (0, 0, 4, 0), "b": (4, 0, 4, 3), "c": (4, 3, 4, 6), "d": (0, 6, 4, 6), "e": (0, 3, 0, 6), "f": (0, 0, 0, 3),
    "g": (0, 3, 4, 3),
}  # fmt: skip
"""Segments of a seven-segment display: x and y of both ends."""
LIT = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg")
"""Digit -> lit segments."""
CELL = 8
"""Width and height of a digit, pixels."""


def draw(digits: str, *, seed: int) -> bytes:
    """Draw seven-segment digits, slightly shifted, with noise; return a PNG."""
    chosen = random.Random(seed)
    width, height = CELL * len(digits), CELL
    image = Image.new("L", (width, height), chosen.randrange(160, 256))
    canvas, ink = ImageDraw.Draw(image), chosen.randrange(96)
    for index, digit in enumerate(digits):
        left, top = index * CELL + chosen.randrange(1, 3), chosen.randrange(2)
        for name in LIT[int(digit)]:
            x, y, to_x, to_y = SEGMENTS[name]
            canvas.line((left + x, top + y, left + to_x, top + to_y), fill=ink)
    noise = Image.frombytes("L", image.size, chosen.randbytes(width * height))
    buffer = io.BytesIO()
    Image.blend(image, noise, 0.1).save(buffer, "PNG")
    return buffer.getvalue()


SUMMANDS = list(combinations(range(2, 12), 2))


def question(number: int) -> tuple[list[dict[str, str]], str]:
    """Chat messages and answer of one of 90 sums: 1 -> ("What is 3 + 2?", "5"). 2n and 2n + 1 share a pair."""
    left, right = SUMMANDS[number // 2][:: -1 if number % 2 else 1]
    return [
        {"role": "system", "content": "Reply with the number only."},
        {"role": "user", "content": f"What is {left} + {right}?"},
    ], str(left + right)


def picture(number: int, digits: int) -> tuple[str, str]:
    """Prompt and answer: 4711 -> ("<image>=", "4711")."""
    return "<image>=", f"{number:0{digits}d}"


def make_problems(task: str, *, digits: int, count: int, seed: int) -> list[tuple[Any, str]]:
    """Sample `count` different (prompt, answer) pairs. Raises ConfigError if fewer exist."""
    available = {"addition": 8100, "question": 2 * len(SUMMANDS)}.get(task, 10**digits)
    why = f"there are no more different problems of {task}"
    require(count <= available, "--train-rows + --heldout-rows", f"be <= {available}", got=count, why=why)
    # One draw for both splits, so that they cannot overlap.
    numbers = random.Random(seed).sample(range(available), count)
    if task == "question":
        # Both orders of a pair are in the same split if both sizes are even.
        pairs = random.Random(seed).sample(range(len(SUMMANDS)), len(SUMMANDS))
        numbers = [2 * pair + order for pair in pairs for order in (0, 1)][:count]
    made: dict[str, Callable[[int], tuple[Any, str]]] = {"addition": addition, "question": question}
    made |= {"reverse": partial(reverse, digits=digits), "picture": partial(picture, digits=digits)}
    return [made[task](number) for number in numbers]


def make_files(folder: Path, *, task: str, digits: int, train_rows: int, heldout_rows: int, seed: int) -> None:
    """Write both files. Raises ConfigError."""
    problems = make_problems(task, digits=digits, count=train_rows + heldout_rows, seed=seed)

    def convert(problem: tuple[Any, str], **place: Any) -> dict[str, Any]:
        prompt, answer = problem
        row = make_row(prompt, ground_truth=answer, data_source=f"digits/{task}", **place)
        if task == "picture":
            row["images"] = [{"bytes": draw(answer, seed=seed * 10**digits + int(answer))}]
        return row

    write_pair(folder, **split_rows(problems, train_rows, convert))


@fail_cleanly()
def main(arguments: list[str] | None = None) -> None:
    """Write the files."""
    parser = make_parser("slipstream.scripts.make_digits_data", __doc__)
    tasks = ["reverse", "addition", "question", "picture"]
    parser.add_argument("--task", choices=tasks, default="reverse", help="what to learn (reverse)")
    parser.add_argument("--digits", type=int, default=5, help="length of the numbers to reverse or read (5)")
    parser.add_argument("--train-rows", type=int, default=20_000, help="prompts to train on (20000)")
    parser.add_argument("--heldout-rows", type=int, default=2_000, help="prompts to evaluate on (2000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the problem choice (0)")
    parser.add_argument("--out", type=Path, default=Path("data/digits"), help="folder to write to (data/digits)")
    options = vars(parser.parse_args(arguments))
    make_files(options.pop("out"), **options)


if __name__ == "__main__":
    main()
