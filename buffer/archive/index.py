"""Index of an archive: the manifest of its shards and the ledger of its steps, both append-only.

The ledger records what each step trained on, for replays batch by batch. A step gets its line once a durable checkpoint
covers it and all of its groups are archived. If the store lost its last seconds, a step may run again: its second line
replaces the first and all in between.
"""

import math
import re
import time
from collections.abc import Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from slipstream.buffer.durable_files import LineFile, parse_line, whole_lines
from slipstream.buffer.errors import ArchiveError
from slipstream.buffer.records import StepEntry
from slipstream.configs.base import Record

MANIFEST = "manifest.jsonl"
LEDGER = "ledger.jsonl"
_SCHEMA = 1
"""Increment when an older reader would misread a ShardEntry."""
_SHARD_NAME = re.compile(r"shard-(\d{8,})\.parquet")


class ShardEntry(Record):
    """A durable shard, or for the ledger, its state up to a size; the last such entry counts.

    Example: ShardEntry(file="shard-00000003.parquet", rows=8192, groups=1024, first_step=97, last_step=128,
        bytes=4411392, checksum="9f2c61d0a55b7e13", archived_at=1767225600.0)
    """

    file: str
    rows: int
    """Trajectories; in the ledger, steps."""
    groups: int
    """Groups with at least one trajectory."""
    first_step: int | None
    """First step that trained on one of the groups; None if none did."""
    last_step: int | None
    """The last such step."""
    bytes: int
    checksum: str
    """xxh3-64 of these bytes, hexadecimal."""
    archived_at: float


def next_shard(shards: list[ShardEntry]) -> str:
    """File name of the next shard, numbered from 1."""
    number = 1 + max((shard_number(shard.file) or 0 for shard in shards), default=0)
    return f"shard-{number:08d}.parquet"


def shard_number(name: str) -> int | None:
    """Number in a shard's file name; None for any other file."""
    match = _SHARD_NAME.fullmatch(name)
    return int(match[1]) if match else None


class Manifest(NamedTuple):
    """Content of a manifest."""

    shards: list[ShardEntry]
    ledger: ShardEntry | None
    """Newest ledger entry; None before the first step, and in old archives."""
    content: bytes
    """Complete lines only."""
    unnamed: set[str]
    """Shards without a line: at most one, after a crash."""
    is_cut: bool


def is_archive(folder: Path) -> bool:
    """Whether a folder holds an archive, complete or damaged."""
    return any((folder / name).exists() for name in (MANIFEST, LEDGER)) or bool(_shards_in(folder))


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest. Raises ArchiveError if missing, damaged, or lacking more shards than a crash explains."""
    # List shards before reading the manifest: a live writer adds a shard before its line.
    found = _shards_in(folder)
    path = folder / MANIFEST
    if not path.is_file():
        if is_archive(folder):
            must = f"{folder} must have a {MANIFEST} beside its {len(found)} shards"
            raise ArchiveError(f"{must}, but has none: restore it, or move the shards and {LEDGER} away.")
        raise ArchiveError(f"{folder} must be an archive, but it has no {MANIFEST}: name a run's `archive` folder.")
    manifest = parse_manifest(path.read_bytes(), where=path)
    # A crash leaves one file, with the next number. The store offers its groups again.
    unnamed, expected = found - {shard.file for shard in manifest.shards}, next_shard(manifest.shards)
    if unnamed - {expected}:
        raise ArchiveError(
            f"{path} must name every shard but the one after its last ({expected}), got others too: "
            f"{', '.join(sorted(unnamed))}. A crash leaves one at most: restore the manifest, or move these shards "
            "away."
        )
    return manifest._replace(unnamed=unnamed)


def parse_manifest(content: bytes, *, where: str | Path) -> Manifest:
    """Parse a manifest, ignoring a truncated last line. Raises ArchiveError."""

    def parse(line: bytes) -> ShardEntry | None:
        entry = parse_line(line, ShardEntry, schema=_SCHEMA, where=where)
        if entry is None:
            # Archives of earlier versions have lines without checksums.
            try:
                entry = msgspec.json.decode(line, type=ShardEntry)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                return None
        return entry if entry.file == LEDGER or shard_number(entry.file) is not None else None

    found = [*whole_lines(content.splitlines(keepends=True), parse, where=where, rule="name a shard")]
    entries, whole = [entry for entry, _ in found], b"".join(line for _, line in found)
    shards = [entry for entry in entries if entry.file != LEDGER]
    ledger = next((entry for entry in reversed(entries) if entry.file == LEDGER), None)
    return Manifest(shards, ledger, whole, unnamed=set(), is_cut=len(whole) < len(content))


class ManifestWriter:
    """The single writer of a manifest."""

    def __init__(self, folder: Path) -> None:
        """Create or read the manifest. Raises ArchiveError as `read_manifest` does."""
        if not is_archive(folder):
            (folder / MANIFEST).touch()
        found = read_manifest(folder)
        self.shards, self.ledger, self.unnamed = found.shards, found.ledger, found.unnamed
        self._file = LineFile(
            folder / MANIFEST, digest=xxhash.xxh3_64(found.content), num_bytes=len(found.content), schema=_SCHEMA
        )

    def append(self, entry: ShardEntry) -> None:
        """Append a line durably. Can be retried after an OSError."""
        self._file.append([entry])
        if entry.file == LEDGER:
            self.ledger = entry
        else:
            self.shards.append(entry)


def _shards_in(folder: Path) -> set[str]:
    files = folder.iterdir() if folder.is_dir() else ()
    return {file.name for file in files if shard_number(file.name) is not None}


# --- the step ledger --------------------------------------------------------------------------------------------------
LEDGER_SCHEMA = 1
"""Increment when an older reader would misread a StepEntry."""


class _Step(msgspec.Struct):
    """Decodes only the step of a StepEntry."""

    step: int


class LedgerReader:
    """Reads a growing ledger by step. Keeps the position of every line."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LEDGER
        self._forget()

    def _forget(self) -> None:
        self.places: dict[int, tuple[int, int]] = {}
        """Step -> offset and length of its line; ascending."""
        self.digest = xxhash.xxh3_64()
        """xxh3-64 of all complete lines."""
        self.num_bytes = 0
        self._num_lines = 0

    def refresh(self, sealed: ShardEntry | None) -> None:
        """Find new lines. `sealed`: the manifest's ledger entry. Raises ArchiveError for a damaged or short file."""
        size = self._path.stat().st_size if self._path.exists() else 0
        if size < self.num_bytes:
            self._forget()
        # The checksums of single lines do not detect missing lines.
        is_checked = sealed is None or sealed.bytes <= self.num_bytes
        with self._path.open("rb") if size else BytesIO() as file:
            file.seek(self.num_bytes)
            parse = partial(parse_line, kind=_Step, schema=LEDGER_SCHEMA, where=self._path)
            found = whole_lines(file, parse, where=self._path, rule="hold a step", first=self._num_lines + 1)
            for entry, line in found:
                # A repeated step invalidates all later ones.
                while self.places and next(reversed(self.places)) >= entry.step:
                    self.places.popitem()
                self.places[entry.step] = (self.num_bytes, len(line))
                self.digest.update(line)
                self.num_bytes += len(line)
                self._num_lines += 1
                if sealed and self.num_bytes == sealed.bytes:
                    is_checked = self.digest.hexdigest() == sealed.checksum
        if sealed and not is_checked:
            raise ArchiveError(
                f"{self._path} must begin with the {sealed.bytes} bytes that the manifest records ({sealed.rows} "
                f"steps, up to step {sealed.last_step}), got {size} bytes with {self._num_lines} whole lines: it is "
                "damaged; restore it from a copy, or continue the run without this archive by moving its folder away."
            )

    def read(self, *, first_step: int = 1, last_step: float = math.inf) -> Iterator[StepEntry]:
        """Yield the entries of these steps. Raises ArchiveError."""
        wanted = [(step, place) for step, place in self.places.items() if first_step <= step <= last_step]
        with self._path.open("rb") if wanted else BytesIO() as file:
            for step, (offset, length) in wanted:
                file.seek(offset)
                entry = parse_line(file.read(length), StepEntry, schema=LEDGER_SCHEMA, where=self._path)
                if entry is None:
                    raise ArchiveError(f"{self._path} must hold step {step} at byte {offset}: restore it from a copy.")
                yield entry


class LedgerWriter:
    """The single writer of a ledger. Records size and checksum in the manifest.

    Lines are durable before the manifest records them; after a crash, the next start records the rest.
    """

    def __init__(self, folder: Path, manifest: ManifestWriter) -> None:
        """Raises ArchiveError if the ledger is damaged, and OSError."""
        self._manifest = manifest
        self._reader = reader = LedgerReader(folder)
        reader.refresh(manifest.ledger)
        self._file = LineFile(
            folder / LEDGER, digest=reader.digest.copy(), num_bytes=reader.num_bytes, schema=LEDGER_SCHEMA
        )
        if self._file.num_bytes > (manifest.ledger.bytes if manifest.ledger else 0):
            self._seal()

    @property
    def last_step(self) -> int:
        return next(reversed(self._reader.places), 0)

    def lacks(self, entries: list[StepEntry]) -> list[StepEntry]:
        """First of `entries` that is missing or differs, and all after it."""
        known = self._reader.read(first_step=entries[0].step) if entries else iter(())
        number = next((at for at, entry in enumerate(entries) if next(known, None) != entry), len(entries))
        return entries[number:]

    def append(self, entries: list[StepEntry]) -> None:
        """Append steps durably. Can be retried after an OSError."""
        self._file.append(entries)
        self._reader.refresh(None)
        self._seal()

    def _seal(self) -> None:
        steps = self._reader.places
        entry = ShardEntry(
            file=LEDGER,
            rows=len(steps),
            groups=0,
            first_step=next(iter(steps), None),
            last_step=self.last_step or None,
            bytes=self._file.num_bytes,
            checksum=self._file.checksum,
            archived_at=time.time(),
        )
        self._manifest.append(entry)
