"""The step ledger of an archive: which step trained on what, so that the archive alone can be replayed, batch by batch.

A line is a step whose groups are all archived and that a durable checkpoint covers. A store that came back from disk
without its last seconds may have a step done anew: its second line holds, and what stood after the first does not.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from slipstream.buffer.errors import ArchiveError
from slipstream.buffer.records import StepEntry
from slipstream.buffer.trajectory import Record

# @@ Files of the archive that hold a JSON line for each thing and are only ever appended to.
T = TypeVar("T")


def read_lines(path: Path, parse: Callable[[bytes], T | None], *, rule: str) -> tuple[list[T], int]:
    """(what the lines hold, bytes of the lines it stands in); a last line that a crash cut short is left out.

    `parse` gives None for a line that is damaged. Raises ArchiveError (what a line must do is its `rule`).
    """
    lines = path.read_bytes().splitlines(keepends=True)
    found = [parse(line) if line.endswith(b"\n") else None for line in lines]
    if found and found[-1] is None:
        found, lines = found[:-1], lines[:-1]
    if None in found:
        number = found.index(None)
        raise ArchiveError(
            f"line {number + 1} of {path} must {rule}, got {lines[number][:80]!r}: only a last line can be cut short "
            "by a crash; restore the file from a copy."
        )
    return [thing for thing in found if thing is not None], sum(map(len, lines))


class LineFile:
    """Such a file as its one writer holds it.

    Invariant: a line is whole and durable, or the next append (or the next start) drops it.
    """

    def __init__(self, path: Path, *, good_bytes: int) -> None:
        """Make it where it is missing; `good_bytes` are those of its whole lines."""
        self._path = path
        self._good_bytes = good_bytes
        path.touch()

    def append(self, lines: list[bytes]) -> None:
        """Add lines, given without their ends; durable when this returns. Raises OSError, and can be called again."""
        data = b"".join(line + b"\n" for line in lines)
        with self._path.open("r+b") as file:
            # An append that failed for want of space may have left a part of its lines.
            file.truncate(self._good_bytes)
            file.seek(self._good_bytes)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._good_bytes += len(data)


LEDGER = "ledger.jsonl"
"""Its name in the archive's folder."""
LEDGER_SCHEMA = 1
"""Raised with every change of StepEntry that a reader of the previous one would misread."""


class LedgerLine(Record):
    """One step. Example: LedgerLine(schema=1, checksum="9f2c61d0a55b7e13", entry=b'{"step":12,"version":11,...}')."""

    schema: int
    """Refused when newer than the reader's."""
    checksum: str
    """xxh3-64 of the entry as it stands in the line, hexadecimal."""
    entry: msgspec.Raw
    """A StepEntry, whole."""


class _Schema(msgspec.Struct):
    """Reads a line's schema, whatever else a newer one holds."""

    schema: int


def read_ledger(folder: Path) -> list[StepEntry]:
    """The steps in order; none where the archive has no ledger. Raises ArchiveError."""
    return list(_parse(folder / LEDGER)[0].values())


class LedgerWriter:
    """The ledger as its one writer holds it."""

    def __init__(self, folder: Path) -> None:
        """Raises ArchiveError when it is damaged, OSError."""
        self._entries, good_bytes = _parse(folder / LEDGER)
        self._file = LineFile(folder / LEDGER, good_bytes=good_bytes)

    @property
    def last_step(self) -> int:
        """The newest; 0 before the first."""
        return max(self._entries, default=0)

    def lacks(self, entries: list[StepEntry]) -> list[StepEntry]:
        """Those of `entries` (in order) that stand here otherwise or not at all, and all after the first of them."""
        first = next((entry.step for entry in entries if self._entries.get(entry.step) != entry), None)
        return [] if first is None else [entry for entry in entries if entry.step >= first]

    def append(self, entries: list[StepEntry]) -> None:
        """Add steps, in order; durable when this returns. Raises OSError, and can be called again then."""
        self._file.append([_line(entry) for entry in entries])
        for entry in entries:
            _enter(self._entries, entry)


def _enter(entries: dict[int, StepEntry], entry: StepEntry) -> None:
    for step in [step for step in entries if step >= entry.step]:
        del entries[step]
    entries[entry.step] = entry


def _line(entry: StepEntry) -> bytes:
    data = msgspec.json.encode(entry)
    return msgspec.json.encode(LedgerLine(LEDGER_SCHEMA, xxhash.xxh3_64_hexdigest(data), msgspec.Raw(data)))


def _parse(path: Path) -> tuple[dict[int, StepEntry], int]:
    if not path.exists():
        return {}, 0
    found, good_bytes = read_lines(path, lambda line: _parse_line(line, path), rule="hold a step")
    entries: dict[int, StepEntry] = {}
    for entry in found:
        _enter(entries, entry)
    return entries, good_bytes


def _parse_line(line: bytes, path: Path) -> StepEntry | None:
    try:
        schema = msgspec.json.decode(line, type=_Schema).schema
        if schema > LEDGER_SCHEMA:
            raise ArchiveError(
                f"{path} must have schema <= {LEDGER_SCHEMA}, got {schema}: read it with the Slipstream that wrote it."
            )
        told = msgspec.json.decode(line, type=LedgerLine)
        is_whole = xxhash.xxh3_64_hexdigest(bytes(told.entry)) == told.checksum
        return msgspec.json.decode(told.entry, type=StepEntry) if is_whole else None
    except msgspec.MsgspecError:
        return None
