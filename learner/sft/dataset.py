"""Demonstrations: conversations as token ids, with a mask of those to learn."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from slipstream.configs.base import ConfigError
from slipstream.configs.data import ModelConfig, require_template_variables
from slipstream.configs.run import RunConfig
from slipstream.learner.sft.conversation import Piece, chat_pieces
from slipstream.runtime import row_files
from slipstream.runtime.model_files import answer_token_ids, check_template_variables, end_token_ids, read_chat_template

_ROWS_AT_ONCE = 1024

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Demonstration:
    """Example: Demonstration(token_ids=[4, 8, 2, 9, 2, 8, 4, 1], model_mask=[0, 0, 0, 0, 1, 1, 1, 1])."""

    token_ids: np.ndarray
    """int[T], the whole conversation."""
    model_mask: np.ndarray
    """bool[T], tokens that the model learns to write."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def trained(self) -> np.ndarray:
        """int64[N]. Never 0, which nothing predicts."""
        return np.flatnonzero(self.model_mask[1:]) + 1


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers with their prompt. A reward model learns to score the chosen one higher.

    Example: Pair(chosen=[4, 8, 2, 9, 2, 8, 4, 1], rejected=[4, 8, 2, 9, 2, 2, 4, 1]); int32[T]
    """

    chosen: np.ndarray
    rejected: np.ndarray

    @property
    def num_tokens(self) -> int:
        """Tokens of the longer answer."""
        return max(len(self.chosen), len(self.rejected))

    @property
    def token_ids(self) -> np.ndarray:
        return np.concatenate([self.chosen, self.rejected])

    @property
    def trained(self) -> np.ndarray:
        """Index of each answer's last token, which is scored."""
        return np.array([len(self.chosen) - 1, len(self.rejected) - 1])


def tokenize(pieces: Sequence[Piece], *, tokenizer: Any, end_ids: Collection[int]) -> Demonstration:
    """Tokenize and concatenate. `end_ids`: end tokens of the model; the last turn always has one."""
    # A generator's prompt ends where the model's turn begins.
    encoded = tokenizer([piece.text for piece in pieces], add_special_tokens=False)["input_ids"]
    token_ids: list[int] = []
    mask: list[bool] = []
    is_open = False
    for number, (piece, ids) in enumerate(zip(pieces, encoded, strict=True), start=1):
        if piece.is_model and number == len(pieces) and tokenizer.eos_token_id is not None and not {*ids} & {*end_ids}:
            ids = [*ids, tokenizer.eos_token_id]
        # Generation stops at an end token, before any text of the template.
        end = next((count for count, token_id in enumerate(ids, start=1) if token_id in end_ids), None)
        # Some headers end the turn before them, such as GLM's <|user|>.
        num_trained = (end or len(ids)) if piece.is_model else int(is_open and end == 1)
        is_open = piece.is_model and end is None
        token_ids += ids
        mask += [True] * num_trained + [False] * (len(ids) - num_trained)
    return Demonstration(np.array(token_ids, dtype=np.int32), np.array(mask, dtype=np.bool_))


@dataclass(slots=True)
class SftFile:
    """Content of a file, identical on every rank."""

    demonstrations: list[Any] = field(default_factory=list)
    num_empty: int = 0
    """Skipped rows with nothing to learn."""
    num_too_long: int = 0
    """Skipped rows above `model.max_length`."""


def read_train(run: RunConfig) -> SftFile:
    """Read the training file, or its first `data.max_rows`. Raises ConfigError, also without a usable row."""
    return _read(Path(run.sft.train_path), run=run, max_rows=run.data.max_rows)


def read_heldout(run: RunConfig) -> SftFile:
    """Read the held-out file. Empty without `sft.eval_path`. Raises ConfigError."""
    path = run.sft.eval_path
    return _read(Path(path), run=run, max_rows=run.sft.eval_rows) if path else SftFile()


def _read(path: Path, *, run: RunConfig, max_rows: int | None) -> SftFile:
    vocab_size = _load(AutoConfig, run.model).get_text_config().vocab_size
    rows, form = _open(path, run=run)
    file = SftFile()
    for number, row in enumerate(islice(rows, max_rows)):
        try:
            _add(form.read(row), file=file, run=run, vocab_size=vocab_size)
        except ConfigError as error:
            raise ConfigError(f"{path}, row {number}: {error}") from None
    if not file.demonstrations:
        raise ConfigError(
            f"{path} must hold at least one demonstration, got none: {file.num_empty} rows with nothing to learn and "
            f"{file.num_too_long} longer than model.max_length ({run.model.max_length}) were left out."
        )
    return file


def _add(demonstration: Demonstration | Pair | None, *, file: SftFile, run: RunConfig, vocab_size: int) -> None:
    max_length, is_strict = run.model.max_length, run.data.on_too_long == "error"
    skip = "drop the row, or leave such rows out with data.on_too_long=skip."
    if demonstration is None or not len(demonstration.trained):
        if is_strict:
            raise ConfigError(f"the response must not be empty: there is nothing to learn; {skip}")
        file.num_empty += 1
        return
    if demonstration.num_tokens > max_length:
        if is_strict:
            length = demonstration.num_tokens
            raise ConfigError(f"it must hold at most model.max_length ({max_length}) tokens, got {length}; {skip}")
        file.num_too_long += 1
        return
    smallest, largest = demonstration.token_ids.min(), demonstration.token_ids.max()
    if smallest < 0 or largest >= vocab_size:
        raise ConfigError(
            f"token ids must lie between 0 and {vocab_size - 1}, the model's vocabulary, got {smallest} to {largest}: "
            "the file must be made for the model that model.path names."
        )
    file.demonstrations.append(demonstration)


def _open(path: Path, *, run: RunConfig) -> tuple[Iterator[Row], "_Form"]:
    row_files.require_demonstrations(path)
    try:
        if is_parquet := not row_files.is_json(path) and row_files.extension(path) != ".csv":
            file = pq.ParquetFile(path)
        else:
            table = _read_json(path) if row_files.is_json(path) else row_files.read_table(path)
        form = _find_form(file.schema_arrow if is_parquet else table.schema, run=run)
    except (pa.ArrowException, OSError) as error:
        must = f"{path} must be a file of demonstrations, {row_files.KINDS}"
        raise ConfigError(f"{must}, but cannot be read: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}".replace(f"{path}: {path}", str(path))) from None
    if is_parquet:
        return _rows(file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=form.columns), path), form
    names = list(dict.fromkeys(each.split(".")[0] for each in form.columns))
    return _rows(table.select(names).to_batches(max_chunksize=_ROWS_AT_ONCE), path), form


def _read_json(path: Path) -> pa.Table:
    """Read JSON lines. Unlike in prompts, columns must have one type. Raises ConfigError."""
    rows: list[Row] = []
    for number, line in enumerate(row_files.read_lines(path)):
        try:
            rows.append(msgspec.json.decode(line, type=Row))
        except msgspec.MsgspecError as error:
            raise ConfigError(f"row {number} must be a JSON record, got {line[:60]!r}: {error}.") from None
    arrays = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        try:
            arrays[name] = pa.array([row.get(name) for row in rows])
        except (pa.ArrowException, OverflowError) as error:
            raise ConfigError(
                f"the column `{name}` must hold values of one type, got a mixture ({str(error).splitlines()[0]}): "
                "write records that differ as JSON text, or leave the column out."
            ) from None
    return pa.table(arrays)


def _rows(batches: Iterable[pa.RecordBatch], path: Path) -> Iterator[Row]:
    number = 0
    try:
        for batch in batches:
            yield from batch.to_pylist()
            number += len(batch)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(
            f"{path} must be a Parquet file of demonstrations, but cannot be read from row {number} on: {error}"
        ) from None


class _Form(NamedTuple):
    columns: list[str]
    read: Callable[[Row], Demonstration | Pair | None]
    """Returns None if there is nothing to learn. Raises ConfigError."""


def _find_form(schema: pa.Schema, *, run: RunConfig) -> _Form:
    columns = {"prompt": "prompt", "response": "response"} | run.data.columns
    prompt = _column(schema, columns["prompt"], common=row_files.PROMPTS)
    response = _column(schema, columns["response"], common=row_files.RESPONSES)
    if run.sft.objective == "pairs":
        # A common name may be a copy of the conversations' first message.
        return _find_pairs(schema, columns["prompt"], run=run)
    # Columns of archives and exported trajectories.
    if {"token_ids", "model_mask"} <= set(schema.names):
        _check_type(schema, "token_ids", _is_list_of(pa.types.is_integer), "lists of integers")
        is_flags = _is_list_of(lambda kind: pa.types.is_boolean(kind) or pa.types.is_integer(kind))
        _check_type(schema, "model_mask", is_flags, "lists of booleans")
        return _Form(["token_ids", "model_mask"], _from_tokens)
    variables = run.model.chat_template_kwargs
    rendering = [name for name in ("tools", "chat_template_kwargs") if name in schema.names]
    if chat := next((name for name in row_files.CHATS if name in schema.names), ""):
        _check_type(schema, chat, _is_chat, "lists of records with `role` and `content`")
        read = partial(_from_messages, coding=_coding(run, is_chat=True), variables=variables, column=chat)
        return _Form([chat, *rendering], read)
    _check_type(schema, prompt, lambda kind: _is_text(kind) or _is_chat(kind), "text or lists of messages")
    _check_type(schema, response, _is_text, "text")
    coding = _coding(run, is_chat=_is_chat(_type(schema, prompt)))
    read = partial(_from_response, coding=coding, variables=variables, prompt=prompt, response=response)
    given = ["input"] if prompt == "instruction" and "input" in schema.names else []
    return _Form([prompt, response, *given, *rendering], read)


def _column(schema: pa.Schema, name: str, *, common: Sequence[str]) -> str:
    """Column, or a common equivalent of a missing default."""
    if name != common[0] or name in schema.names:
        return name
    return next((each for each in common if each in schema.names and each not in row_files.CHATS), name)


def _find_pairs(schema: pa.Schema, prompt: str, *, run: RunConfig) -> _Form:
    if run.model.chat_template_kwargs:
        raise ConfigError("model.chat_template_kwargs must be empty for pairs, which reward models read without them.")
    has_prompt = _type(schema, prompt) is not None
    columns = [*([prompt] if has_prompt else []), "chosen", "rejected"]
    for column in columns:
        must = "text or lists of messages with `role` and `content`"
        _check_type(schema, column, lambda kind: _is_text(kind) or _is_chat(kind, forms=[_ROLES]), must)
    is_chat = not has_prompt or any(_is_chat(_type(schema, column)) for column in columns)
    read = partial(_from_pair, tokenizer=_load_tokenizer(run, is_chat=is_chat), prompt=prompt if has_prompt else "")
    return _Form([column.split(".")[0] for column in columns], read)


def _from_pair(row: Row, *, tokenizer: Any, prompt: str) -> Pair | None:
    question = (row_files.value_at(row, prompt) or "") if prompt else []
    if not row["chosen"] or not row["rejected"]:
        return None
    sides = [answer_token_ids(tokenizer, question, row[side]) for side in ("chosen", "rejected")]
    return Pair(*(np.array(side, dtype=np.int32) for side in sides))


def _from_tokens(row: Row) -> Demonstration:
    token_ids, mask = row["token_ids"] or [], row["model_mask"] or []
    if len(token_ids) != len(mask) or None in token_ids or None in mask:
        got = f"{len(token_ids)} and {len(mask)}"
        raise ConfigError(f"token_ids and model_mask must be filled lists of one length, got {got}.")
    return Demonstration(np.array(token_ids, dtype=np.int64), np.array(mask, dtype=np.bool_))


def _rendering(row: Row, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Row's tools, as schemas or JSON text, and variables of the template. Raises ConfigError."""
    found = {}
    for name, kind, what in (("tools", list, "a list of schemas"), ("chat_template_kwargs", dict, "a record")):
        value = row.get(name)
        try:
            is_text = isinstance(value, str)
            found[name] = msgspec.json.decode(value or "null") if is_text else row_files.without_nulls(value)
            msgspec.convert(found[name], kind | None)
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"`{name}` must hold {what}, or its JSON text, got {str(value)[:60]!r}: {error}."
            ) from None
    own = found["chat_template_kwargs"] or {}
    require_template_variables(own, setting="chat_template_kwargs")
    return {"tools": found["tools"] or None, "variables": {**variables, **own}}


def _from_messages(row: Row, *, coding: Row, variables: Mapping[str, Any], column: str) -> Demonstration | None:
    pieces = chat_pieces(row_files.chat_messages(row[column]) or [], **coding, **_rendering(row, variables))
    return tokenize(pieces, **coding) if pieces else None


def _from_response(
    row: Row, *, coding: Row, variables: Mapping[str, Any], prompt: str, response: str
) -> Demonstration | None:
    question, answer = row_files.chat_messages(row_files.value_at(row, prompt)), row_files.value_at(row, response)
    if prompt == "instruction":
        question = row_files.with_input(question, row)
    if question is None:
        raise ConfigError(f"`{prompt}` must be filled, got nothing.")
    if not answer:
        return None
    if isinstance(question, str):
        return tokenize([Piece(question, is_model=False), Piece(answer, is_model=True)], **coding)
    pieces = chat_pieces([*question, {"role": "assistant", "content": answer}], **coding, **_rendering(row, variables))
    if not pieces:
        return None
    # Assistant turns in the prompt are context.
    context = Piece("".join(piece.text for piece in pieces[:-1]), is_model=False)
    return tokenize([context, pieces[-1]], **coding)


def _load_tokenizer(run: RunConfig, *, is_chat: bool) -> Any:
    tokenizer = _load(AutoTokenizer, run.model)
    if template := read_chat_template(run.model):
        tokenizer.chat_template = template
    check_template_variables(tokenizer, run.model)
    if is_chat and not tokenizer.chat_template:
        raise ConfigError(
            "lists of messages need a chat template, but the tokenizer of model.path has none: name one with "
            "model.chat_template, give columns of text, or an instruction-tuned checkpoint."
        )
    if not is_chat and tokenizer.eos_token_id is None:
        raise ConfigError(
            "text responses need a tokenizer with an end token, but model.path has none: provide the columns token_ids "
            "and model_mask."
        )
    return tokenizer


def _coding(run: RunConfig, *, is_chat: bool) -> Row:
    """Tokenizer and end tokens."""
    tokenizer = _load_tokenizer(run, is_chat=is_chat)
    try:
        generation = GenerationConfig.from_pretrained(run.model.path)
    except OSError:
        generation = GenerationConfig.from_model_config(_load(AutoConfig, run.model))
    return {"tokenizer": tokenizer, "end_ids": end_token_ids(tokenizer, generation)}


def _load(kind: Any, model: ModelConfig) -> Any:
    try:
        return kind.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        must = f"model.path must hold a readable model and tokenizer, got {model.path!r}"
        raise ConfigError(f"{must}: {first_line}") from error


def _type(schema: pa.Schema, column: str) -> pa.DataType | None:
    if column in schema.names:
        return schema.field(column).type
    kind: Any = pa.struct(list(schema))
    for name in column.split("."):
        if not (pa.types.is_struct(kind) and kind.get_field_index(name) >= 0):
            return None
        kind = kind.field(name).type
    return kind


def _check_type(schema: pa.Schema, column: str, holds: Any, expected: str) -> None:
    kind = _type(schema, column)
    if kind is None:
        raise ConfigError(
            f"the file must have the column `{column}`, got only {', '.join(schema.names)}: name it with data.columns, "
            "or give `messages`, or `token_ids` with `model_mask`."
        )
    if not holds(kind):
        raise ConfigError(f"the column `{column}` must hold {expected}, got {kind}.")


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_list_of(holds: Any) -> Any:
    return lambda kind: (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and holds(kind.value_type)


_ROLES = {"role", "content"}


def _is_chat(kind: pa.DataType, *, forms: Sequence[set[str]] = (_ROLES, {"from", "value"})) -> bool:
    return _is_list_of(lambda item: pa.types.is_struct(item) and any(f <= {x.name for x in item} for f in forms))(kind)
