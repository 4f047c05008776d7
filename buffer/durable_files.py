"""Files that survive a crash of the machine: written whole or not at all, or appended to line by line."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from slipstream.buffer.errors import ArchiveError

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


def read_lines(path: Path, parse: Callable[[bytes], T | None], *, rule: str) -> tuple[list[T], int]:
    """Return (the parsed lines of a LineFile, their size in bytes), without a last line that a crash cut short.

    `parse` returns None for a damaged line; `rule` says what a line must do, such as `name a shard`. Raises
    ArchiveError for a damaged line before the last.
    """
    lines = path.read_bytes().splitlines(keepends=True)
    parsed = [parse(line) if line.endswith(b"\n") else None for line in lines]
    if parsed and parsed[-1] is None:
        parsed, lines = parsed[:-1], lines[:-1]
    if None in parsed:
        number = parsed.index(None)
        raise ArchiveError(
            f"line {number + 1} of {path} must {rule}, got {lines[number][:80]!r}: only a last line can be cut short "
            "by a crash; restore the file from a copy."
        )
    return [value for value in parsed if value is not None], sum(map(len, lines))


class LineFile:
    """A file of lines that has one writer and is only ever appended to.

    Invariant: a line is whole and durable, or the next append (or the next start) drops it.
    """

    def __init__(self, path: Path, *, good_bytes: int) -> None:
        """Create the file if it is missing; `good_bytes` is the size of its whole lines, as `read_lines` returns it."""
        self._path = path
        self._good_bytes = good_bytes
        path.touch()

    def append(self, lines: list[bytes]) -> None:
        """Append lines, given without line ends; durable on return. Raises OSError, and can be called again then."""
        data = b"".join(line + b"\n" for line in lines)
        with self._path.open("r+b") as file:
            # An append that failed for want of space may have left a part of its lines.
            file.truncate(self._good_bytes)
            file.seek(self._good_bytes)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._good_bytes += len(data)
