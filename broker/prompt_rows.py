"""Rows of a prompt file: validation and conversion to prompts.

A row has a prompt and a truth, named in `data.columns` or by common names (`runtime/row_files.py`). `data_source`,
`agent_name`, `images` and `extra_info` are optional. Other columns go into `extra_info`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from slipstream.broker.messages import Row
from slipstream.buffer.codec import encode
from slipstream.configs.base import ConfigError
from slipstream.configs.data import NAMED_COLUMNS
from slipstream.runtime.images import PLACEHOLDER, load_image
from slipstream.runtime.row_files import (
    CHATS,
    KINDS,
    PROMPTS,
    TRUTHS,
    chat_messages,
    is_json,
    read_lines,
    read_table,
    value_at,
    with_input,
    without_nulls,
)

Values = dict[str, Any]
"""Column -> value, without nulls."""
PromptText = str | list[dict[str, Any]]
"""Plain text, or chat messages with text or a list of text and image parts."""

_COMMON = {name: (name,) for name in NAMED_COLUMNS} | {"prompt": PROMPTS, "ground_truth": TRUTHS}
_PLACE = "<image>"
"""Placeholder in a text prompt."""
_IMAGE = {"type": "image"}
"""Placeholder in a chat message."""
_SHOWN = 60
"""Characters of an invalid value that an error shows."""


def make_row(values: Values, *, uid: str, file_name: str, folder: Path = Path()) -> Row:
    """Build a row from `standardize`. Raises ConfigError for an unreadable image.

    `file_name`: default `data_source`. `folder`: base of relative image paths.
    """
    return Row(
        uid=uid,
        prompt=place_images(values),
        images=[load_image(source, folder=folder) for source in image_sources(values)],
        ground_truth=values["ground_truth"],
        data_source=values.get("data_source", file_name),
        extra_info=values["extra_info"],
        agent_name=values.get("agent_name", ""),
    )


def standardize(values: Values, columns: Mapping[str, str]) -> Values:
    """Validate a row; return its fields under standard names. Raises ConfigError naming the column.

    `columns`: `data.columns`.
    """
    prompt_name, (prompt, last) = _column("prompt", values, columns), _prompt(values, columns)
    truth_name = _column("ground_truth", values, columns)
    truth = value_at(values, truth_name)
    if truth_name == TRUTHS[0] and truth is not None:
        if not (isinstance(truth, dict) and truth.get("ground_truth") is not None):
            raise _wrong(truth_name, "be a record with a filled `ground_truth`", _show(truth))
        truth = truth["ground_truth"]
    truth = last if truth is None else truth
    for field, name, value in (("prompt", prompt_name, prompt), ("ground_truth", truth_name, truth)):
        if value is None:
            names = (name,) if field in columns else _COMMON[field]
            got = ", ".join(values) or "nothing"
            raise ConfigError(f"`{'` or `'.join(names)}` must be filled, got only {got}: {_advice(field)}")
    if problem := _prompt_problem(prompt):
        raise _wrong(prompt_name, "be text or a list of chat messages, and not be empty", problem)
    if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        got = f"the model's own turn at the end: {_show(prompt[-1].get('content'))}"
        raise _wrong(prompt_name, "end with a turn that the model answers", f"{got}; remove that message")
    result: Values = {"prompt": prompt, "ground_truth": truth}
    for field, kind, must in (
        ("data_source", str, "be text"),
        ("agent_name", str, "be text"),
        ("images", object, ""),
        ("extra_info", dict, "be a record"),
    ):
        name = _column(field, values, columns)
        if (value := value_at(values, name)) is not None:
            if not isinstance(value, kind):
                raise _wrong(name, must, _show(value))
            result[field] = value
    return result | {"extra_info": _further(values, columns, prompt_name) | result.get("extra_info", {})}


def _further(values: Values, columns: Mapping[str, str], prompt: str) -> Values:
    """Other columns, and the truth, which TRL's reward functions read under its column's name."""
    fields = _COMMON.keys() - {"ground_truth", "response"}
    used = {prompt, *(_column(field, values, columns) for field in fields), "extra_info"}
    used |= {"input"} if prompt == "instruction" else set()
    further = {name: value for name, value in values.items() if name not in used}
    if isinstance(judging := further.pop("reward_model", None), dict):
        extra = {name: value for name, value in judging.items() if name not in ("ground_truth", "style")}
        further |= {"reward_model": extra} if extra else {}
    elif judging is not None:
        further["reward_model"] = judging
    return further


def _column(field: str, values: Mapping[str, Any] | Sequence[str], columns: Mapping[str, str]) -> str:
    """Column of a field: the named one, else the first common one present, else the first."""
    common = _COMMON.get(field, (field,))
    return columns.get(field) or next((name for name in common if name in values), common[0])


def _prompt(values: Values, columns: Mapping[str, str]) -> tuple[Any, Any]:
    """Prompt, and a conversation's last turn if the model wrote it; None if absent."""
    name = _column("prompt", values, columns)
    prompt = chat_messages(value_at(values, name))
    if name == "instruction":
        return with_input(prompt, values), None
    if name in CHATS and isinstance(prompt, list) and not _prompt_problem(prompt) and prompt[-1]["role"] == "assistant":
        return prompt[:-1], prompt[-1].get("content")
    return prompt, None


# --- images ----------------------------------------------------------------------------------------------------------
def image_sources(values: Values) -> list[Any]:
    """Images as stored: the column `images`, else the image parts of the messages."""
    if (column := values.get("images")) is not None:
        return column if isinstance(column, list) else [column]
    prompt = values["prompt"]
    contents = [message.get("content") for message in prompt] if isinstance(prompt, list) else []
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    return [part["image"] for part in parts if part.get("type") == "image" and "image" in part]


def place_images(values: Values) -> PromptText:
    """Prompt with a placeholder for each image: text in plain text, parts in chat messages.

    Raises ConfigError unless their numbers match.
    """
    prompt: PromptText = values["prompt"]
    if not (count := len(image_sources(values))):
        return prompt
    if isinstance(prompt, str):
        places = prompt.count(_PLACE)
        prompt = prompt.replace(_PLACE, PLACEHOLDER)
    else:
        prompt = [m | {"content": _parts(m["content"])} if "content" in m else m for m in prompt]
        places = sum(part == _IMAGE for message in prompt for part in message.get("content", ()))
    if places != count:
        raise ConfigError(f"the prompt must have a place ({_PLACE}) for each of {count} images, got {places}.")
    return prompt


def _parts(content: str | list[Any]) -> list[Any]:
    if isinstance(content, list):
        return [_IMAGE if isinstance(part, dict) and part.get("type") == "image" else part for part in content]
    pairs = [[_IMAGE, {"type": "text", "text": text}] for text in content.split(_PLACE)]
    return [part for pair in pairs for part in pair if part.get("text") != ""][1:]


def _prompt_problem(prompt: Any) -> str:
    if isinstance(prompt, str):
        return "" if prompt else "empty text"
    if not isinstance(prompt, list) or not prompt:
        return _show(prompt)
    for number, message in enumerate(prompt):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"message {number} without a text `role`: {_show(message)}"
        # A turn with tool calls may have no content.
        if not isinstance(message.get("content"), str | list) and "tool_calls" not in message:
            return f"message {number} without a `content` of text or a list of parts: {_show(message)}"
    return ""


def _wrong(column: str, must: str, got: str) -> ConfigError:
    return ConfigError(f"`{column}` must {must}, got {got}.")


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


# --- files -----------------------------------------------------------------------------------------------------------
class TableRows:
    """Rows of a Parquet or CSV file, kept as Arrow columns. `standardize` accepts every row."""

    def __init__(self, path: Path, *, columns: Mapping[str, str], max_rows: int | None = None) -> None:
        self._table = _as_json(read_table(path), path).slice(0, max_rows)
        self._columns = columns
        names = self._table.schema.names
        for field in ("prompt", "ground_truth"):
            column = _column(field, names, columns)
            is_answered = field == "ground_truth" and _column("prompt", names, columns) in CHATS
            if column.split(".")[0] in names or (is_answered and field not in columns):
                continue
            wanted = (column,) if field in columns else _COMMON[field]
            must = f"the column `{'` or `'.join(wanted)}`"
            raise ConfigError(f"{path} must have {must}, but has only {', '.join(names)}: {_advice(field)}")
        for number in _unproven_rows(self._table, columns):
            _check(self._values(number), columns, path=path, number=number)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def values(self, number: int) -> Values:
        return standardize(self._values(number), self._columns)

    def _values(self, number: int) -> Values:
        values: Values = without_nulls(self._table.slice(number, 1).to_pylist()[0])
        return values

    def prompts(self) -> list[PromptText]:
        wanted = {*PROMPTS, "input", self._columns.get("prompt", "").split(".")[0]}
        table = self._table.select([name for name in self._table.schema.names if name in wanted])
        batches = (batch.to_pylist() for batch in table.to_batches(max_chunksize=1024))
        return [_prompt(without_nulls(values), self._columns)[0] for batch in batches for values in batch]

    @property
    def may_have_images(self) -> bool:
        """Whether any row may have an image, without decoding."""
        names = self._table.schema.names
        prompt = _column("prompt", names, self._columns)
        kind = _type(self._table, prompt) if prompt in names else None
        # A nested prompt is not looked into.
        is_parts = kind is None
        if kind is not None and pa.types.is_list(kind):
            message, names_of_text = kind.value_type, ("content", "value")
            fields = [message.get_field_index(n) for n in names_of_text] if pa.types.is_struct(message) else []
            is_parts = not any(index >= 0 and pa.types.is_string(message.field(index).type) for index in fields)
        return _column("images", names, self._columns).split(".")[0] in names or is_parts

    def num_bytes(self, start: int, end: int) -> int:
        """Arrow size of rows; at least an eighth of their size in a message."""
        return int(self._table.slice(start, end - start).nbytes)


def _advice(field: str) -> str:
    return f"name the column of your file with data.columns.{field}=NAME."


def _as_json(table: pa.Table, path: Path) -> pa.Table:
    """Convert dates and decimals to text. Raises ConfigError for types that JSON lacks."""
    for number, field in enumerate(table.schema):
        if pa.types.is_temporal(field.type) or pa.types.is_decimal(field.type):
            table = table.set_column(number, field.name, table.column(number).cast(pa.string()))
        elif not _is_json(field.type):
            must = f"column `{field.name}` must hold texts, numbers, booleans, bytes, lists and records"
            raise ConfigError(f"{path}: {must}, got {field.type}: cast it to text or leave it out.")
    return table


def _unproven_rows(table: pa.Table, columns: Mapping[str, str]) -> Sequence[int]:
    """Rows that column types and null counts do not prove valid, usually none."""
    names, everything = table.schema.names, range(table.num_rows)
    prompt, truth = (_column(field, names, columns) for field in ("prompt", "ground_truth"))
    kinds = {name: (pa.types.is_struct if name == "extra_info" else pa.types.is_string) for name in _PLAIN}
    is_proven = all(is_kind(_type(table, name)) for name, is_kind in kinds.items() if name in names)
    # Named columns are rare, and may be fields of records.
    if columns or truth not in names or not is_proven or not _are_filled(table.column(prompt)):
        return everything
    truths = table.column(truth)
    if truth == TRUTHS[0]:
        if not pa.types.is_struct(truths.type) or truths.type.get_field_index("ground_truth") < 0:
            return everything
        truths = pc.struct_field(truths, "ground_truth")
    lacking = pc.indices_nonzero(truths.is_null()).to_pylist() if truths.null_count else []
    return [*lacking, *_ending_with_answers(table.column(prompt))]


_PLAIN = ("data_source", "agent_name", "extra_info", "images")


def _ending_with_answers(prompts: pa.ChunkedArray) -> list[int]:
    """Rows of chats that end with a turn of the model."""
    if not pa.types.is_list(prompts.type):
        return []
    ends = pc.subtract(pc.cumulative_sum(pc.list_value_length(prompts)), 1)
    last_roles = pc.take(pc.struct_field(pc.list_flatten(prompts), "role"), ends)
    rows: list[int] = pc.indices_nonzero(pc.equal(last_roles, "assistant")).to_pylist()
    return rows


def _type(table: pa.Table, column: str) -> pa.DataType:
    return table.schema.field(column).type


def _are_filled(prompts: pa.ChunkedArray) -> bool:
    """Whether all prompts are non-empty texts, or lists of messages with role and text."""
    if prompts.null_count:
        return False
    if pa.types.is_string(prompts.type):
        return pc.min(pc.binary_length(prompts)).as_py() != 0
    if not pa.types.is_list(prompts.type) or pc.min(pc.list_value_length(prompts)).as_py() == 0:
        return False
    messages = pc.list_flatten(prompts)
    if not pa.types.is_struct(messages.type) or messages.null_count:
        return False
    texts = {field.name: pc.struct_field(messages, field.name) for field in messages.type}
    return all(
        name in texts and pa.types.is_string(texts[name].type) and not texts[name].null_count
        for name in ("role", "content")
    )


def _is_json(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_json(kind.value_type)
    if pa.types.is_nested(kind):
        return not pa.types.is_map(kind) and all(_is_json(kind.field(index).type) for index in range(kind.num_fields))
    return not (pa.types.is_temporal(kind) or pa.types.is_decimal(kind))


class JsonRows:
    """Rows of a file of JSON lines or one JSON list, with the interface of TableRows.

    Kept as text, because rows may have different columns.
    """

    def __init__(self, path: Path, *, columns: Mapping[str, str], max_rows: int | None = None) -> None:
        self._columns = columns
        self._lines = read_lines(path)[:max_rows]
        for number, line in enumerate(self._lines):
            try:
                values = msgspec.json.decode(line)
                # Rejects numbers over 64 bits, for example.
                encode(values)
            except (msgspec.MsgspecError, ValueError, OverflowError) as error:
                shown = bytes(line[:_SHOWN]).decode("utf-8", "replace")
                raise ConfigError(f"{path}, row {number}: it must be a JSON record, got `{shown}`: {error}.") from None
            if not isinstance(values, dict):
                raise ConfigError(f"{path}, row {number}: it must be a JSON record, got {_show(values)}.")
            _check(_filled(values), columns, path=path, number=number)

    def __len__(self) -> int:
        return len(self._lines)

    def _values(self, number: int) -> Values:
        return _filled(msgspec.json.decode(self._lines[number]))

    def values(self, number: int) -> Values:
        return standardize(self._values(number), self._columns)

    def prompts(self) -> list[PromptText]:
        return [_prompt(self._values(number), self._columns)[0] for number in range(len(self))]

    @property
    def may_have_images(self) -> bool:
        key = f'"{self._columns["images"].split(".")[-1]}"' if "images" in self._columns else '"image'
        return any(key.encode() in line or b'"image"' in line for line in self._lines)

    def num_bytes(self, start: int, end: int) -> int:
        return sum(map(len, self._lines[start:end]))


def open_rows(path: Path, *, columns: Mapping[str, str], max_rows: int | None = None) -> TableRows | JsonRows:
    """Read a file, or its first `max_rows` rows. Raises ConfigError naming the file and its first problem.

    `columns`: `data.columns`.
    """
    if not path.is_file():
        what = "it is a folder" if path.is_dir() else "there is no such file"
        what += "" if path.is_dir() or path.suffix else ": a dataset of the hub must be downloaded as files"
        raise ConfigError(f"{path} must be a file of prompts ({KINDS}), but {what}.")
    kind = JsonRows if is_json(path) else TableRows
    rows: TableRows | JsonRows = kind(path, columns=columns, max_rows=max_rows)
    if not len(rows):
        raise ConfigError(f"{path} must hold at least one prompt, but is empty.")
    return rows


def _check(values: Values, columns: Mapping[str, str], *, path: Path, number: int) -> None:
    try:
        standardize(values, columns)
    except ConfigError as error:
        raise ConfigError(f"{path}, row {number}: {error}") from None


def _filled(values: Values) -> Values:
    return {name: value for name, value in values.items() if value is not None}
