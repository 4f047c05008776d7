"""The manifest of an archive: its whole shards, one JSON line each, only ever appended to."""

import re
from pathlib import Path

import msgspec

from slipstream.buffer.durable_files import LineFile, read_lines
from slipstream.buffer.errors import ArchiveError
from slipstream.buffer.trajectory import Record

MANIFEST = "manifest.jsonl"
"""File name in the archive's folder."""
_SHARD_NAME = re.compile(r"shard-(\d{8,})\.parquet")


class ShardEntry(Record):
    """A whole and durable shard.

    Example: ShardEntry(file="shard-00000003.parquet", rows=8192, groups=1024, first_step=97, last_step=128,
        bytes=4411392, checksum="9f2c61d0a55b7e13", archived_at=1767225600.0)
    """

    file: str
    """File name in the archive's folder."""
    rows: int
    """Number of trajectories in it."""
    groups: int
    """Number of groups that have a trajectory."""
    first_step: int | None
    """Smallest step that trained on one of its groups; None if no step did."""
    last_step: int | None
    """Largest step that trained on one of its groups; None if no step did."""
    bytes: int
    """Size of the file, bytes."""
    checksum: str
    """xxh3-64 of the file, hexadecimal."""
    archived_at: float
    """Time of writing, seconds since 1970."""


def shard_name(number: int) -> str:
    """Return the file name of the `number`-th shard."""
    return f"shard-{number:08d}.parquet"


def shard_number(name: str) -> int | None:
    """Return the number of a shard's file; None for the name of any other file."""
    match = _SHARD_NAME.fullmatch(name)
    return int(match[1]) if match else None


def read_manifest(folder: Path) -> list[ShardEntry]:
    """Return the shards in order, without a last line that a crash cut short. Raises ArchiveError."""
    return _parse(folder)[0]


class Manifest:
    """The manifest, held by its one writer."""

    def __init__(self, folder: Path) -> None:
        """Create it if it is missing. Raises ArchiveError when it is damaged."""
        path = folder / MANIFEST
        path.touch()
        self.shards, good_bytes = _parse(folder)
        self._file = LineFile(path, good_bytes=good_bytes)

    @property
    def next_number(self) -> int:
        """Number of the next shard."""
        return 1 + max((shard_number(shard.file) or 0 for shard in self.shards), default=0)

    def append(self, shard: ShardEntry) -> None:
        """Append a line; durable on return. Raises OSError, and can be called again then."""
        self._file.append([msgspec.json.encode(shard)])
        self.shards.append(shard)


def _parse(folder: Path) -> tuple[list[ShardEntry], int]:
    """Return (shards, size of the whole lines)."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ArchiveError(f"{folder} must be an archive, but it has no {MANIFEST}: name a run's `archive` folder.")
    return read_lines(path, _parse_line, rule="name a shard")


def _parse_line(line: bytes) -> ShardEntry | None:
    try:
        shard = msgspec.json.decode(line, type=ShardEntry)
    except msgspec.MsgspecError:
        return None
    return shard if shard_number(shard.file) is not None else None
