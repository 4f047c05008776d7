"""Pieces: the text of a demonstration, cut where the model takes its turn and where it ends it.

Each piece is tokenised by itself: a generator's prompt ends where the model's turn begins, so no token may span both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from slipstream.configs.base import ConfigError


# @@ Demonstration: a conversation, token by token, and which of its tokens are learnt.
@dataclass(frozen=True, slots=True)
class Demonstration:
    """What a model shall answer.

    Example: Demonstration(token_ids=[4, 8, 2, 9, 2, 8, 4, 1], model_mask=[0, 0, 0, 0, 1, 1, 1, 1])
    """

    token_ids: np.ndarray
    """int32[T], prompt then response."""
    model_mask: np.ndarray
    """bool[T], true where the model shall write the token."""

    @property
    def num_tokens(self) -> int:
        """Prompt + response."""
        return len(self.token_ids)

    @property
    def trained(self) -> np.ndarray:
        """int64[W]: indices of the tokens that are learnt. Nothing predicts token 0, so it never is."""
        return np.flatnonzero(self.model_mask[1:]) + 1


Message = dict[str, Any]
"""`role`, `content`, and what else the chat template knows."""


class Piece(NamedTuple):
    """A run of text. Example: Piece("31284", is_model=True)."""

    text: str
    """As the tokenizer gets it."""
    is_model: bool
    """Whether the model shall write it."""


def chat_pieces(messages: Sequence[Message], *, tokenizer: Any) -> list[Piece]:
    """A conversation up to its last assistant turn: all of these are learnt, what stands between them is only read.

    Empty when an assistant turn says nothing, or when there is none. Raises ConfigError.
    """
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    turns = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    if any(not _says_something(messages[index]) for index in turns):
        return []
    pieces: list[Piece] = []
    rendered = ""
    for index in turns:
        for end, is_model in ((index, False), (index + 1, True)):
            longer = _render(messages[:end], tokenizer=tokenizer, opens_turn=not is_model)
            pieces.append(Piece(_rest(longer, rendered), is_model))
            rendered = longer
    return pieces


def to_demonstration(pieces: Sequence[Piece], *, tokenizer: Any, end_token: int | None = None) -> Demonstration:
    """Token ids of the pieces, with `end_token` after each that the model shall write.

    What a chat template puts behind the tokenizer's end token within such a piece is not learnt: generation ends there.
    """
    encoded = tokenizer([piece.text for piece in pieces], add_special_tokens=False)["input_ids"]
    token_ids: list[int] = []
    mask: list[bool] = []
    for piece, ids in zip(pieces, encoded, strict=True):
        own = [*ids, end_token] if piece.is_model and end_token is not None else ids
        num_written = _num_written(own, tokenizer.eos_token_id) if piece.is_model else 0
        token_ids += own
        mask += [True] * num_written + [False] * (len(own) - num_written)
    return Demonstration(np.array(token_ids, dtype=np.int32), np.array(mask, dtype=np.bool_))


def _num_written(token_ids: Sequence[int], end_token: int | None) -> int:
    """Up to and with the last end token; all where there is none."""
    ends = [index for index, token_id in enumerate(token_ids, start=1) if token_id == end_token]
    return ends[-1] if ends else len(token_ids)


def _says_something(message: Message) -> bool:
    return any(value for key, value in message.items() if key != "role")


def _render(messages: Sequence[Message], *, tokenizer: Any, opens_turn: bool) -> str:
    try:
        return tokenizer.apply_chat_template(list(messages), add_generation_prompt=opens_turn, tokenize=False)
    # A template is a program that came with the model: it may raise anything.
    except Exception as error:
        raise ConfigError(f"the messages must fit the chat template: {error}") from error


def _rest(longer: str, rendered: str) -> str:
    if not longer.startswith(rendered):
        raise ConfigError(
            "the chat template must write the beginning of a conversation the same whatever follows, but rewrites it: "
            "tokenise it yourself and give the columns token_ids and model_mask."
        )
    return longer[len(rendered) :]
