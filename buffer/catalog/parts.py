"""Parts of a catalog: each reads one source of trajectories, again and again while a run adds to it."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from slipstream.buffer.archive.archive import Archive
from slipstream.buffer.archive.columns import SCHEMA, tabulate
from slipstream.buffer.archive.manifest import is_archive
from slipstream.buffer.archive.shard_reader import open_shard
from slipstream.buffer.archive.trajectory_filter import StoredTrajectory, TrajectoryFilter
from slipstream.buffer.catalog.rollout_files import open_parquet
from slipstream.buffer.catalog.rows import ROWS, read_rows
from slipstream.buffer.catalog.sources import FileSource
from slipstream.buffer.codec import unpack
from slipstream.buffer.errors import ReplayBufferError, ShardError
from slipstream.buffer.redis.store import GroupPlace, RedisStore


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
