"""Demonstration: a conversation as token ids, with a mask of those that the model learns to write."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from slipstream.configs.base import ConfigError

Message = dict[str, Any]
"""`role`, `content`, and whatever else the chat template reads."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """Example: Demonstration(token_ids=[4, 8, 2, 9, 2, 8, 4, 1], model_mask=[0, 0, 0, 0, 1, 1, 1, 1])."""

    token_ids: np.ndarray
    """int32[T], prompt then response."""
    model_mask: np.ndarray
    """bool[T], true where the model learns to write the token."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def trained(self) -> np.ndarray:
        """Indices of the trained tokens, int64[N]; never token 0, which nothing predicts."""
        return np.flatnonzero(self.model_mask[1:]) + 1


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt, each with the prompt; a reward model learns to score the chosen one higher.

    Example: Pair(chosen=[4, 8, 2, 9, 2, 8, 4, 1], rejected=[4, 8, 2, 9, 2, 2, 4, 1]); int32[T]
    """

    chosen: np.ndarray
    rejected: np.ndarray

    @property
    def num_tokens(self) -> int:
        """Tokens of the longer one."""
        return max(len(self.chosen), len(self.rejected))

    @property
    def token_ids(self) -> np.ndarray:
        """Tokens of both."""
        return np.concatenate([self.chosen, self.rejected])

    @property
    def trained(self) -> np.ndarray:
        """Index of the last token of each, which is scored."""
        return np.array([len(self.chosen) - 1, len(self.rejected) - 1])


class Piece(NamedTuple):
    """Text that is tokenised by itself. Example: Piece("31284", is_model=True)."""

    text: str
    is_model: bool
    """Whether the model learns to write it."""


def chat_pieces(messages: Sequence[Message], *, tokenizer: Any) -> list[Piece]:
    """Cut a conversation where the model's turns begin and end, up to the last of them.

    Empty when an assistant turn is empty, or when there is none. Raises ConfigError.
    """
    # Parquet fills absent fields with null, but templates test whether a field is defined.
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    turns = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    if not all(any(value for key, value in messages[index].items() if key != "role") for index in turns):
        return []
    pieces: list[Piece] = []
    rendered = ""
    for index in turns:
        for end, is_model in ((index, False), (index + 1, True)):
            longer = _render(messages[:end], tokenizer=tokenizer, opens_turn=not is_model)
            if not longer.startswith(rendered):
                raise ConfigError(
                    "the chat template must render the beginning of a conversation the same whatever follows, but "
                    "rewrites it: tokenise the conversation yourself and give the columns token_ids and model_mask."
                )
            pieces.append(Piece(longer[len(rendered) :], is_model))
            rendered = longer
    return pieces


def tokenize(pieces: Sequence[Piece], *, tokenizer: Any, end_token: int | None = None) -> Demonstration:
    """Concatenate the token ids of the pieces, with `end_token` appended to each of the model's."""
    # Piece by piece: a generator's prompt ends where the model's turn begins, so no token may span both.
    encoded = tokenizer([piece.text for piece in pieces], add_special_tokens=False)["input_ids"]
    token_ids: list[int] = []
    mask: list[bool] = []
    for piece, ids in zip(pieces, encoded, strict=True):
        own = [*ids, end_token] if piece.is_model and end_token is not None else ids
        # Generation ends with the end token: what a template writes behind it is not trained.
        ends = [count for count, token_id in enumerate(own, start=1) if token_id == tokenizer.eos_token_id]
        num_trained = (ends[-1] if ends else len(own)) if piece.is_model else 0
        token_ids += own
        mask += [True] * num_trained + [False] * (len(own) - num_trained)
    return Demonstration(np.array(token_ids, dtype=np.int32), np.array(mask, dtype=np.bool_))


def _render(messages: Sequence[Message], *, tokenizer: Any, opens_turn: bool) -> str:
    try:
        return tokenizer.apply_chat_template(list(messages), add_generation_prompt=opens_turn, tokenize=False)
    # A template is a program that came with the model: it may raise anything.
    except Exception as error:
        raise ConfigError(f"the messages must fit the chat template: {error}") from error
