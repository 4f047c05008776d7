"""Dataset: the prompts of a Parquet file, validated and measured when it is opened.

The schema is verl's: columns `data_source`, `prompt` (plain text or chat messages), `reward_model.ground_truth` and,
optionally, `extra_info`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import structlog
from tokenizers import Tokenizer

from slipstream.buffer.codec import encode
from slipstream.buffer.trajectory import Record
from slipstream.configs.base import ConfigError
from slipstream.configs.run import RunConfig
from slipstream.runtime.model_files import find_file, read_json

_MOST_OVERHEAD = 8
"""A record's bytes in a message are fewer than so many times those of its row in Arrow."""

log = structlog.get_logger(__name__)


PromptText = str | list[dict[str, Any]]
"""Plain text, or chat messages with `role` and `content`."""


class Row(Record):
    """One prompt.

    Example: Row(uid="train/00017", prompt="48213=", ground_truth="31284", data_source="digits/reverse",
        extra_info={"index": 17, "split": "train"})
    """

    uid: str
    """File name and row number: stable over runs, unique within one."""
    prompt: PromptText
    ground_truth: Any
    """Reference answer for the reward function, any JSON value."""
    data_source: str
    extra_info: dict[str, Any] = {}
    """Record of the row that agent and reward function get as it is."""
    agent_name: str = ""
    """Agent loop of this row; empty: that of `generators.agent`."""


class Dataset:
    """The rows of one file, held in memory as Arrow columns. Loads without torch."""

    def __init__(self, path: str | Path) -> None:
        """Open and validate the file. Raises ConfigError, naming the file and its first problem."""
        self._path = Path(path)
        self._table = _read(self._path)
        _check_columns(self._table.schema, self._path)
        _check_filled(self._table, self._path)
        self._rows: Sequence[int] = range(self._table.num_rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return (self.row(index) for index in range(len(self)))

    def row(self, index: int) -> Row:
        """Return row `index`, from 0 to len - 1, of those that are kept. Raises IndexError otherwise."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self._path} has rows 0 to {len(self) - 1}, got {index}")
        return self._row(self._rows[index])

    def _row(self, number: int) -> Row:
        values = self._table.slice(number, 1).to_pylist()[0]
        return Row(
            uid=f"{self._path.stem}/{number:05d}",
            prompt=values["prompt"],
            ground_truth=values["reward_model"]["ground_truth"],
            data_source=values["data_source"],
            extra_info=values.get("extra_info") or {},
        )

    def keep_short(self, num_tokens: Callable[[list[PromptText]], list[int]], *, most: int, drops: bool) -> None:
        """Refuse prompts of more than `most` tokens, or leave them out and log how many. Raises ConfigError."""
        prompts = self._table.column("prompt").to_pylist()
        # No token is shorter than a character, and a tokenizer may put one blank in front.
        open_rows = [row for row in self._rows if not _is_short(prompts[row], most)]
        lengths = dict(zip(open_rows, num_tokens([prompts[row] for row in open_rows]), strict=True))
        longer = {row: length for row, length in lengths.items() if length > most}
        if not longer:
            return
        row, length = max(longer.items(), key=lambda item: item[1])
        found = f"{len(longer)} of {len(self)} are longer, up to {length} tokens in row {row}"
        if not drops or len(longer) == len(self):
            raise ConfigError(
                f"the prompts of {self._path} must hold at most data.max_prompt_tokens ({most}) tokens, but {found}: "
                "raise the limit, or leave such rows out with data.too_long=drop."
            )
        self._rows = [row for row in self._rows if row not in longer]
        log.warning("prompts_left_out", file=str(self._path), reason=f"over data.max_prompt_tokens ({most}): {found}")

    def check_row_sizes(self, *, max_message_bytes: int) -> None:
        """Refuse a row that would fill more than half of a message, which holds its lease, too. Raises ConfigError."""
        if (row := self._find_large(0, self._table.num_rows, most=max_message_bytes // 2)) is not None:
            raise ConfigError(
                f"a row of {self._path} must take at most half of broker.max_message_bytes ({max_message_bytes}), got "
                f"{row.size} bytes in row {row.number}: raise broker.max_message_bytes, here and where generators are "
                "started by hand, or shorten the row."
            )

    def _find_large(self, start: int, end: int, *, most: int) -> "_LargeRow | None":
        """First row in this range whose message is too large."""
        # Arrow's own bytes of a row leave out the names of its fields, and are known without reading any.
        if start == end or self._table.slice(start, end - start).nbytes <= most // _MOST_OVERHEAD:
            return None
        if end - start == 1:
            size = len(encode(self._row(start)))
            return _LargeRow(start, size) if size > most and start in self._rows else None
        middle = (start + end) // 2
        return self._find_large(start, middle, most=most) or self._find_large(middle, end, most=most)


class _LargeRow(NamedTuple):
    number: int
    size: int
    """Bytes of its record in a message."""


def open_datasets(run: RunConfig) -> tuple[Dataset, Dataset]:
    """Open the prompts to train on and those held out, without prompts over `data.max_prompt_tokens`.

    Logs what is left out, and a held-out file with fewer rows than the settings ask for. Raises ConfigError.
    """
    train, heldout = Dataset(run.data.train_path), Dataset(run.data.heldout_path)
    for dataset in (train, heldout):
        dataset.keep_short(
            lambda prompts: _count_tokens(prompts, run.model.path),
            most=run.data.max_prompt_tokens,
            drops=run.data.too_long == "drop",
        )
        dataset.check_row_sizes(max_message_bytes=run.broker.max_message_bytes)
    if shortage := describe_shortage(run, num_heldout=len(heldout)):
        log.warning("few_heldout_prompts", reason=shortage)
    return train, heldout


def describe_shortage(run: RunConfig, *, num_heldout: int) -> str:
    """Say how evaluations share too few held-out prompts; empty if there are enough."""
    wanted = run.evaluation.monitor_prompts + run.evaluation.final_prompts
    if num_heldout >= wanted:
        return ""
    monitored, final = run.evaluation.rows(num_heldout)
    return (
        f"{run.data.heldout_path} holds {num_heldout} prompts, evaluation.monitor_prompts + evaluation.final_prompts "
        f"ask for {wanted}: {len(monitored)} are evaluated during training, {len(final)} before and after it"
    )


# --- lengths ---------------------------------------------------------------------------------------------------------
# With the tokenizer's own file, and without transformers' classes, which would bring torch into the broker.
_BATCH = 1024


def _is_short(prompt: PromptText, most: int) -> bool:
    return isinstance(prompt, str) and prompt.isascii() and len(prompt) < most


def _count_tokens(prompts: list[PromptText], path: str) -> list[int]:
    """Count the tokens of each prompt as generators encode it; 0 where that cannot be known here."""
    if not prompts:
        return []
    if (file := find_file(path, "tokenizer.json")) is None:
        log.warning("prompt_lengths_unknown", reason=f"{path} has no tokenizer.json on this machine")
        return [0] * len(prompts)
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    render = _chat_renderer(path) if any(not isinstance(prompt, str) for prompt in prompts) else str
    texts = [prompt if isinstance(prompt, str) else render(prompt) for prompt in prompts]
    # In batches, because an encoding takes far more memory than its text.
    batches = (texts[start : start + _BATCH] for start in range(0, len(texts), _BATCH))
    return [len(found) for batch in batches for found in tokenizer.encode_batch_fast(batch, add_special_tokens=False)]


def _chat_renderer(path: str) -> Callable[[Any], str]:
    """Function from chat messages to text by the model's template; to no text where generators will report an error."""
    # Imported for this alone: it takes a second, and most of the time no prompt needs it.
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    settings = read_json(path, "tokenizer_config.json")
    template = (
        file.read_text("utf-8") if (file := find_file(path, "chat_template.jinja")) else _named_template(settings)
    )
    tokens = {key: _content(value) for key, value in settings.items() if key.endswith("_token")}

    def render(messages: Any) -> str:
        try:
            texts, _ = render_jinja_template([messages], chat_template=template, add_generation_prompt=True, **tokens)
        except (TemplateError, TypeError, ValueError):
            return ""
        return str(texts[0])

    return render if template else lambda _: ""


def _named_template(settings: Mapping[str, Any]) -> str:
    """Template of older checkpoints: a text, or a list of texts by name."""
    template = settings.get("chat_template") or ""
    if isinstance(template, list):
        template = next((each.get("template") for each in template if each.get("name") == "default"), "")
    return str(template)


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


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
