"""Files that survive a crash of the machine: written whole or not at all, or appended to line by line."""

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from slipstream.buffer.errors import ArchiveError
from slipstream.configs.base import Record

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


def checksum(path: Path) -> str:
    """xxh3-64 of a file, in hex."""
    digest = xxhash.xxh3_64()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


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


CHECKSUMS = "checksums.json"
_BLOCK_BYTES = 4 * 2**20
_MAX_THREADS = 8
"""One thread reads about as fast as one disk; the hash lets go of the interpreter's lock."""


def seal(folder: Path) -> None:
    """Write the checksums of a folder and sync it all: only a rename is missing then. Raises OSError."""
    (folder / CHECKSUMS).write_bytes(msgspec.json.encode(checksums_of(folder)))
    # Contents before the name: after the rename the folder must survive a power failure.
    for path in (*folder.rglob("*"), folder):
        sync_path(path)


def merge(parts: Sequence[Path], *, into: Path) -> None:
    """Move the files of sealed folders into another one, which is sealed again then. Raises OSError; repeatable."""
    checksums = dict[str, str]()
    for folder in (into, *parts):
        checksums |= read_checksums(folder)
    # First, because it alone takes room on the disk.
    write_durably(into / CHECKSUMS, msgspec.json.encode(checksums))
    for folder in parts:
        for name in read_checksums(folder):
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            if not (into / name).exists():
                (folder / name).rename(into / name)
    for path in (*(path for path in into.rglob("*") if path.is_dir()), into):
        sync_path(path)
    for folder in parts:
        shutil.rmtree(folder, ignore_errors=True)


def find_damage(folder: Path) -> str:
    """Return which file of a sealed folder is not as it was written, as the beginning of a sentence; empty if none."""
    try:
        expected, found = read_checksums(folder), checksums_of(folder)
    except (OSError, msgspec.MsgspecError) as error:
        return f"{folder / CHECKSUMS} must hold the checksums of its checkpoint, got {error}"
    name = next((name for name in sorted(expected | found) if expected.get(name) != found.get(name)), None)
    if name is None:
        return ""
    return (
        f"{folder / name} must have the checksum it was written with ({expected.get(name, 'none')}), got "
        f"{found.get(name, 'no file')}"
    )


def read_checksums(folder: Path) -> dict[str, str]:
    """Checksums that a sealed folder has on file, by path within it. Raises OSError, msgspec.MsgspecError."""
    return msgspec.json.decode((folder / CHECKSUMS).read_bytes(), type=dict[str, str])


def checksums_of(folder: Path) -> dict[str, str]:
    """Compute the checksum of every file but that of the checksums, by its path within the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / CHECKSUMS)
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        return dict(zip((str(path.relative_to(folder)) for path in files), pool.map(checksum, files), strict=True))
