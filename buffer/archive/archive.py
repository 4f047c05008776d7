"""Archive: a folder of shards, as its readers see it; also while a run still adds to it."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from buffer.archive.errors import ShardRefused
from buffer.archive.manifest import ShardEntry, read_manifest
from buffer.archive.shard_reader import check_shard, read_shard, trajectory_ids_of
from buffer.archive.stored_trajectory import StoredTrajectory
from buffer.archive.trajectory_filter import Decode, TrajectoryFilter
from buffer.trajectory import Record


def _raise(refused: ShardRefused) -> None:
    raise refused


class ArchiveCheck(Record):
    """What a check of an archive found. Example: ArchiveCheck(shards=4, groups=4096, trajectories=32768)."""

    shards: int
    """In the manifest."""
    groups: int
    """In the manifest."""
    trajectories: int
    """Rows that can be read."""
    duplicated: int = 0
    """Trajectories that are there more than once."""
    problems: list[str] = []
    """A sentence for each thing found wrong."""

    @property
    def is_sound(self) -> bool:
        """Whether nothing was found wrong."""
        return not self.duplicated and not self.problems


class Archive:
    """The shards that the manifest names, in the order they were written.

    Example: for stored in Archive(Path("runs/mine/archive")).read(TrajectoryFilter(outcome="retired")): ...
    """

    def __init__(self, folder: Path) -> None:
        """Read the manifest. Raises ArchiveFault when there is none, or it is damaged."""
        self.folder = folder
        self._shards = read_manifest(folder)

    @property
    def shards(self) -> list[ShardEntry]:
        """As they were when the archive was opened."""
        return self._shards

    def read(
        self,
        wanted: TrajectoryFilter | None = None,
        *,
        decode: Decode | None = None,
        on_refused: Callable[[ShardRefused], None] = _raise,
    ) -> Iterator[StoredTrajectory]:
        """Wanted trajectories, in the order archived; members of a group are neighbours.

        `decode` is needed for a filter on text. `on_refused` is told of each shard that cannot be read; the shard is
        left out unless it raises.
        """
        wanted = wanted or TrajectoryFilter()
        where = wanted.expression()
        for shard in filter(wanted.may_be_in, self._shards):
            try:
                # The ids alone are a hundredth of a shard, and all but one of them are in vain.
                if wanted.id is not None and wanted.id not in trajectory_ids_of(self.folder, shard):
                    continue
                for stored in read_shard(self.folder, shard, where=where):
                    if wanted.matches(stored, decode=decode):
                        yield stored
            except ShardRefused as refused:
                on_refused(refused)

    def check(self) -> ArchiveCheck:
        """Read every byte: checksums, and that no trajectory is there twice."""
        times: Counter[str] = Counter()
        problems = []
        for shard in self._shards:
            try:
                check_shard(self.folder, shard)
                times.update(trajectory_ids_of(self.folder, shard))
            except ShardRefused as refused:
                problems.append(str(refused))
        return ArchiveCheck(
            shards=len(self._shards),
            groups=sum(shard.groups for shard in self._shards),
            trajectories=times.total(),
            duplicated=times.total() - len(times),
            problems=problems,
        )
