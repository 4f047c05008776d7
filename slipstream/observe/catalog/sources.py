"""Sources of trajectories: a run's store, an archive or a file of rollouts, with the same methods."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from slipstream.buffer.archive.archive import Archive
from slipstream.buffer.archive.columns import SCHEMA, tabulate
from slipstream.buffer.archive.index import LEDGER, is_archive
from slipstream.buffer.archive.shards import open_shard
from slipstream.buffer.archive.trajectory_filter import Decode, StoredTrajectory, TrajectoryFilter
from slipstream.buffer.codec import unpack
from slipstream.buffer.errors import ReplayBufferError, ShardError
from slipstream.buffer.records import StepEntry
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
from slipstream.runtime.run_folder import parse_row

_STORE_TIMEOUT_S = 5.0
"""Limit for connecting to a server."""
_START_TIMEOUT_S = 30.0
"""Limit for a run's own server, which loads its data if it is started for this command."""


class ArchiveSource:
    """An archive, and the metrics and settings of its run folder if it still lies there."""

    def __init__(self, folder: Path, *, note: str = "") -> None:
        """Open the archive in `folder`. Raises ArchiveError if it is none."""
        self.archive = Archive(folder)
        self.note = " ".join(filter(None, (note, self.archive.note)))
        """Reason why the run's store, if that was asked for, or the end of the manifest is not read; else empty."""
        self._versions: dict[int, int] = {}
        self._ledger_bytes = -1
        self.num_unreadable = 0
        """Shards that could not be read; each is reported on stderr."""
        # Answers of `slipstream evaluate` and `generate` lie beside their settings.
        has_settings = (folder / "config.yaml").is_file()
        self.run_folder = folder.resolve() if has_settings else folder.resolve().parent
        """Folder that holds the run's other files, if they are still there."""

    def read(self, selected: TrajectoryFilter, *, decode: Decode | None) -> Iterator[StoredTrajectory]:
        """Yield the selected trajectories, group by group. `decode` is needed for a condition on text."""
        return self.archive.read(selected, decode=decode, on_refused=self._warn)

    def step_versions(self) -> dict[int, int]:
        """Return step -> the learner's version at its start, of the steps that are known. Raises ArchiveError."""
        ledger = self.archive.folder / LEDGER
        # It only grows, and is long: read again only then.
        size = ledger.stat().st_size if ledger.is_file() else 0
        if size != self._ledger_bytes:
            self._versions = {entry.step: entry.version for entry in self.archive.steps()}
            self._ledger_bytes = size
        if size:
            return self._versions
        # A row of metrics holds the version after its step, with which the next step begins.
        path = self.run_folder / "metrics.jsonl"
        if not path.is_file():
            return {}
        rows = filter(None, map(parse_row, path.read_bytes().splitlines(keepends=True)))
        return {1: 0} | {row["step"] + 1: row["version"] for row in rows if "version" in row}

    def model_paths(self) -> list[Path]:
        """Return folders that may hold the run's model, and so its tokenizer."""
        try:
            return _model_paths(read_config(self.run_folder), self.run_folder)
        except ConfigError:
            # There are no settings, or they are of another version of Slipstream: its archives are read all the same.
            return [self.run_folder / "final_model"]

    def _warn(self, error: ShardError) -> None:
        self.num_unreadable += 1
        print(f"warning: {error}", file=sys.stderr)


class StoreSource:
    """The store of a run, in progress or over, with the run's archive."""

    def __init__(self, store: RedisStore, *, run_folder: Path | None) -> None:
        """`run_folder` is None when only the server is known."""
        self.store = store
        self.run_folder = run_folder
        is_archived = run_folder is not None and is_archive(run_folder / "archive")
        self._archive = ArchiveSource(run_folder / "archive") if run_folder and is_archived else None
        self.note = self._archive.note if self._archive else ""
        self._versions: dict[int, int] = {}
        self._newest: StepEntry | None = None

    @property
    def archive(self) -> Archive | None:
        """The run's archive, if it has one."""
        return self._archive.archive if self._archive else None

    @property
    def num_unreadable(self) -> int:
        """Shards of the archive that could not be read."""
        return self._archive.num_unreadable if self._archive else 0

    def read(self, selected: TrajectoryFilter, *, decode: Decode | None) -> Iterator[StoredTrajectory]:
        """Yield the selected trajectories: the archive's, which are over, after those of the store.

        `decode` is needed for a condition on text.
        """
        self.store.run_state()
        group_id = group_of(lease_of(selected.id)) if selected.id else selected.group_id
        group_ids = None if group_id is None else {group_id}
        seen = set()
        for group in self.store.groups(group_ids=group_ids, state=selected.outcome):
            seen.add(group.id)
            for payload in group.payloads:
                stored = StoredTrajectory(unpack(payload), group.state, group.reason, group.steps)
                if selected.matches(stored, decode=decode):
                    yield stored
        # The archive last: a group that moves in between is found in both, and not in neither.
        for stored in self._archive.read(selected, decode=decode) if self._archive else ():
            if stored.trajectory.group_id not in seen:
                yield stored

    def step_versions(self) -> dict[int, int]:
        """Return step -> the learner's version at its start, of the steps that are known."""
        # A step that is done again after a roll back, and so every step after it, has another fence.
        first = self._newest.step if self._newest else 1
        entries = self.store.ledger(first_step=first)
        if self._newest and entries[:1] != [self._newest]:
            self._versions, entries = {}, self.store.ledger()
        self._versions |= {entry.step: entry.version for entry in entries}
        self._newest = entries[-1] if entries else None
        return self._versions

    def model_paths(self) -> list[Path]:
        """Return folders that may hold the run's model, and so its tokenizer."""
        try:
            config = msgspec.json.decode(self.store.run_config_json(), type=RunConfig)
        except msgspec.MsgspecError:
            # The run was begun by another version of Slipstream: its settings cannot be read.
            return [self.run_folder / "final_model"] if self.run_folder else []
        return _model_paths(config, self.run_folder)


class FileSource:
    """A file of rollouts, as `export` or verl writes it."""

    run_folder = None
    """It belongs to no run."""
    note, num_unreadable = "", 0

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_verl = path.suffix == ".jsonl" and is_verl_dump(path)
        """Whether it holds texts of verl, without tokens and log-probabilities."""

    def read(self, selected: TrajectoryFilter, *, decode: Decode | None) -> Iterator[StoredTrajectory]:
        """Yield the selected trajectories, in order. `decode` is needed for a condition on text."""
        found = read_verl_dump(self.path) if self.is_verl else (each.stored for each in read_rollouts(self.path))
        return (stored for stored in found if selected.matches(stored, decode=decode))

    def step_versions(self) -> dict[int, int]:
        """Return nothing: a file holds no ledger."""
        return {}

    def model_paths(self) -> list[Path]:
        """Return nothing: a file names no model."""
        return []


Source = ArchiveSource | StoreSource | FileSource


def decoder_of(source: Source, tokenizer: Path | None) -> TokenDecoder | None:
    """Return the given tokenizer, else that of the source; None if there is none. Raises ConfigError."""
    if isinstance(source, FileSource) and source.is_verl:
        return ByteDecoder()
    return find_decoder(tokenizer, candidates=source.model_paths())


@contextmanager
def open_source(where: str, *, run_name: str | None, runs_dir: Path, starts_server: bool = True) -> Iterator[Source]:
    """Open an archive, a run folder, a run of `runs_dir` by name, a file, or a server's address with `run_name`.

    Of a run whose store does not answer, the archive is opened, with a note. `starts_server`: start the embedded server
    of a run that is over, and stop it at the end. Raises ConfigError when `where` is none of them, and as
    `open_run_store` and `Archive` do.
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
        source: Source
        timeout_s = _START_TIMEOUT_S if starts_server else _STORE_TIMEOUT_S
        with ExitStack() as stack:
            try:
                folder = _run_folder(where, runs_dir)
                opened = open_run_store(folder, timeout_s=timeout_s, starts_server=starts_server)
                source = StoreSource(stack.enter_context(opened), run_folder=folder)
            except (ConfigError, ReplayBufferError) as error:
                archives = (each / "archive" for each in (Path(where), runs_dir / where))
                archive = next((each for each in archives if is_archive(each)), None)
                if archive is None:
                    raise
                source = ArchiveSource(archive, note=f"only the archive is read: {error}")
            yield source


def _run_folder(where: str, runs_dir: Path) -> Path:
    """Return a run folder, or that of a run of `runs_dir` by its name. Raises ConfigError."""
    for folder in (Path(where), runs_dir / where):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(
        f"SOURCE must be a run in {runs_dir}/, a run folder, an archive's folder, a file of `export` "
        f"({', '.join(FORMATS)}) or a server's address, got {where!r}: there is no such run, folder or file."
    )


def _model_paths(config: RunConfig, run_folder: Path | None) -> list[Path]:
    # A relative path holds from where the run was started: usually the folder that holds its `runs_dir`.
    path = Path(config.model.path)
    if run_folder is None:
        return [path]
    return [path, run_folder.resolve().parent.parent / path, run_folder / "final_model"]


class Block(NamedTuple):
    """Whole groups: their rows, and in the same order all that is stored of them."""

    rows: pa.Table
    dataset: ds.Dataset


class ArchivePart:
    """The shards of an archive; the manifest only grows, so each is read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._blocks: dict[str, Block] = {}
        self._refused: dict[str, str] = {}
        self._unfinished = ""

    @property
    def note(self) -> str:
        return " ".join(filter(None, (self._unfinished, *self._refused.values())))

    def blocks(self, step_versions: Mapping[int, int]) -> list[Block]:
        """Return a block per readable shard, none before the first. Raises ArchiveError for a damaged manifest."""
        if not is_archive(self._folder):
            return []
        archive = Archive(self._folder)
        self._unfinished = archive.note
        for shard in archive.shards:
            if shard.file in self._blocks or shard.file in self._refused:
                continue
            try:
                with open_shard(self._folder, shard) as dataset:
                    rows = read_rows(dataset, step_versions=dict(step_versions))
                    self._blocks[shard.file] = Block(rows, dataset)
            except ShardError as error:
                self._refused[shard.file] = str(error)
        return list(self._blocks.values())


class FilePart:
    """A file of rollouts. Parquet is read where it lies; JSON lines are converted in memory, each one checked."""

    note = ""

    def __init__(self, source: FileSource) -> None:
        """Raises ConfigError for a file that holds no trajectories."""
        if source.path.suffix == ".parquet":
            dataset = open_parquet(source.path)
        else:
            dataset = ds.dataset(tabulate(list(source.read(TrajectoryFilter(), decode=None))))
        self._block = Block(read_rows(dataset, step_versions={}), dataset)

    def blocks(self, step_versions: Mapping[int, int]) -> list[Block]:
        return [self._block]


class StorePart:
    """The groups of a live store. While it does not answer, those that it had last."""

    def __init__(self, store: RedisStore) -> None:
        self.note = ""
        self._store = store
        self._places: dict[str, GroupPlace] = {}
        self._groups: dict[str, pa.Table] = {}
        self._block = Block(ROWS.empty_table(), ds.dataset(SCHEMA.empty_table()))

    def blocks(self, step_versions: Mapping[int, int]) -> list[Block]:
        try:
            places = self._store.group_places()
            changed = {name for name, place in places.items() if self._places.get(name) != place or _is_open(place)}
            found = {group.id: group for group in self._store.groups(group_ids=changed)} if changed else {}
        except ReplayBufferError as error:
            self.note = f"the store cannot be read: {error}"
            return [self._block]
        self.note = ""
        if changed or places.keys() != self._places.keys():
            stored = {
                name: [
                    StoredTrajectory(unpack(each), group.state, group.reason, group.steps) for each in group.payloads
                ]
                for name, group in found.items()
            }
            self._enter(stored, places)
            table = pa.concat_tables([SCHEMA.empty_table(), *self._groups.values()])
            dataset = ds.dataset(table)
            self._block = Block(read_rows(dataset, step_versions=dict(step_versions)), dataset)
        return [self._block]

    def _enter(self, changed: dict[str, list[StoredTrajectory]], places: dict[str, GroupPlace]) -> None:
        table = tabulate([member for members in changed.values() for member in members])
        start = 0
        for name, members in changed.items():
            self._groups[name] = table.slice(start, len(members))
            start += len(members)
        self._groups = {name: group for name, group in self._groups.items() if name in places}
        self._places = places


Part = ArchivePart | StorePart | FilePart
"""`blocks` returns all that there are, those that have not changed being the same objects, and reads only what is new.

`note`: one sentence on what of it cannot be read; empty when all can."""


def without(live: Block, archived: list[Block]) -> Block:
    """Leave out the groups that are archived."""
    groups = live.rows["group_id"].combine_chunks().unique()
    both = [block.rows["group_id"].filter(pc.is_in(block.rows["group_id"], groups)) for block in archived]
    moved = pa.chunked_array([chunk for column in both for chunk in column.chunks], pa.string())
    if not len(moved):
        return live
    is_kept = pc.invert(pc.is_in(live.rows["group_id"], moved.combine_chunks()))
    return Block(live.rows.filter(is_kept), ds.dataset(live.dataset.to_table().filter(is_kept)))


def _is_open(place: GroupPlace) -> bool:
    return place.state == "open"
