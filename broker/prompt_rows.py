"""Rows of a prompt file in Parquet or JSON lines: validation and conversion to prompts.

A row has a prompt (`prompt`, else `question`) and a truth (`reward_model.ground_truth`, else `answer`). `data_source`,
`agent_name`, `images` and `extra_info` are optional. Other columns go into `extra_info`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from slipstream.broker.messages import Row
from slipstream.buffer.codec import encode
from slipstream.configs.base import ConfigError
from slipstream.runtime.images import PLACEHOLDER, load_image

Values = dict[str, Any]
"""Column -> value, without nulls."""
PromptText = str | list[dict[str, Any]]
"""Plain text, or chat messages; a message's content is text or a list of text and image parts."""

_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_PROMPTS = ("prompt", "question")
_TRUTHS = ("reward_model", "answer")
_OWN = ("data_source", "agent_name", "extra_info", "images")
_PLACE = "<image>"
"""Placeholder in a text prompt."""
_IMAGE = {"type": "image"}
"""Placeholder in a chat message."""
_SHOWN = 60
"""Characters of an invalid value that an error shows."""


def make_row(values: Values, *, uid: str, file_name: str, folder: Path = Path()) -> Row:
    """Build the prompt of a row that has passed `check_values`; `file_name` replaces a missing `data_source`.

    Image paths are relative to `folder`. Raises ConfigError for an unreadable image.
    """
    prompt, truth = _first(_PROMPTS, values), _first(_TRUTHS, values)
    used = {prompt, truth, *_OWN}
    further = {name: value for name, value in values.items() if name not in used}
    if truth == "reward_model":
        judging = values["reward_model"]
        if extra := {name: value for name, value in judging.items() if name not in ("ground_truth", "style")}:
            further["reward_model"] = extra
    return Row(
        uid=uid,
        prompt=place_images(values),
        images=[load_image(source, folder=folder) for source in image_sources(values)],
        ground_truth=values["reward_model"]["ground_truth"] if truth == "reward_model" else values["answer"],
        data_source=values.get("data_source", file_name),
        extra_info=further | values.get("extra_info", {}),
        agent_name=values.get("agent_name", ""),
    )


def check_values(values: Values) -> None:
    """Validate a row. Raises ConfigError naming the column."""
    for names in (_PROMPTS, _TRUTHS):
        if _first(names, values) not in values:
            found = ", ".join(values) or "nothing"
            raise ConfigError(f"`{names[0]}` or `{names[1]}` must be filled, got only {found}.")
    prompt = _first(_PROMPTS, values)
    if problem := _prompt_problem(values[prompt]):
        must = "be text or a list of chat messages, and not be empty" if prompt == "prompt" else "be text, not empty"
        raise _wrong(prompt, must, problem)
    if prompt == "question" and not isinstance(values[prompt], str):
        raise _wrong(prompt, "be text", _show(values[prompt]))
    judging = values.get("reward_model")
    if judging is not None and not (isinstance(judging, dict) and judging.get("ground_truth") is not None):
        raise _wrong("reward_model", "be a record with a filled `ground_truth`", _show(judging))
    for name, kind, must in (
        ("data_source", str, "be text"),
        ("agent_name", str, "be text"),
        ("extra_info", dict, "be a record"),
    ):
        if name in values and not isinstance(values[name], kind):
            raise _wrong(name, must, _show(values[name]))


# --- images ----------------------------------------------------------------------------------------------------------
def image_sources(values: Values) -> list[Any]:
    """Return the images as stored: the column `images`, else the image parts of the messages."""
    if (column := values.get("images")) is not None:
        return column if isinstance(column, list) else [column]
    prompt = values[_first(_PROMPTS, values)]
    contents = [message.get("content") for message in prompt] if isinstance(prompt, list) else []
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    return [part["image"] for part in parts if part.get("type") == "image" and "image" in part]


def place_images(values: Values) -> PromptText:
    """Return the prompt with a placeholder for each image: the model's text in plain text, parts in chat messages.

    Raises ConfigError unless the numbers of placeholders and images match.
    """
    prompt: PromptText = values[_first(_PROMPTS, values)]
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


def _first(names: tuple[str, str], values: Values) -> str:
    return names[0] if names[0] in values else names[1]


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
class ParquetRows:
    """Rows of a Parquet file, kept as Arrow columns. Every row has passed `check_values`."""

    def __init__(self, path: Path) -> None:
        self._table = _read_table(path)
        names = self._table.schema.names
        for wanted in (_PROMPTS, _TRUTHS):
            if not set(wanted) & set(names):
                raise ConfigError(
                    f"{path} must have the column `{wanted[0]}` or `{wanted[1]}`, but has only {', '.join(names)}."
                )
        for number in _unproven_rows(self._table):
            _check(self.values(number), path=path, number=number)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def values(self, number: int) -> Values:
        values: Values = _without_nulls(self._table.slice(number, 1).to_pylist()[0])
        return values

    def prompts(self) -> list[PromptText]:
        table = self._table.select([name for name in _PROMPTS if name in self._table.schema.names])
        batches = (batch.to_pylist() for batch in table.to_batches(max_chunksize=1024))
        return [values[_first(_PROMPTS, values)] for batch in batches for values in map(_without_nulls, batch)]

    @property
    def may_have_images(self) -> bool:
        """Whether any row may have an image, without decoding all rows."""
        kind = _type(self._table, _PROMPTS[0]) if _PROMPTS[0] in self._table.schema.names else pa.string()
        is_parts = pa.types.is_list(kind) and not _has_texts(kind)
        return "images" in self._table.schema.names or is_parts

    def num_bytes(self, start: int, end: int) -> int:
        """Return the Arrow size of rows, without decoding them; at least an eighth of their size in a message."""
        return int(self._table.slice(start, end - start).nbytes)


def _read_table(path: Path) -> pa.Table:
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{path} must be a Parquet file of prompts, but cannot be read: {error}") from None
    for number, field in enumerate(table.schema):
        if pa.types.is_temporal(field.type) or pa.types.is_decimal(field.type):
            table = table.set_column(number, field.name, table.column(number).cast(pa.string()))
        elif not _is_json(field.type):
            raise ConfigError(
                f"{path}: column `{field.name}` must hold texts, numbers, booleans, bytes, lists and records, got "
                f"{field.type}: cast it to text or leave it out."
            )
    return table


def _unproven_rows(table: pa.Table) -> Sequence[int]:
    """Return the rows that column types and null counts do not prove valid, usually none."""
    prompt, truth = (next(name for name in names if name in table.schema.names) for names in (_PROMPTS, _TRUTHS))
    kinds = {name: (pa.types.is_struct if name == "extra_info" else pa.types.is_string) for name in _OWN}
    is_proven = all(is_kind(_type(table, name)) for name, is_kind in kinds.items() if name in table.schema.names)
    if not is_proven or not _are_filled(table.column(prompt)):
        return range(table.num_rows)
    truths = table.column(truth)
    if truth == "reward_model":
        if not pa.types.is_struct(truths.type) or truths.type.get_field_index("ground_truth") < 0:
            return range(table.num_rows)
        truths = pc.struct_field(truths, "ground_truth")
    return pc.indices_nonzero(truths.is_null()).to_pylist() if truths.null_count else []


def _type(table: pa.Table, column: str) -> pa.DataType:
    return table.schema.field(column).type


def _are_filled(prompts: pa.ChunkedArray) -> bool:
    """Return whether all prompts are non-empty texts, or lists of messages with role and text."""
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


def _has_texts(messages: pa.DataType) -> bool:
    message = messages.value_type
    index = message.get_field_index("content") if pa.types.is_struct(message) else -1
    return index >= 0 and pa.types.is_string(message.field(index).type)


def _is_json(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_json(kind.value_type)
    if pa.types.is_nested(kind):
        return not pa.types.is_map(kind) and all(_is_json(kind.field(index).type) for index in range(kind.num_fields))
    return not (pa.types.is_temporal(kind) or pa.types.is_decimal(kind))


class JsonRows:
    """Rows of a file of JSON lines or one JSON list, with the interface of ParquetRows.

    Kept as text, because rows may have different columns.
    """

    def __init__(self, path: Path) -> None:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path} must be a file of JSON lines, but cannot be read: {error}") from None
        self._lines = _split(data.removeprefix(b"\xef\xbb\xbf"), path)
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
            _check(_filled(values), path=path, number=number)

    def __len__(self) -> int:
        return len(self._lines)

    def values(self, number: int) -> Values:
        return _filled(msgspec.json.decode(self._lines[number]))

    def prompts(self) -> list[PromptText]:
        found = (self.values(number) for number in range(len(self)))
        return [values[_first(_PROMPTS, values)] for values in found]

    @property
    def may_have_images(self) -> bool:
        return any(b'"image' in line for line in self._lines)

    def num_bytes(self, start: int, end: int) -> int:
        return sum(map(len, self._lines[start:end]))


def open_rows(path: Path) -> ParquetRows | JsonRows:
    """Read a file: JSON by its suffix (.jsonl, .ndjson, .json), else Parquet.

    Raises ConfigError naming the file and its first problem.
    """
    if not path.is_file():
        raise ConfigError(f"{path} must be a file of prompts, Parquet or JSON lines, but there is no such file.")
    rows: ParquetRows | JsonRows = JsonRows(path) if path.suffix.lower() in _JSON_SUFFIXES else ParquetRows(path)
    if not len(rows):
        raise ConfigError(f"{path} must hold at least one prompt, but is empty.")
    return rows


def _split(data: bytes, path: Path) -> list[bytes]:
    if not data.lstrip().startswith(b"["):
        return [line for line in data.splitlines() if line.strip()]
    try:
        return [bytes(each) for each in msgspec.json.decode(data, type=list[msgspec.Raw])]
    except ValueError as error:
        raise ConfigError(f"{path} must be JSON lines or one JSON list, but is neither: {error}.") from None


def _check(values: Values, *, path: Path, number: int) -> None:
    try:
        check_values(values)
    except ConfigError as error:
        raise ConfigError(f"{path}, row {number}: {error}") from None


def _filled(values: Values) -> Values:
    return {name: value for name, value in values.items() if value is not None}


def _without_nulls(value: Any) -> Any:
    """Drop the null fields of records: Parquet gives all records of a column the same fields, null where a row lacks
    one, and reward functions and chat templates would see them."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
