"""Forms: the shapes a demonstration has in a Parquet file, each from a row to its demonstration."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from slipstream.configs.base import ConfigError
from slipstream.configs.data import SftConfig
from slipstream.learner.sft.demonstration import Demonstration, Piece, chat_pieces, to_demonstration

Row = dict[str, Any]
"""Column -> value."""


class Form(Protocol):
    """One way to write a demonstration down."""

    @property
    def columns(self) -> list[str]:
        """Those that are read."""
        ...

    def demonstration(self, row: Row) -> Demonstration | None:
        """None where there is nothing to learn. Raises ConfigError."""
        ...


@dataclass(frozen=True, slots=True)
class TokensForm:
    """`token_ids` and `model_mask`, lists of one length: what is learnt is said token by token."""

    @property
    def columns(self) -> list[str]:
        """See Form."""
        return ["token_ids", "model_mask"]

    def demonstration(self, row: Row) -> Demonstration | None:
        """See Form."""
        token_ids, mask = row["token_ids"] or [], row["model_mask"] or []
        if len(token_ids) != len(mask) or None in token_ids or None in mask:
            raise ConfigError(
                f"token_ids and model_mask must be filled lists of one length, got {len(token_ids)} and {len(mask)}."
            )
        return Demonstration(np.array(token_ids, dtype=np.int64), np.array(mask, dtype=np.bool_))


@dataclass(frozen=True, slots=True)
class MessagesForm:
    """`messages`, a list of records with `role` and `content`: every assistant turn is learnt."""

    tokenizer: Any
    """With a chat template."""

    @property
    def columns(self) -> list[str]:
        """See Form."""
        return ["messages"]

    def demonstration(self, row: Row) -> Demonstration | None:
        """See Form."""
        pieces = chat_pieces(row["messages"] or [], tokenizer=self.tokenizer)
        return to_demonstration(pieces, tokenizer=self.tokenizer) if pieces else None


@dataclass(frozen=True, slots=True)
class ResponseForm:
    """A prompt, text as it is or messages through the chat template, and the text that is the right response."""

    tokenizer: Any
    """With an end token."""
    prompt: str
    """Column, or `record.field`."""
    response: str
    """Column, or `record.field`."""

    @property
    def columns(self) -> list[str]:
        """See Form."""
        return [self.prompt, self.response]

    def demonstration(self, row: Row) -> Demonstration | None:
        """See Form."""
        prompt, response = _value(row, self.prompt), _value(row, self.response)
        if prompt is None:
            raise ConfigError(f"`{self.prompt}` must be filled, got nothing.")
        if not response:
            return None
        if isinstance(prompt, str):
            pieces = [Piece(prompt, is_model=False), Piece(response, is_model=True)]
            return to_demonstration(pieces, tokenizer=self.tokenizer, end_token=self.tokenizer.eos_token_id)
        answered = [*prompt, {"role": "assistant", "content": response}]
        # Answers of the assistant within a prompt are part of the question.
        pieces = _join_but_last(chat_pieces(answered, tokenizer=self.tokenizer))
        return to_demonstration(pieces, tokenizer=self.tokenizer) if pieces else None


def find_form(schema: pa.Schema, *, config: SftConfig, load_tokenizer: Callable[[], Any]) -> Form:
    """The first form whose columns are there; token ids need no tokenizer. Raises ConfigError."""
    if {"token_ids", "model_mask"} <= set(schema.names):
        _check_type(schema, "token_ids", _is_list_of(pa.types.is_integer), "lists of integers")
        _check_type(schema, "model_mask", _is_list_of(_is_flag), "lists of booleans")
        return TokensForm()
    if "messages" in schema.names:
        _check_type(schema, "messages", _is_chat, "lists of records with `role` and `content`")
        return MessagesForm(_with_template(load_tokenizer()))
    _check_type(schema, config.prompt, lambda kind: _is_text(kind) or _is_chat(kind), "text or lists of messages")
    _check_type(schema, config.response, _is_text, "text")
    check = _with_template if _is_chat(_type(schema, config.prompt)) else _with_end
    return ResponseForm(check(load_tokenizer()), config.prompt, config.response)


def _join_but_last(pieces: list[Piece]) -> list[Piece]:
    return [Piece("".join(piece.text for piece in pieces[:-1]), is_model=False), *pieces[-1:]] if pieces else []


def _with_template(tokenizer: Any) -> Any:
    if not tokenizer.chat_template:
        raise ConfigError(
            "lists of messages need a tokenizer with a chat template, but model.path has none: give columns of text, "
            "or an instruction-tuned checkpoint."
        )
    return tokenizer


def _with_end(tokenizer: Any) -> Any:
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "responses of text need a tokenizer with an end token, but model.path has none: give the columns token_ids "
            "and model_mask."
        )
    return tokenizer


def _value(row: Row, column: str) -> Any:
    """Of `column`, or of `record.field`."""
    return row[column] if column in row else reduce(lambda at, name: at and at[name], column.split("."), row)


def _type(schema: pa.Schema, column: str) -> pa.DataType | None:
    if column in schema.names:
        return schema.field(column).type
    kind: Any = pa.struct(list(schema))
    for name in column.split("."):
        if not (pa.types.is_struct(kind) and kind.get_field_index(name) >= 0):
            return None
        kind = kind.field(name).type
    return kind


def _check_type(schema: pa.Schema, column: str, holds: Any, wanted: str) -> None:
    kind = _type(schema, column)
    if kind is None:
        raise ConfigError(
            f"the file must have the column `{column}`, got only {', '.join(schema.names)}: name it with sft.prompt or "
            "sft.response, or give `messages`, or `token_ids` with `model_mask`."
        )
    if not holds(kind):
        raise ConfigError(f"the column `{column}` must hold {wanted}, got {kind}.")


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_flag(kind: pa.DataType) -> bool:
    return pa.types.is_boolean(kind) or pa.types.is_integer(kind)


def _is_list_of(holds: Any) -> Any:
    return lambda kind: (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and holds(kind.value_type)


def _is_chat(kind: pa.DataType) -> bool:
    return _is_list_of(lambda item: pa.types.is_struct(item) and {"role", "content"} <= {f.name for f in item})(kind)
