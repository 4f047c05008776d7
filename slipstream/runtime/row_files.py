"""Files of rows: Parquet, CSV, JSON lines; common names of columns."""

from functools import reduce
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from slipstream.configs.base import ConfigError, require

CHATS = ("messages", "conversations")
"""Columns of whole conversations; those of ShareGPT have `from` and `value`."""
PROMPTS = ("prompt", "question", "problem", *CHATS, "instruction")
TRUTHS = ("reward_model", "answer", "ground_truth", "solution", "output")
RESPONSES = ("response", "completion", "output", "answer", "solution")
"""Common names, best first."""

KINDS = "Parquet, or by its extension CSV (.csv) or JSON (.jsonl, .ndjson, .json), also compressed (.gz)"
_JSON = (".jsonl", ".ndjson", ".json")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "function_call": "assistant"}
_INPUT = "input"
"""Alpaca: what the instruction applies to."""


def extension(path: Path) -> str:
    """Extension in lower case, without that of a compression."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def is_json(path: Path) -> bool:
    """Whether the file holds JSON, according to its extension."""
    return extension(path) in _JSON


def require_demonstrations(path: Path) -> None:
    """Raise ConfigError if a file of supervised training does not exist."""
    why = (
        "correct sft.train_path and sft.eval_path, or make a preset's files by `slipstream prepare` with its overrides"
    )
    require(path.is_file(), str(path), f"be a file of demonstrations, {KINDS}", got="one that does not exist", why=why)


def read_table(path: Path) -> pa.Table:
    """Read Parquet, or CSV with every value as text. Raises ConfigError."""
    try:
        if extension(path) != ".csv":
            return pq.read_table(path)
        with pa.input_stream(str(path)) as stream:
            text = stream.read()
        # Otherwise Arrow guesses types, and the answer 007 becomes the number 7.
        parsing = pa_csv.ParseOptions(newlines_in_values=True)
        names = pa_csv.read_csv(pa.BufferReader(text), parse_options=parsing).column_names
        options = pa_csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))
        return pa_csv.read_csv(pa.BufferReader(text), parse_options=parsing, convert_options=options)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{path} must be {KINDS}, but cannot be read: {error}") from None


def read_lines(path: Path) -> list[bytes]:
    """Text of each row of JSON lines or of a JSON list. Raises ConfigError."""
    try:
        with pa.input_stream(str(path)) as stream:
            data = stream.read().removeprefix(b"\xef\xbb\xbf")
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{path} must be a file of JSON lines, but cannot be read: {error}") from None
    if not data.lstrip().startswith(b"["):
        return [line for line in data.splitlines() if line.strip()]
    try:
        return [bytes(each) for each in msgspec.json.decode(data, type=list[msgspec.Raw])]
    except ValueError as error:
        raise ConfigError(f"{path} must be JSON lines or one JSON list, but is neither: {error}.") from None


def value_at(row: Any, column: str) -> Any:
    """Value of a column or of `record.field`; None if absent."""
    if column in row:
        return row[column]
    return reduce(lambda at, name: at.get(name) if isinstance(at, dict) else None, column.split("."), row)


def with_input(instruction: Any, row: Any) -> Any:
    """Append the `input` of an Alpaca row to its instruction."""
    given = row.get(_INPUT)
    are_texts = isinstance(given, str) and isinstance(instruction, str)
    return f"{instruction}\n\n{given}" if given and are_texts else instruction


def chat_messages(value: Any) -> Any:
    """Convert ShareGPT's messages (`from`, `value`) to `role` and `content`."""
    if not isinstance(value, list):
        return value
    return [
        {"role": _SHAREGPT_ROLES.get(each["from"], each["from"]), "content": each["value"]}
        if isinstance(each, dict) and "role" not in each and {"from", "value"} <= each.keys()
        else each
        for each in value
    ]


def without_nulls(value: Any) -> Any:
    """Drop the null fields that Parquet adds to records, so that reward functions and templates do not see them."""
    if isinstance(value, dict):
        return {name: without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [without_nulls(inner) for inner in value]
    return value
