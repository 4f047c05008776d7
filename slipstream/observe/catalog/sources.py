"""Sources of trajectories: a run's store, an archive, or a rollout file."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from slipstream.buffer.archive.archive import Archive, whole_ledger
from slipstream.buffer.archive.index import is_archive
from slipstream.buffer.archive.shards import SCHEMA, open_shard, tabulate
from slipstream.buffer.archive.trajectory_filter import Decode, StoredTrajectory, TrajectoryFilter
from slipstream.buffer.codec import unpack
from slipstream.buffer.errors import ReplayBufferError, ShardError
from slipstream.buffer.records import StepEntry, StoredGroup
from slipstream.buffer.redis.run_store import open_run_store
from slipstream.buffer.redis.store import GroupPlace, RedisStore
from slipstream.buffer.trajectory import group_of, lease_of
from slipstream.configs.base import ConfigError, require_folder
from slipstream.configs.run import RunConfig, read_config
from slipstream.observe.catalog.rollout_files import (
    FORMATS,
    ByteDecoder,
    is_verl_dump,
    open_parquet,
    read_rollouts,
    read_verl_dump,
)
from slipstream.observe.catalog.rows import ROWS, read_rows
from slipstream.observe.catalog.token_decoder import TokenDecoder, find_decoder
from slipstream.observe.metrics_rows import read_rows as read_metrics
from slipstream.observe.reader import RunReader

_STORE_TIMEOUT_S = 5.0

Found = Iterator[StoredTrajectory]


class Block(NamedTuple):
    """Rows of whole groups, and their full trajectories in the same order."""

    rows: pa.Table
    dataset: ds.Dataset


class StepVersions:
    """The learner's version at the start of each step."""

    def __init__(self) -> None:
        self._found: dict[int, int] = {}
        self._newest: StepEntry | None = None

    def update(self, read: Callable[[int], list[StepEntry]]) -> dict[int, int]:
        """Step -> version, decoding only new entries. `read` returns the ledger from a step on."""
        entries = read(self._newest.step if self._newest else 1)
        # After a rollback, the newest known step has no entry or a new fence.
        if self._newest and entries[:1] != [self._newest]:
            self._found, entries = {}, read(1)
        self._found |= {entry.step: entry.version for entry in entries}
        self._newest = entries[-1] if entries else None
        return self._found


class ArchiveSource:
    """An archive, which may grow while it is read."""

    def __init__(self, folder: Path, *, note: str = "") -> None:
        """`note`: why the store is not read. Raises ArchiveError if `folder` is not an archive."""
        self.archive = Archive(folder)
        self._note = note
        self._blocks: dict[str, Block] = {}
        self._refused: dict[str, str] = {}
        self._versions = StepVersions()
        self.num_unreadable = 0
        """Shards that `read` reported on stderr."""
        # Archives of `slipstream evaluate` and `generate` contain their settings.
        has_settings = (folder / "config.yaml").is_file()
        self.run_folder = folder.resolve() if has_settings else folder.resolve().parent
        """Folder with the run's other files, if any."""

    @property
    def parts(self) -> "list[Source]":
        return [self]

    @property
    def notes(self) -> list[str]:
        """One sentence on each part that cannot be read."""
        return [note for note in (self._note, self.archive.note, *self._refused.values()) if note]

    def read(self, selected: TrajectoryFilter, *, decode: Decode | None, is_newest_first: bool = False) -> Found:
        """Yield trajectories by group. A text condition needs `decode`."""
        return self.archive.read(selected, decode=decode, on_refused=self._warn, is_newest_first=is_newest_first)

    def blocks(self, step_versions: Mapping[int, int]) -> list[Block]:
        """Return a block per readable shard. Raises ArchiveError for a damaged manifest."""
        self.archive.refresh()
        for shard in self.archive.shards:
            if shard.file in self._blocks or shard.file in self._refused:
                continue
            try:
                with open_shard(self.archive.folder, shard) as dataset:
                    self._blocks[shard.file] = Block(read_rows(dataset, step_versions=step_versions), dataset)
            except ShardError as error:
                self._refused[shard.file] = str(error)
        return list(self._blocks.values())

    def step_versions(self) -> dict[int, int]:
        """Return known step -> the learner's version at its start. Raises ArchiveError."""
        if found := self._versions.update(lambda first: self.archive.steps(first_step=first)):
            return found
        # A metrics row has the version after its step, with which the next step starts.
        rows = read_metrics(self.run_folder / "metrics.jsonl")
        return ({1: 0} if rows else {}) | {row["step"] + 1: row["version"] for row in rows if "version" in row}

    def model_paths(self) -> list[Path]:
        """Return folders that may hold the run's tokenizer."""
        try:
            return _model_paths(read_config(self.run_folder), self.run_folder)
        except ConfigError:
            # Missing, or from another version of Slipstream.
            return [self.run_folder / "final_model"]

    def _warn(self, error: ShardError) -> None:
        self.num_unreadable += 1
        print(f"warning: {error}", file=sys.stderr)


class StoreSource:
    """The store and archive of a run, live or over."""

    def __init__(self, store: RedisStore, *, run_folder: Path | None) -> None:
        """`run_folder`: None if only the server is known."""
        self.store = store
        self.run_folder = run_folder
        self._problem = ""
        self._archive: ArchiveSource | None = None
        self._find_archive()
        self._places: dict[str, GroupPlace] = {}
        self._groups: dict[str, pa.Table] = {}
        self._block = Block(ROWS.empty_table(), ds.dataset(SCHEMA.empty_table()))
        self._versions = StepVersions()

    def _find_archive(self) -> ArchiveSource | None:
        if self._archive is None and self.run_folder and is_archive(self.run_folder / "archive"):
            self._archive = ArchiveSource(self.run_folder / "archive")
        return self._archive

    @property
    def parts(self) -> "list[Source]":
        """The archive, which a live run may create later, and the store."""
        archive = self._find_archive()
        return [archive, self] if archive else [self]

    @property
    def notes(self) -> list[str]:
        return [*(self._archive.notes if self._archive else []), *([self._problem] if self._problem else [])]

    @property
    def archive(self) -> Archive | None:
        return self._archive.archive if self._archive else None

    @property
    def num_unreadable(self) -> int:
        return self._archive.num_unreadable if self._archive else 0

    def read(self, selected: TrajectoryFilter, *, decode: Decode | None, is_newest_first: bool = False) -> Found:
        """Yield the store's trajectories, then the archive's."""
        self.store.run_state()
        group_id = group_of(lease_of(selected.id)) if selected.id else selected.group_id
        group_ids = None if group_id is None else {group_id}
        seen = set()
        groups = self.store.groups(group_ids=group_ids, state=selected.outcome)
        for group in reversed(list(groups)) if is_newest_first else groups:
            seen.add(group.id)
            yield from (stored for stored in _members(group) if selected.matches(stored, decode=decode))
        # Read the archive last: a group that moves in between is found twice, not lost.
        archive = self._archive
        for stored in archive.read(selected, decode=decode, is_newest_first=is_newest_first) if archive else ():
            if stored.trajectory.group_id not in seen:
                yield stored

    def blocks(self, step_versions: Mapping[int, int]) -> list[Block]:
        """One block; the previous one while the store does not answer."""
        try:
            places = self.store.group_places()
            changed = {key for key, place in places.items() if self._places.get(key) != place or place.state == "open"}
            found = list(self.store.groups(group_ids=changed)) if changed else []
        except ReplayBufferError as error:
            self._problem = f"the store cannot be read: {error}"
            return [self._block]
        self._problem = ""
        if changed or places.keys() != self._places.keys():
            members = {group.id: _members(group) for group in found}
            table, start = tabulate([member for group in members.values() for member in group]), 0
            for name, group in members.items():
                self._groups[name] = table.slice(start, len(group))
                start += len(group)
            self._groups = {name: group for name, group in self._groups.items() if name in places}
            self._places = places
            dataset = ds.dataset(pa.concat_tables([SCHEMA.empty_table(), *self._groups.values()]))
            self._block = Block(read_rows(dataset, step_versions=step_versions), dataset)
        return [self._block]

    def step_versions(self) -> dict[int, int]:
        return self._versions.update(lambda first: whole_ledger(self.store, self.archive, first_step=first))

    def model_paths(self) -> list[Path]:
        try:
            config = msgspec.json.decode(self.store.run_config_json(), type=RunConfig)
        except msgspec.MsgspecError:
            # Another version of Slipstream wrote the settings.
            return [self.run_folder / "final_model"] if self.run_folder else []
        return _model_paths(config, self.run_folder)


class FileSource:
    """A rollout file of `export` or verl."""

    run_folder = None
    num_unreadable = 0

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []
        self.is_verl = path.suffix == ".jsonl" and is_verl_dump(path)
        self._block: Block | None = None

    @property
    def parts(self) -> "list[Source]":
        return [self]

    def read(self, selected: TrajectoryFilter, *, decode: Decode | None, is_newest_first: bool = False) -> Found:
        found = read_verl_dump(self.path) if self.is_verl else (each.stored for each in read_rollouts(self.path))
        ordered = reversed(list(found)) if is_newest_first else found
        return (stored for stored in ordered if selected.matches(stored, decode=decode))

    def blocks(self, step_versions: Mapping[int, int]) -> list[Block]:
        """Return a block: Parquet in place, JSON lines in memory. Raises ConfigError."""
        if self._block is None:
            if self.path.suffix == ".parquet":
                dataset = open_parquet(self.path)
            else:
                dataset = ds.dataset(tabulate(list(self.read(TrajectoryFilter(), decode=None))))
            self._block = Block(read_rows(dataset, step_versions={}), dataset)
        return [self._block]

    def step_versions(self) -> dict[int, int]:
        return {}

    def model_paths(self) -> list[Path]:
        return []


Source = ArchiveSource | StoreSource | FileSource
"""`blocks` reads only new data; unchanged blocks are the same objects. A moving group may be in two `parts`."""


def _members(group: StoredGroup) -> list[StoredTrajectory]:
    return [StoredTrajectory(unpack(each), group.state, group.reason, group.steps) for each in group.payloads]


def decoder_of(source: Source, tokenizer: Path | None) -> TokenDecoder | None:
    """The given tokenizer, or else the source's. Raises ConfigError."""
    if isinstance(source, FileSource) and source.is_verl:
        return ByteDecoder()
    return find_decoder(tokenizer, candidates=source.model_paths())


@contextmanager
def open_source(where: str, *, run_name: str | None, runs_dir: Path, starts_server: bool = True) -> Iterator[Source]:
    """Open an archive, a run by folder or name, a file, or a server's address with `run_name`.

    If a store does not answer, opens the archive with a note. `starts_server`: start a finished run's embedded server.
    Raises ConfigError, and the errors of `open_run_store` and `Archive`.
    """
    require_folder("SOURCE", where)
    if "://" in where:
        if run_name is None:
            raise ConfigError(f"--run must name a run when a server is looked into, got nothing beside {where}.")
        with open_run_store(where, run_name, timeout_s=_STORE_TIMEOUT_S) as store:
            yield StoreSource(store, run_folder=None)
    elif is_archive(Path(where)):
        yield ArchiveSource(Path(where))
    elif Path(where).is_file() and Path(where).suffix in FORMATS:
        yield FileSource(Path(where))
    else:
        folders = (Path(where), runs_dir / where)
        source: Source
        with ExitStack() as stack:
            try:
                folder = next((each for each in folders if (each / "config.yaml").is_file()), None)
                if folder is None:
                    raise ConfigError(
                        f"SOURCE must be a run in {runs_dir}/, a run folder, an archive's folder, a file of `export` "
                        f"({', '.join(FORMATS)}) or a server's address, got {where!r}: there is no such run, folder or "
                        "file."
                    )
                store = stack.enter_context(RunReader(folder).open_store(starts_server=starts_server))
                source = StoreSource(store, run_folder=folder)
            except (ConfigError, ReplayBufferError) as error:
                archive = next((each / "archive" for each in folders if is_archive(each / "archive")), None)
                if archive is None:
                    raise
                source = ArchiveSource(archive, note=f"only the archive is read: {error}")
            yield source


def _model_paths(config: RunConfig, run_folder: Path | None) -> list[Path]:
    # Relative to the run's working directory, usually the parent of its `runs_dir`.
    path = Path(config.model.path)
    if run_folder is None:
        return [path]
    return [path, run_folder.resolve().parent.parent / path, run_folder / "final_model"]


def without(live: Block, archived: list[Block]) -> Block:
    """Drop archived groups from the live block."""
    groups = live.rows["group_id"].combine_chunks().unique()
    both = [block.rows["group_id"].filter(pc.is_in(block.rows["group_id"], groups)) for block in archived]
    moved = pa.chunked_array([chunk for column in both for chunk in column.chunks], pa.string())
    if not len(moved):
        return live
    is_kept = pc.invert(pc.is_in(live.rows["group_id"], moved.combine_chunks()))
    return Block(live.rows.filter(is_kept), ds.dataset(live.dataset.to_table().filter(is_kept)))
