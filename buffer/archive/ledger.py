"""The step ledger of an archive: what each step trained on, so that the archive alone can be replayed, batch by batch.

A line is a step whose groups are all archived and that a durable checkpoint covers. A store that came back from disk
without its last seconds may have a step done again: its second line counts, and the lines after its first do not.
"""

import time
from pathlib import Path

import xxhash

from slipstream.buffer.archive.manifest import LEDGER, ManifestWriter, ShardEntry
from slipstream.buffer.durable_files import LineFile, parse_line, parse_lines
from slipstream.buffer.errors import ArchiveError
from slipstream.buffer.records import StepEntry

LEDGER_SCHEMA = 1
"""Raised with every change of StepEntry that a reader of the previous one would misread."""


def read_ledger(folder: Path, sealed: ShardEntry | None) -> list[StepEntry]:
    """Return the steps in order; `sealed` is the manifest's entry of the ledger, None if it has none.

    Raises ArchiveError for a ledger that is damaged, or shorter than the manifest says.
    """
    return list(_parse(folder / LEDGER, sealed)[0].values())


class LedgerWriter:
    """The one writer of an archive's ledger, which records size and checksum in the manifest.

    The lines are durable before the manifest says so: after a crash in between the ledger is longer than recorded,
    never shorter, and the next start records the rest.
    """

    def __init__(self, folder: Path, manifest: ManifestWriter) -> None:
        """Raises ArchiveError when the ledger is damaged, OSError."""
        self._manifest = manifest
        self._entries, content = _parse(folder / LEDGER, manifest.ledger)
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


def _parse(path: Path, sealed: ShardEntry | None) -> tuple[dict[int, StepEntry], bytes]:
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
