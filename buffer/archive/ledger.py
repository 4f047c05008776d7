"""The step ledger of an archive: what each step trained on, so that the archive alone can be replayed, batch by batch.

A line is a step whose groups are all archived and that a durable checkpoint covers. A store that came back from disk
without its last seconds may have a step done again: its second line counts, and the lines after its first do not.
"""

from pathlib import Path

import msgspec
import xxhash

from slipstream.buffer.durable_files import LineFile, read_lines
from slipstream.buffer.errors import ArchiveError
from slipstream.buffer.records import StepEntry
from slipstream.buffer.trajectory import Record

LEDGER = "ledger.jsonl"
"""File name in the archive's folder."""
LEDGER_SCHEMA = 1
"""Raised with every change of StepEntry that a reader of the previous one would misread."""


class LedgerLine(Record):
    """One step. Example: LedgerLine(schema=1, checksum="9f2c61d0a55b7e13", entry=b'{"step":12,"version":11,...}')."""

    schema: int
    """Refused if newer than the reader's."""
    checksum: str
    """xxh3-64 of the entry's text in the line, hexadecimal."""
    entry: msgspec.Raw
    """The StepEntry, as JSON text."""


class _Schema(msgspec.Struct):
    """Decodes a line's schema, whatever else a newer line holds."""

    schema: int


def read_ledger(folder: Path) -> list[StepEntry]:
    """Return the steps in order; none if the archive has no ledger. Raises ArchiveError."""
    return list(_parse(folder / LEDGER)[0].values())


class LedgerWriter:
    """The one writer of an archive's ledger."""

    def __init__(self, folder: Path) -> None:
        """Raises ArchiveError when the ledger is damaged, OSError."""
        self._entries, good_bytes = _parse(folder / LEDGER)
        self._file = LineFile(folder / LEDGER, good_bytes=good_bytes)

    @property
    def last_step(self) -> int:
        """Newest step; 0 before the first."""
        return max(self._entries, default=0)

    def lacks(self, entries: list[StepEntry]) -> list[StepEntry]:
        """Return the first of `entries` (in order) that is missing or differs here, and all after it."""
        first = next((entry.step for entry in entries if self._entries.get(entry.step) != entry), None)
        return [] if first is None else [entry for entry in entries if entry.step >= first]

    def append(self, entries: list[StepEntry]) -> None:
        """Append steps, in order; durable on return. Raises OSError, and can be called again then."""
        self._file.append([_line(entry) for entry in entries])
        for entry in entries:
            _enter(self._entries, entry)


def _enter(entries: dict[int, StepEntry], entry: StepEntry) -> None:
    # A step that is done again takes every later one of before with it.
    for step in [step for step in entries if step >= entry.step]:
        del entries[step]
    entries[entry.step] = entry


def _line(entry: StepEntry) -> bytes:
    data = msgspec.json.encode(entry)
    return msgspec.json.encode(LedgerLine(LEDGER_SCHEMA, xxhash.xxh3_64_hexdigest(data), msgspec.Raw(data)))


def _parse(path: Path) -> tuple[dict[int, StepEntry], int]:
    """Return (step -> entry, size of the whole lines)."""
    if not path.exists():
        return {}, 0
    parsed, good_bytes = read_lines(path, lambda line: _parse_line(line, path), rule="hold a step")
    entries: dict[int, StepEntry] = {}
    for entry in parsed:
        _enter(entries, entry)
    return entries, good_bytes


def _parse_line(text: bytes, path: Path) -> StepEntry | None:
    try:
        schema = msgspec.json.decode(text, type=_Schema).schema
        if schema > LEDGER_SCHEMA:
            raise ArchiveError(
                f"{path} must have schema <= {LEDGER_SCHEMA}, got {schema}: read it with the Slipstream that wrote it."
            )
        line = msgspec.json.decode(text, type=LedgerLine)
        is_whole = xxhash.xxh3_64_hexdigest(bytes(line.entry)) == line.checksum
        return msgspec.json.decode(line.entry, type=StepEntry) if is_whole else None
    except msgspec.MsgspecError:
        return None
