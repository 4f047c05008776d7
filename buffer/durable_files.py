"""Files that survive a crash of the machine: written whole or not at all, or appended to line by line."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from slipstream.buffer.errors import ArchiveError
from slipstream.buffer.trajectory import Record

T = TypeVar("T")


def sync_path(path: Path) -> None:
    """Block until the disk has a file's bytes, or a folder's names. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, data: bytes | memoryview) -> None:
    """Write a file; its bytes are on the disk on return, its name once its folder is synced. Raises OSError."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_durably(path: Path, data: bytes | memoryview) -> None:
    """Write a file that is whole or absent: temporary name, fsync, rename, fsync of its folder. Raises OSError."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        write_synced(temporary, data)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    # The rename is durable only when the folder is.
    sync_path(path.parent)


# --- files of lines --------------------------------------------------------------------------------------------------
class CheckedLine(Record):
    """One line of a LineFile. Example: CheckedLine(schema=1, checksum="9f2c61d0a55b7e13", entry=b'{"step":12,...}')."""

    schema: int
    """Refused if newer than the reader's."""
    checksum: str
    """xxh3-64 of the entry's text in the line, hexadecimal."""
    entry: msgspec.Raw
    """The entry, as JSON text."""


class _Schema(msgspec.Struct):
    """Decodes the schema of a line that may hold fields of a newer version."""

    schema: int


def parse_line(text: bytes, kind: type[T], *, schema: int, where: str | Path) -> T | None:
    """Decode the entry of a line; None if the line is damaged. Raises ArchiveError for a newer schema."""
    try:
        if (written := msgspec.json.decode(text, type=_Schema).schema) > schema:
            raise ArchiveError(
                f"{where} must have schema <= {schema}, got {written}: read it with the Slipstream that wrote it."
            )
        line = msgspec.json.decode(text, type=CheckedLine)
        is_whole = xxhash.xxh3_64_hexdigest(bytes(line.entry)) == line.checksum
        return msgspec.json.decode(line.entry, type=kind) if is_whole else None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def parse_lines(
    content: bytes, parse: Callable[[bytes], T | None], *, where: str | Path, rule: str
) -> tuple[list[T], bytes]:
    """Return (the entries of a LineFile, its whole lines), without a last line that a crash cut short.

    `parse` returns None for a damaged line; `rule` says what a line must do, such as `name a shard`. Raises
    ArchiveError for a damaged line before the last.
    """
    lines = content.splitlines(keepends=True)
    parsed = [parse(line) if line.endswith(b"\n") else None for line in lines]
    if parsed and parsed[-1] is None:
        parsed, lines = parsed[:-1], lines[:-1]
    if None in parsed:
        number = parsed.index(None)
        raise ArchiveError(
            f"line {number + 1} of {where} must {rule}, got {lines[number][:80]!r}: only a last line can be cut short "
            "by a crash; restore the file from a copy."
        )
    return [value for value in parsed if value is not None], b"".join(lines)


class LineFile:
    """A file of checked lines that has one writer and is only ever appended to.

    Invariant: a line is whole and durable, or the next append (or the next start) drops it.
    """

    def __init__(self, path: Path, *, content: bytes, schema: int) -> None:
        """Create the file if it is missing; `content` is its whole lines, as `parse_lines` returns them."""
        self._path = path
        self._schema = schema
        self._digest = xxhash.xxh3_64(content)
        self.num_bytes = len(content)
        """Size of its whole lines."""
        path.touch()

    @property
    def checksum(self) -> str:
        """xxh3-64 of its whole lines, hexadecimal."""
        return self._digest.hexdigest()

    def append(self, entries: Iterable[Record]) -> None:
        """Append a line per entry; durable on return. Raises OSError, and can be called again then."""
        data = b"".join(map(self._line, entries))
        with self._path.open("r+b") as file:
            # An append that failed for want of space may have left a part of its lines.
            file.truncate(self.num_bytes)
            file.seek(self.num_bytes)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._digest.update(data)
        self.num_bytes += len(data)

    def _line(self, entry: Record) -> bytes:
        data = msgspec.json.encode(entry)
        line = CheckedLine(self._schema, xxhash.xxh3_64_hexdigest(data), msgspec.Raw(data))
        return msgspec.json.encode(line) + b"\n"
