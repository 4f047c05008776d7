"""Prompt files: Parquet in the verl-compatible form, as `broker.dataset` reads them."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

HELDOUT = "heldout.parquet"
"""Written last: its presence says that both files are whole."""
TRAIN = "train.parquet"


def make_row(
    prompt: str | list[dict[str, str]], *, ground_truth: str, data_source: str, index: int, split: str
) -> dict[str, Any]:
    """One row.

    Example: {"data_source": "digits/reverse", "prompt": "48213=", "reward_model": {"style": "rule",
        "ground_truth": "31284"}, "extra_info": {"index": 17, "split": "train"}}
    """
    return {
        "data_source": data_source,
        "prompt": prompt,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"index": index, "split": split},
    }


def write_pair(folder: Path, *, train: list[dict[str, Any]], heldout: list[dict[str, Any]]) -> None:
    """Write `train.parquet`, then `heldout.parquet`; either exists whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / TRAIN, train)
    _write(folder / HELDOUT, heldout)
    print(f"{folder}: {len(train)} prompts to train on, {len(heldout)} held out")


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    unfinished = path.with_suffix(".tmp")
    pq.write_table(pa.Table.from_pylist(rows), unfinished, compression="zstd")
    unfinished.replace(path)
