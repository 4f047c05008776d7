"""`python -m buffer refused`: what the broker turned away, as far as the store keeps it."""

from collections.abc import Iterable, Iterator

import msgspec
from rich.table import Table

from buffer.commands.printing import add_row, make_table
from buffer.limits import FRAME_BYTES_KEPT

_HEX_BYTES = 16
_TEXT_BYTES = 64
"""First bytes that a line of the table shows, as numbers and as text."""


class RefusedFrame(msgspec.Struct, frozen=True):
    """Example: RefusedFrame(reason="malformed", num_bytes=4, is_cut=False, hex="6a756e6b")."""

    reason: str
    """Why, as the counter `refused` names it."""
    num_bytes: int
    """Bytes of it that are kept; 0 for a Hello, which may hold a token."""
    is_cut: bool
    """Whether it may have been longer."""
    hex: str
    """Those bytes, two digits each."""


def list_frames(frames: Iterable[tuple[str, bytes]]) -> Table:
    """A line for each (reason, first bytes)."""
    table = make_table("reason", "bytes", "begins with", "as text", numbers=("bytes",))
    for reason, kept in frames:
        size = f"{len(kept)}+" if _is_cut(kept) else len(kept)
        add_row(table, reason, size, kept[:_HEX_BYTES].hex(" "), _as_text(kept[:_TEXT_BYTES]))
    return table


def as_json(frames: Iterable[tuple[str, bytes]]) -> Iterator[str]:
    """A RefusedFrame as a line of JSON for each (reason, first bytes)."""
    for reason, kept in frames:
        yield msgspec.json.encode(RefusedFrame(reason, len(kept), _is_cut(kept), kept.hex())).decode()


def _is_cut(kept: bytes) -> bool:
    return len(kept) >= FRAME_BYTES_KEPT


def _as_text(kept: bytes) -> str:
    """ASCII, with a dot for whatever is none."""
    return "".join(chr(byte) if 32 <= byte < 127 else "." for byte in kept)
