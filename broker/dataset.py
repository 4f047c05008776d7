"""Dataset: the prompts of a Parquet file, validated when it is opened.

The schema is verl's: columns `data_source`, `prompt` (plain text or chat messages), `reward_model.ground_truth` and,
optionally, `extra_info`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from slipstream.buffer.trajectory import Record
from slipstream.configs.base import ConfigError


class Row(Record):
    """One prompt.

    Example: Row(uid="train/00017", prompt="48213=", ground_truth="31284", data_source="digits/reverse",
        extra_info={"index": 17, "split": "train"})
    """

    uid: str
    """File name and row number: stable over runs, unique within one."""
    prompt: str | list[dict[str, Any]]
    """Plain text, or chat messages with `role` and `content`."""
    ground_truth: str
    """Reference answer for the reward function."""
    data_source: str
    extra_info: dict[str, Any] = {}
    """Remaining columns of the row."""


class Dataset:
    """The rows of one file, held in memory as Arrow columns. Loads without torch."""

    def __init__(self, path: str | Path) -> None:
        """Open and validate the file. Raises ConfigError, naming the file and its first problem."""
        self._path = Path(path)
        self._table = _read(self._path)
        _check_columns(self._table.schema, self._path)
        _check_filled(self._table, self._path)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __iter__(self) -> Iterator[Row]:
        return (self.row(index) for index in range(len(self)))

    def row(self, index: int) -> Row:
        """Return row `index`, from 0 to len - 1. Raises IndexError otherwise."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self._path} has rows 0 to {len(self) - 1}, got {index}")
        values = self._table.slice(index, 1).to_pylist()[0]
        return Row(
            uid=f"{self._path.stem}/{index:05d}",
            prompt=values["prompt"],
            ground_truth=values["reward_model"]["ground_truth"],
            data_source=values["data_source"],
            extra_info=values.get("extra_info") or {},
        )


def _read(path: Path) -> pa.Table:
    if not path.is_file():
        raise ConfigError(f"{path} must be a Parquet file of prompts, but there is no such file.")
    try:
        return pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{path} must be a Parquet file of prompts, but cannot be read: {error}") from None


def _check_columns(schema: pa.Schema, path: Path) -> None:
    rules = {"data_source": (_is_text, "text"), "prompt": (_is_prompt, "text or a list of chat messages")}
    rules["reward_model"] = (_has_truth, "a record with a text `ground_truth`")
    for column, (is_valid, expected) in rules.items():
        if column not in schema.names:
            raise ConfigError(f"{path} must have the column `{column}`, but has only {', '.join(schema.names)}.")
        if not is_valid(schema.field(column).type):
            raise ConfigError(f"{path}: column `{column}` must be {expected}, got {schema.field(column).type}.")
    if "extra_info" in schema.names and not _is_record_or_empty(schema.field("extra_info").type):
        raise ConfigError(f"{path}: column `extra_info` must be a record, got {schema.field('extra_info').type}.")


def _check_filled(table: pa.Table, path: Path) -> None:
    if table.num_rows == 0:
        raise ConfigError(f"{path} must hold at least one prompt, but is empty.")
    truths = table.column("reward_model").combine_chunks().field("ground_truth")
    columns = {"data_source": table.column("data_source"), "prompt": table.column("prompt")}
    for name, column in (columns | {"reward_model.ground_truth": truths}).items():
        if column.null_count:
            row = column.is_null().to_pylist().index(True)
            raise ConfigError(f"{path}: every row must have a `{name}`, but row {row} has none.")


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_prompt(kind: pa.DataType) -> bool:
    return _is_text(kind) or (_is_list(kind) and _has_texts(kind.value_type, "role", "content"))


def _has_truth(kind: pa.DataType) -> bool:
    return _has_texts(kind, "ground_truth")


def _has_texts(kind: pa.DataType, *names: str) -> bool:
    fields = {field.name: field.type for field in kind} if pa.types.is_struct(kind) else {}
    return all(name in fields and _is_text(fields[name]) for name in names)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _is_record_or_empty(kind: pa.DataType) -> bool:
    return pa.types.is_struct(kind) or pa.types.is_null(kind)
