"""Pieces: frames above a size that a server takes from a stranger travel as several."""

from itertools import accumulate, chain, pairwise
from typing import Annotated

import msgspec

from slipstream.broker.messages import Frames

PIECE_BYTES = 64 * 1024
"""Largest frame towards a server, and so the memory that a connection can fill before it has authenticated itself."""


def in_pieces(frames: Frames) -> Frames:
    """Split a message with a frame above PIECE_BYTES: an empty frame, the number of pieces of each frame, the pieces.

    No message starts with an empty frame otherwise, because a header is never empty.
    """
    if all(len(frame) <= PIECE_BYTES for frame in frames):
        return frames
    split = [_pieces_of(frame) for frame in frames]
    return [b"", msgspec.msgpack.encode([len(pieces) for pieces in split]), *chain.from_iterable(split)]


def _pieces_of(frame: bytes) -> Frames:
    return [frame[at : at + PIECE_BYTES] for at in range(0, len(frame), PIECE_BYTES)] or [frame]


def assembled(frames: Frames) -> Frames:
    """Undo `in_pieces`; if the pieces do not add up, return the message as it is: its empty header is refused."""
    if len(frames) < 2 or frames[0]:
        return frames
    try:
        counts = msgspec.msgpack.decode(frames[1], type=list[Annotated[int, msgspec.Meta(ge=1)]])
    except msgspec.MsgspecError:
        return frames
    ends = list(accumulate(counts, initial=2))
    if ends[-1] != len(frames):
        return frames
    return [b"".join(frames[start:end]) for start, end in pairwise(ends)]
