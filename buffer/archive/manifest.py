"""The manifest of an archive: which shards are whole, one JSON line each, only ever appended to."""

import re
from pathlib import Path

import msgspec

from slipstream.buffer.archive.ledger import LineFile, read_lines
from slipstream.buffer.errors import ArchiveError
from slipstream.buffer.trajectory import Record

MANIFEST = "manifest.jsonl"
"""Its name in the archive's folder."""
_SHARD_NAME = re.compile(r"shard-(\d{8,})\.parquet")


class ShardEntry(Record):
    """A shard that is whole and durable.

    Example: ShardEntry(file="shard-00000003.parquet", rows=8192, groups=1024, first_step=97, last_step=128,
        bytes=4411392, checksum="9f2c61d0a55b7e13", archived_at=1767225600.0)
    """

    file: str
    """Name in the archive's folder."""
    rows: int
    """Trajectories."""
    groups: int
    """Groups, those without a trajectory not counted."""
    first_step: int | None
    """Smallest step that trained on any of it; None when no step did."""
    last_step: int | None
    """Largest step that trained on any of it; None when no step did."""
    bytes: int
    """Size of the file."""
    checksum: str
    """xxh3-64 of the file, hexadecimal."""
    archived_at: float
    """Seconds since 1970."""


def shard_name(number: int) -> str:
    """The file of the `number`-th shard."""
    return f"shard-{number:08d}.parquet"


def shard_number(name: str) -> int | None:
    """The inverse of `shard_name`; None for another file's name."""
    match = _SHARD_NAME.fullmatch(name)
    return int(match[1]) if match else None


def read_manifest(folder: Path) -> list[ShardEntry]:
    """The shards in order; a last line that a crash cut short is left out. Raises ArchiveError."""
    return _parse(folder)[0]


class Manifest:
    """The manifest as its one writer holds it."""

    def __init__(self, folder: Path) -> None:
        """Make it where it is missing. Raises ArchiveError when it is damaged."""
        path = folder / MANIFEST
        path.touch()
        self.shards, good_bytes = _parse(folder)
        self._file = LineFile(path, good_bytes=good_bytes)

    @property
    def next_number(self) -> int:
        """Of the shard to be written next."""
        return 1 + max((shard_number(shard.file) or 0 for shard in self.shards), default=0)

    def append(self, shard: ShardEntry) -> None:
        """Add a line; durable when this returns. Raises OSError, and can be called again then."""
        self._file.append([msgspec.json.encode(shard)])
        self.shards.append(shard)


def _parse(folder: Path) -> tuple[list[ShardEntry], int]:
    """(shards, bytes of the lines they stand in)."""
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
