"""Archive: reads a folder of shards, even during a run. ArchiveMirror: copies an archive to an object store.

The mirror sends shards and ledger before the manifest that lists them. A run resumed on another machine starts from
this copy.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

import structlog

from slipstream.buffer.archive.index import (
    LEDGER,
    MANIFEST,
    LedgerReader,
    ShardEntry,
    parse_manifest,
    read_manifest,
)
from slipstream.buffer.archive.shards import LOCK, OVERFLOW, overflow_groups, read_column, read_shard
from slipstream.buffer.archive.trajectory_filter import Decode, StoredTrajectory, TrajectoryFilter
from slipstream.buffer.durable_files import write_durably
from slipstream.buffer.errors import ArchiveError, ShardError
from slipstream.buffer.object_folder import ObjectFolder
from slipstream.buffer.records import StepEntry
from slipstream.buffer.store import Store
from slipstream.configs.base import Record
from slipstream.runtime.run_folder import is_held

log = structlog.get_logger(__name__)

# --- images of prompts -----------------------------------------------------------------------------------------------
IMAGES = "images"
"""Subfolder of the archive with one file per image name."""


def write_images(folder: Path, images: Mapping[str, bytes]) -> None:
    """Write missing images durably. Raises OSError."""
    for name, data in images.items():
        path = folder / IMAGES / name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_durably(path, data)


def missing_images(folder: Path, names: Iterable[str]) -> list[str]:
    """Those of `names` that the archive lacks."""
    return [name for name in names if not (folder / IMAGES / name).is_file()]


def read_images(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Name -> bytes of the named images that the archive has."""
    # A name comes from a trajectory and must not lead out of the folder.
    paths = {name: folder / IMAGES / Path(name).name for name in names}
    return {name: path.read_bytes() for name, path in paths.items() if path.is_file()}


# --- the check -------------------------------------------------------------------------------------------------------
class ArchiveCheck(Record):
    """Result of checking an archive. Example: ArchiveCheck(shards=4, groups=4096, trajectories=32768, steps=128)."""

    shards: int
    groups: int
    trajectories: int
    steps: int = 0
    damaged: int = 0
    """Missing or damaged shards, plus 1 for a damaged ledger."""
    duplicated: int = 0
    """Trajectories beyond the first per id."""
    missing: int = 0
    """Trajectories in the ledger but in no shard and not in the overflow."""
    problems: list[str] = []
    """One sentence per defect."""

    @property
    def is_sound(self) -> bool:
        return not (self.duplicated or self.problems)


# --- reading ---------------------------------------------------------------------------------------------------------
class Archive:
    """The shards in the manifest, in the order written.

    Example: for stored in Archive(Path("runs/mine/archive")).read(TrajectoryFilter(outcome="retired")): ...
    """

    def __init__(self, folder: Path) -> None:
        """Read the manifest. Raises ArchiveError if it is missing or damaged."""
        self.folder = folder
        self._ledger = LedgerReader(folder)
        self.shards: list[ShardEntry] = []
        """Shards in the manifest when it was last read."""
        self.note = ""
        """One sentence if the manifest is incomplete after a crash or damage; else empty."""
        self.refresh()

    def refresh(self) -> None:
        """Read the manifest again. Raises ArchiveError as the constructor does."""
        manifest = read_manifest(self.folder)
        self.shards, self._sealed = manifest.shards, manifest.ledger
        self.note = ""
        if (manifest.unnamed or manifest.is_cut) and not is_held(self.folder, LOCK):
            lacking = next(iter(manifest.unnamed), "the end of its last line")
            self.note = (
                f"{self.folder / MANIFEST} must be whole, but lacks {lacking}: its writer was killed, and resuming the "
                "run completes it; or the file was damaged since, and must be restored from a copy."
            )

    def steps(self, *, first_step: int = 1, last_step: float = math.inf) -> list[StepEntry]:
        """Ledger of these steps; empty if absent. Raises ArchiveError if it is damaged."""
        self._ledger.refresh(self._sealed)
        return list(self._ledger.read(first_step=first_step, last_step=last_step))

    def read(
        self,
        selected: TrajectoryFilter | None = None,
        *,
        decode: Decode | None = None,
        on_refused: Callable[[ShardError], None] | None = None,
        is_newest_first: bool = False,
    ) -> Iterator[StoredTrajectory]:
        """Yield the selected trajectories in the order archived, or in reverse; members of a group are adjacent.

        Without `decode`, a condition on text is ignored. `on_refused` is called for each unreadable shard, which is
        skipped unless it raises; without it, the error is raised.
        """
        selected = selected or TrajectoryFilter()
        where = selected.expression()
        for shard in filter(selected.may_be_in, self.shards[::-1] if is_newest_first else self.shards):
            try:
                # Ids are 1 % of a shard; reading them first skips the rest of all shards but one.
                if selected.id is not None and selected.id not in read_column(self.folder, shard, "id"):
                    continue
                found = read_shard(self.folder, shard, where=where)
                for stored in reversed(list(found)) if is_newest_first else found:
                    if selected.matches(stored, decode=decode):
                        yield stored
            except ShardError as error:
                if on_refused is None:
                    raise
                on_refused(error)

    def check(self) -> ArchiveCheck:
        """Check checksums, unique ids, and the presence of the ledger's trajectories.

        Raises ArchiveError if the manifest cannot be read.
        """
        found: Counter[str] = Counter()
        damages, steps = [], []
        try:
            steps = self.steps()
        except ArchiveError as error:
            damages.append(str(error))
        # Read after the ledger: a live run writes the shards of a step before its ledger line.
        shards = read_manifest(self.folder).shards
        for shard in shards:
            try:
                found.update(read_column(self.folder, shard, "id"))
            except ShardError as error:
                damages.append(str(error))
        overflow = overflow_groups(self.folder)
        num_missing, problems = 0, damages.copy()
        for entry in steps:
            groups = zip(entry.group_ids, entry.trajectory_ids, strict=True)
            wanted = (name for group, names in groups if group not in overflow for name in names)
            if missing := [name for name in wanted if name not in found]:
                num_missing += len(missing)
                problems.append(
                    f"step {entry.step} must have all of its trajectories in shards, got {len(missing)} that are in "
                    f"none, such as {missing[0]}: restore the shard that held them."
                )
        return ArchiveCheck(
            shards=len(shards),
            groups=sum(shard.groups for shard in shards),
            trajectories=found.total(),
            steps=len(steps),
            damaged=len(damages),
            duplicated=found.total() - len(found),
            missing=num_missing,
            problems=problems,
        )


def whole_ledger(
    store: Store, archive: Archive | None, *, first_step: int = 1, last_step: float = math.inf
) -> list[StepEntry]:
    """Ledger of these steps of a run: the archived entries, if any, then the store's. Raises ReplayBufferError."""
    # In this order: an entry leaves the store only after the archive has it.
    newest = store.run_state().step
    stored = store.ledger(first_step=first_step)
    last_archived = stored[0].step - 1 if stored else newest
    found = [entry for entry in stored if entry.step <= last_step]
    if archive is None or first_step > last_archived:
        return found
    return archive.steps(first_step=first_step, last_step=min(last_archived, last_step)) + found


# --- the mirror in the object store -----------------------------------------------------------------------------------
_WHOLE_FILES = (LEDGER, MANIFEST)
"""Append-only, sent whole and in this order. Other files never change."""


class ArchiveMirror:
    """Mirror owned by the archive's writer. Life cycle: fetch -> send*."""

    def __init__(self, folder: Path, remote: ObjectFolder) -> None:
        self._folder = folder
        self._remote = remote
        self._sent = dict[str, int]()
        """Size of each object. An append-only file is its beginning."""

    def fetch(self) -> None:
        """Update the folder from the mirror. Raises StorageError, ArchiveError (other shards), OSError."""
        found = self._remote.objects()
        # Manifest first: the ledger may be longer than it says, but not shorter.
        grown = {name: self._remote.read(name) or b"" for name in reversed(_WHOLE_FILES)}
        self._sent = {name: info.size for name, info in found.items()}
        remote, local = grown[MANIFEST], _whole_lines(self._folder / MANIFEST)
        if local.startswith(remote):
            return
        if not remote.startswith(local):
            cause = "the run continued elsewhere since; move the folder away"
            raise ArchiveError(f"{self._folder} must have the first shards of {self._remote.uri}, got others: {cause}.")
        manifest = parse_manifest(remote, where=f"{self._remote.uri}/{MANIFEST}")
        shards = {shard.file: shard.checksum for shard in manifest.shards}
        others = [name for name in found if PurePosixPath(name).parts[:-1] in ((IMAGES,), (OVERFLOW,))]
        for name in (*shards, *others):
            path = self._folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if name not in found or not path.exists() or path.stat().st_size != found[name].size:
                self._remote.fetch(name, path, expected=shards.get(name, ""))
        # Manifest last, so that an interrupted fetch is repeated; a line without its shard would be damage.
        for name in _WHOLE_FILES:
            write_durably(self._folder / name, grown[name])
        log.info("archive_fetched", uri=self._remote.uri, shards=len(shards))

    def send(self) -> None:
        """Send what the object store lacks. Can be retried after a StorageError."""
        unchanging = [(self._folder / each.file, each.checksum) for each in read_manifest(self._folder).shards]
        for kind in (IMAGES, OVERFLOW):
            paths = sorted((self._folder / kind).glob("*"))
            unchanging += [(path, "") for path in paths if path.suffix != ".tmp"]
        for path, checksum in unchanging:
            name = str(path.relative_to(self._folder))
            if self._sent.get(name) != (size := path.stat().st_size):
                self._remote.send(path, name, expected=checksum)
                self._sent[name] = size
        for name in _WHOLE_FILES:
            path = self._folder / name
            # A ledger may have gigabytes, so it is read only when it has grown.
            sent = self._sent.get(name, 0)
            if path.is_file() and path.stat().st_size != sent and len(content := _whole_lines(path)) != sent:
                self._remote.write(name, content)
                self._sent[name] = len(content)


def _whole_lines(path: Path) -> bytes:
    """File's complete lines; empty if missing."""
    content = path.read_bytes() if path.is_file() else b""
    return content[: content.rfind(b"\n") + 1]
