"""Files that survive a machine crash: atomic writes, append-only lines, and sealed folders."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from slipstream.buffer.errors import ArchiveError
from slipstream.configs.base import Record

T = TypeVar("T")


def sync_path(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, data: bytes | memoryview) -> None:
    """Write and fsync a file. Its name is durable only after an fsync of its folder. Raises OSError."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_durably(path: Path, data: bytes | memoryview) -> None:
    """Write a file atomically and durably. Raises OSError."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        write_synced(temporary, data)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


def checksum(path: Path) -> str:
    """Xxh3-64 of a file, hexadecimal."""
    digest = xxhash.xxh3_64()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


# --- files of lines --------------------------------------------------------------------------------------------------
class CheckedLine(Record):
    """One line of a LineFile. Example: CheckedLine(schema=1, checksum="9f2c61d0a55b7e13", entry=b'{"step":12,...}')."""

    schema: int
    """A newer one than the reader's is rejected."""
    checksum: str
    """xxh3-64 of the entry's text, hexadecimal."""
    entry: msgspec.Raw


class _Schema(msgspec.Struct):
    """The part of a line that is readable in every version."""

    schema: int


def parse_line(text: bytes, kind: type[T], *, schema: int, where: str | Path) -> T | None:
    """Decode a line's entry; None if damaged. Raises ArchiveError for a newer schema."""
    try:
        if (written := msgspec.json.decode(text, type=_Schema).schema) > schema:
            remedy = "read it with the Slipstream that wrote it"
            raise ArchiveError(f"{where} must have schema <= {schema}, got {written}: {remedy}.")
        line = msgspec.json.decode(text, type=CheckedLine)
        is_whole = xxhash.xxh3_64_hexdigest(bytes(line.entry)) == line.checksum
        return msgspec.json.decode(line.entry, type=kind) if is_whole else None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def whole_lines(
    lines: Iterable[bytes], parse: Callable[[bytes], T | None], *, where: str | Path, rule: str, first: int = 1
) -> Iterator[tuple[T, bytes]]:
    """Yield (entry, line) of a LineFile, ignoring a truncated last line.

    `parse` returns None for a damaged line. `rule` completes "a line must ..."; `first`: number of the first line.
    Raises ArchiveError for a damaged line before the last.
    """
    damaged: bytes | None = None
    for number, line in enumerate(lines, start=first):
        if damaged is not None:
            raise ArchiveError(
                f"line {number - 1} of {where} must {rule}, got {damaged[:80]!r}: only a last line can be cut short by "
                "a crash; restore the file from a copy."
            )
        entry = parse(line) if line.endswith(b"\n") else None
        if entry is None:
            damaged = line
        else:
            yield entry, line


class LineFile:
    """Append-only file of checksummed lines with a single writer.

    Invariant: a line is complete and durable, or the next append or start drops it.
    """

    def __init__(self, path: Path, *, digest: xxhash.xxh3_64, num_bytes: int, schema: int) -> None:
        """Create the file if missing. `digest` and `num_bytes`: of its complete lines."""
        self._path = path
        self._schema = schema
        self._digest = digest
        self.num_bytes = num_bytes
        path.touch()

    @property
    def checksum(self) -> str:
        """xxh3-64 of all complete lines, hexadecimal."""
        return self._digest.hexdigest()

    def append(self, entries: Iterable[Record]) -> None:
        """Append one line per entry, durably. Can be retried after an OSError."""
        lines = []
        for entry in entries:
            encoded = msgspec.json.encode(entry)
            line = CheckedLine(self._schema, xxhash.xxh3_64_hexdigest(encoded), msgspec.Raw(encoded))
            lines.append(msgspec.json.encode(line) + b"\n")
        data = b"".join(lines)
        with self._path.open("r+b") as file:
            # An append that failed on a full disk may have left partial lines.
            file.truncate(self.num_bytes)
            file.seek(self.num_bytes)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._digest.update(data)
        self.num_bytes += len(data)


# --- sealed folders ---------------------------------------------------------------------------------------------------
CHECKSUMS = "checksums.json"
_BLOCK_BYTES = 4 * 2**20
_MAX_THREADS = 8
"""Threads that hash files, which releases the GIL."""


def seal(folder: Path) -> None:
    """Write a folder's checksums and sync everything. Raises OSError."""
    (folder / CHECKSUMS).write_bytes(msgspec.json.encode(checksums_of(folder)))
    for path in (*folder.rglob("*"), folder):
        sync_path(path)


def merge(parts: Sequence[Path], *, into: Path) -> None:
    """Move the files of sealed folders into another sealed folder. Can be retried after an OSError."""
    checksums = dict[str, str]()
    for folder in (into, *parts):
        checksums |= read_checksums(folder)
    # First, because nothing else needs disk space.
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
    """Beginning of a sentence about a damaged file; empty if intact."""
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
    """Path -> recorded checksum. Raises OSError, msgspec.MsgspecError."""
    return msgspec.json.decode((folder / CHECKSUMS).read_bytes(), type=dict[str, str])


def checksums_of(folder: Path) -> dict[str, str]:
    """Path -> computed checksum of every file except the checksum file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / CHECKSUMS)
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        return dict(zip((str(path.relative_to(folder)) for path in files), pool.map(checksum, files), strict=True))
