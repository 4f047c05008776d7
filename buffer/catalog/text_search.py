"""Text search: which trajectories of a dataset hold a text, decoded a million tokens at a time."""

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from slipstream.buffer.catalog.token_decoder import TokenDecoder
from slipstream.buffer.errors import SearchCancelledError

_ROWS_AT_ONCE = 65536
_TOKENS_AT_ONCE = 2**22
_ROWS_TRIED = 16
"""Rows whose text is compared with that of their pieces, before pieces are searched instead of texts."""


def find_text(dataset: ds.Dataset, text: str, decoder: TokenDecoder, *, is_cancelled: Callable[[], bool]) -> np.ndarray:
    """Return for each row whether its decoded tokens hold `text`, bool[N].

    Raises SearchCancelledError soon after `is_cancelled` holds; pa.ArrowException, OSError.
    """
    masks = [np.empty(0, dtype=bool)]
    for tokens in _chunks(dataset):
        if is_cancelled():
            raise SearchCancelledError(f"the search for {text!r} was given up.")
        masks.append(_search(tokens, text, decoder))
    return np.concatenate(masks)


def _chunks(dataset: ds.Dataset) -> Iterator[pa.ListArray]:
    """Yield the token ids of all rows, in order, a bounded number of tokens at a time."""
    for batch in dataset.to_batches(columns=["token_ids"], batch_size=_ROWS_AT_ONCE):
        tokens = batch.column(0)
        # The limit on rows bounds short rows, this one long rows.
        parts = max(1, -(-len(tokens.flatten()) // _TOKENS_AT_ONCE))
        size = max(1, -(-len(tokens) // parts))
        yield from (tokens.slice(start, size) for start in range(0, len(tokens), size))


def _search(tokens: pa.ListArray, text: str, decoder: TokenDecoder) -> np.ndarray:
    tried = (row.values.to_numpy(zero_copy_only=False) for row in tokens.slice(0, _ROWS_TRIED))
    if not all(map(decoder.joins_pieces, tried)):
        return np.array([text in decoder(row.values.to_numpy(zero_copy_only=False)) for row in tokens], dtype=bool)
    pieces = decoder.piece_array
    numbers = np.minimum(tokens.flatten().to_numpy(), len(pieces) - 1)
    offsets = pc.subtract(tokens.offsets, tokens.offsets[0])
    joined = pc.binary_join(pa.ListArray.from_arrays(offsets, pieces.take(pa.array(numbers))), b"")
    return pc.match_substring(joined, text.encode()).to_numpy(zero_copy_only=False)
