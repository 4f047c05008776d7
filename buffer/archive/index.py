"""Index of an archive: the manifest of its shards, and the ledger of its steps. Both are append-only.

The step ledger of an archive: what each step trained on, so that the archive alone can be replayed, batch by batch.

A line is a step whose groups are all archived and that a durable checkpoint covers. A store that came back from disk
without its last seconds may have a step done again: its second line counts, and the lines after its first do not.
"""

import re
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from slipstream.buffer.durable_files import LineFile, parse_line, parse_lines
from slipstream.buffer.errors import ArchiveError
from slipstream.buffer.records import StepEntry
from slipstream.configs.base import Record

MANIFEST = "manifest.jsonl"
"""File name in the archive's folder."""
LEDGER = "ledger.jsonl"
"""File name of the step ledger in the archive's folder."""
_SCHEMA = 1
"""Raised with every change of ShardEntry that a reader of the previous one would misread."""
_SHARD_NAME = re.compile(r"shard-(\d{8,})\.parquet")


class ShardEntry(Record):
    """A whole and durable shard, or the ledger up to a size: its newest entry counts, and it may be longer by now.

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


def next_shard(shards: list[ShardEntry]) -> str:
    """Return the file name of the shard after these."""
    return shard_name(1 + max((shard_number(shard.file) or 0 for shard in shards), default=0))


def shard_number(name: str) -> int | None:
    """Return the number of a shard's file; None for the name of any other file."""
    match = _SHARD_NAME.fullmatch(name)
    return int(match[1]) if match else None


class Manifest(NamedTuple):
    """Content of a manifest."""

    shards: list[ShardEntry]
    """In order."""
    ledger: ShardEntry | None
    """The recorded beginning of the ledger; None before the first step, and in archives of earlier versions."""
    content: bytes
    """Its whole lines."""
    unnamed: set[str]
    """At most one shard without a line, as a crash between the two leaves it."""
    is_cut: bool
    """Whether a last line is cut short."""


def is_archive(folder: Path) -> bool:
    """Whether a folder holds an archive, whole or damaged."""
    return any((folder / name).exists() for name in (MANIFEST, LEDGER)) or bool(_shards_in(folder))


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest. Raises ArchiveError when it is missing or damaged, or lacks shards that are in the folder."""
    # Before the manifest: a writer at work adds a line after its shard.
    found = _shards_in(folder)
    path = folder / MANIFEST
    if not path.is_file():
        if is_archive(folder):
            raise ArchiveError(
                f"{folder} must have a {MANIFEST} beside its {len(found)} shards, but has none: restore it, or move "
                f"the shards and {LEDGER} away."
            )
        raise ArchiveError(f"{folder} must be an archive, but it has no {MANIFEST}: name a run's `archive` folder.")
    manifest = parse_manifest(path.read_bytes(), where=path)
    # A crash between shard and line leaves exactly one file, the next in number; its groups come again.
    unnamed, expected = found - {shard.file for shard in manifest.shards}, next_shard(manifest.shards)
    if unnamed - {expected}:
        raise ArchiveError(
            f"{path} must name every shard but the one after its last ({expected}), got others too: "
            f"{', '.join(sorted(unnamed))}. A crash leaves one at most: restore the manifest, or move these shards "
            "away."
        )
    return manifest._replace(unnamed=unnamed)


def parse_manifest(content: bytes, *, where: str | Path) -> Manifest:
    """Parse the lines of a manifest, without a last one that a crash cut short. Raises ArchiveError."""
    entries, whole = parse_lines(content, lambda line: _parse_line(line, where), where=where, rule="name a shard")
    shards = [entry for entry in entries if entry.file != LEDGER]
    ledger = next((entry for entry in reversed(entries) if entry.file == LEDGER), None)
    return Manifest(shards, ledger, whole, unnamed=set(), is_cut=len(whole) < len(content))


class ManifestWriter:
    """The manifest, held by its one writer."""

    def __init__(self, folder: Path) -> None:
        """Create it in a new archive. Raises ArchiveError as `read_manifest` does."""
        if not is_archive(folder):
            (folder / MANIFEST).touch()
        found = read_manifest(folder)
        self.shards, self.ledger, self.unnamed = found.shards, found.ledger, found.unnamed
        self._file = LineFile(folder / MANIFEST, content=found.content, schema=_SCHEMA)

    def append(self, entry: ShardEntry) -> None:
        """Append a line; durable on return. Raises OSError, and can be called again then."""
        self._file.append([entry])
        if entry.file == LEDGER:
            self.ledger = entry
        else:
            self.shards.append(entry)


def _shards_in(folder: Path) -> set[str]:
    files = folder.iterdir() if folder.is_dir() else ()
    return {file.name for file in files if shard_number(file.name) is not None}


def _parse_line(line: bytes, where: str | Path) -> ShardEntry | None:
    entry = parse_line(line, ShardEntry, schema=_SCHEMA, where=where)
    if entry is None:
        # Archives of earlier versions have no checksum in the line.
        try:
            entry = msgspec.json.decode(line, type=ShardEntry)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None
    return entry if entry.file == LEDGER or shard_number(entry.file) is not None else None


LEDGER_SCHEMA = 1
"""Raised with every change of StepEntry that a reader of the previous one would misread."""


def read_ledger(folder: Path, sealed: ShardEntry | None) -> list[StepEntry]:
    """Return the steps in order; `sealed` is the manifest's entry of the ledger, None if it has none.

    Raises ArchiveError for a ledger that is damaged, or shorter than the manifest says.
    """
    return list(_parse_ledger(folder / LEDGER, sealed)[0].values())


class LedgerWriter:
    """The one writer of an archive's ledger, which records size and checksum in the manifest.

    The lines are durable before the manifest says so: after a crash in between the ledger is longer than recorded,
    never shorter, and the next start records the rest.
    """

    def __init__(self, folder: Path, manifest: ManifestWriter) -> None:
        """Raises ArchiveError when the ledger is damaged, OSError."""
        self._manifest = manifest
        self._entries, content = _parse_ledger(folder / LEDGER, manifest.ledger)
        self._file = LineFile(folder / LEDGER, content=content, schema=LEDGER_SCHEMA)
        if self._file.num_bytes > (manifest.ledger.bytes if manifest.ledger else 0):
            self._seal()

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
        self._file.append(entries)
        for entry in entries:
            _enter(self._entries, entry)
        self._seal()

    def _seal(self) -> None:
        entry = ShardEntry(
            file=LEDGER,
            rows=len(self._entries),
            groups=0,
            first_step=min(self._entries, default=None),
            last_step=max(self._entries, default=None),
            bytes=self._file.num_bytes,
            checksum=self._file.checksum,
            archived_at=time.time(),
        )
        self._manifest.append(entry)


def _enter(entries: dict[int, StepEntry], entry: StepEntry) -> None:
    # A step that is done again takes every later one of before with it.
    for step in [step for step in entries if step >= entry.step]:
        del entries[step]
    entries[entry.step] = entry


def _parse_ledger(path: Path, sealed: ShardEntry | None) -> tuple[dict[int, StepEntry], bytes]:
    """Return (step -> entry, the whole lines)."""
    content = path.read_bytes() if path.exists() else b""
    parsed, whole = parse_lines(
        content,
        lambda line: parse_line(line, StepEntry, schema=LEDGER_SCHEMA, where=path),
        where=path,
        rule="hold a step",
    )
    # Each line has its own checksum; only this one finds lines that are missing.
    if sealed and xxhash.xxh3_64_hexdigest(whole[: sealed.bytes]) != sealed.checksum:
        raise ArchiveError(
            f"{path} must begin with the {sealed.bytes} bytes that the manifest records ({sealed.rows} steps, up to "
            f"step {sealed.last_step}), got {len(content)} bytes with {len(parsed)} whole lines: it is damaged; "
            "restore it from a copy, or continue the run without this archive by moving its folder away."
        )
    entries: dict[int, StepEntry] = {}
    for entry in parsed:
        _enter(entries, entry)
    return entries, whole
