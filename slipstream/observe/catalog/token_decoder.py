"""TokenDecoder: decodes and searches token ids."""

import codecs
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from tokenizers import Tokenizer, decoders, pre_tokenizers

from slipstream.buffer.errors import SearchCancelledError
from slipstream.buffer.trajectory import Trajectory
from slipstream.configs.base import ConfigError
from slipstream.runtime.command_line import printable

TOKENIZER = "tokenizer.json"
_FIRST_SHIFTED = 256
"""Byte-level tokenizers map non-printable bytes to characters from here on."""
_ROWS_AT_ONCE = 65536
_TOKENS_AT_ONCE = 2**22
EXCERPT = 48
"""Characters of a prompt or an answer in a list."""
_EXCERPT_TOKENS = 2 * EXCERPT
_ROWS_TRIED = 16
"""Rows that must equal their joined pieces to search pieces instead of texts."""


class TokenDecoder:
    """The decoding half of a tokenizer."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file is not a tokenizer."""
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        # The library raises a bare Exception.
        except Exception as error:
            raise ConfigError(
                f"{path} must be a tokenizer of the `tokenizers` library, but cannot be read: {error}"
            ) from None

    def __call__(self, tokens: np.ndarray) -> str:
        return self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False)

    def plain(self, tokens: np.ndarray) -> str:
        """Decode without special tokens."""
        return self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True)

    def excerpts(self, trajectory: Trajectory) -> tuple[str, str]:
        """End of the prompt (chat templates begin alike) and beginning of the answer, each as one line."""
        token_ids, start = trajectory.token_ids, int(np.argmax(trajectory.model_mask))
        parts = token_ids[max(0, start - _EXCERPT_TOKENS) : start], token_ids[start : start + _EXCERPT_TOKENS]
        prompt, answer = (" ".join(self.plain(part).split()) for part in parts)
        return (
            prompt if len(prompt) <= EXCERPT else f"…{prompt[1 - EXCERPT :].strip()}",
            answer if len(answer) <= EXCERPT else f"{answer[: EXCERPT - 1].strip()}…",
        )

    def describe(self, trajectory: Trajectory) -> str:
        """Describe an answer in one line: `reward 0.500  What is 2 + 1? -> It is 3.`"""
        prompt, answer = self.excerpts(trajectory)
        reward = trajectory.reward
        shown = f"{reward.total:.3f}" if reward.status == "ok" else reward.status
        return printable(f"reward {shown}  {prompt} -> {answer}")

    @cached_property
    def pieces(self) -> list[bytes]:
        """Bytes of each token; empty for unused ids and in the last entry."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        pieces = [b""] * (max(vocabulary.values(), default=-1) + 2)
        added = self._tokenizer.get_added_tokens_decoder()
        is_byte_level = isinstance(self._tokenizer.decoder, decoders.ByteLevel)
        # Byte-level vocabularies spell each byte as a character: printable ones as themselves, the rest shifted.
        alphabet = set(pre_tokenizers.ByteLevel.alphabet())
        plain = [byte for byte in range(256) if chr(byte) in alphabet]
        byte_of = {chr(byte): byte for byte in plain}
        byte_of |= {chr(_FIRST_SHIFTED + index): byte for index, byte in enumerate(sorted({*range(256)} - {*plain}))}
        for token, number in vocabulary.items():
            if number in added:
                pieces[number] = added[number].content.encode()
            elif is_byte_level and all(character in byte_of for character in token):
                pieces[number] = bytes(byte_of[character] for character in token)
            else:
                pieces[number] = self._tokenizer.decode([number], skip_special_tokens=False).encode()
        return pieces

    @cached_property
    def piece_array(self) -> pa.BinaryArray:
        return pa.array(self.pieces, pa.binary())

    def texts(self, tokens: np.ndarray) -> list[str]:
        """Return each token's text. A character of several tokens belongs to the last."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        nothing = len(self.pieces) - 1
        return [decoder.decode(self.pieces[min(token, nothing)]) for token in tokens.tolist()]

    def joins_pieces(self, tokens: np.ndarray) -> bool:
        """Return whether the text equals the joined pieces, as with byte-level tokenizers."""
        nothing = len(self.pieces) - 1
        joined = b"".join(self.pieces[min(token, nothing)] for token in tokens.tolist())
        return joined.decode(errors="replace") == self(tokens)


def extremes(found: Iterable[Trajectory]) -> list[Trajectory]:
    """Return the answers with the highest and lowest reward."""
    ranked = sorted(found, key=lambda each: -each.reward.total)
    return [ranked[0], ranked[-1]] if len(ranked) > 1 else ranked


def find_decoder(given: Path | None, *, candidates: list[Path]) -> TokenDecoder | None:
    """Return the tokenizer `given` as folder or file, or else the first of `candidates`.

    Raises ConfigError.
    """
    if given is None:
        paths = [folder / TOKENIZER for folder in candidates]
        return next((TokenDecoder(path) for path in paths if path.is_file()), None)
    path = given / TOKENIZER if given.is_dir() else given
    if not path.is_file():
        raise ConfigError(f"--tokenizer must be a {TOKENIZER} or a folder with one, got {given}.")
    return TokenDecoder(path)


def find_text(dataset: ds.Dataset, text: str, decoder: TokenDecoder, *, is_cancelled: Callable[[], bool]) -> np.ndarray:
    """Return whether the decoded tokens of each row contain `text`, bool[N].

    Raises SearchCancelledError, pa.ArrowException, OSError.
    """
    masks = [np.empty(0, dtype=bool)]
    for batch in dataset.to_batches(columns=["token_ids"], batch_size=_ROWS_AT_ONCE):
        tokens = batch.column(0)
        # `batch_size` bounds batches of short rows; split long rows further.
        parts = max(1, -(-len(tokens.flatten()) // _TOKENS_AT_ONCE))
        size = max(1, -(-len(tokens) // parts))
        for start in range(0, len(tokens), size):
            if is_cancelled():
                raise SearchCancelledError(f"the search for {text!r} was given up.")
            masks.append(_search(tokens.slice(start, size), text, decoder))
    return np.concatenate(masks)


def _search(tokens: pa.ListArray, text: str, decoder: TokenDecoder) -> np.ndarray:
    tried = (row.values.to_numpy(zero_copy_only=False) for row in tokens.slice(0, _ROWS_TRIED))
    if not all(map(decoder.joins_pieces, tried)):
        return np.array([text in decoder(row.values.to_numpy(zero_copy_only=False)) for row in tokens], dtype=bool)
    pieces = decoder.piece_array
    numbers = np.minimum(tokens.flatten().to_numpy(), len(pieces) - 1)
    offsets = pc.subtract(tokens.offsets, tokens.offsets[0])
    joined = pc.binary_join(pa.ListArray.from_arrays(offsets, pieces.take(pa.array(numbers))), b"")
    return pc.match_substring(joined, text.encode()).to_numpy(zero_copy_only=False)
