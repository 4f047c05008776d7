"""Archive: a folder of shards, as its readers see it; also while a run still adds to it."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from slipstream.buffer.archive.ledger import read_ledger
from slipstream.buffer.archive.manifest import ShardEntry, read_manifest
from slipstream.buffer.archive.shard_reader import check_shard, read_shard, trajectory_ids_of
from slipstream.buffer.archive.shard_writer import aside_path
from slipstream.buffer.archive.trajectory_filter import Decode, StoredTrajectory, TrajectoryFilter
from slipstream.buffer.errors import ShardError
from slipstream.buffer.records import StepEntry
from slipstream.buffer.trajectory import Record


# @@ A check of an archive: every shard against the manifest, every step of the ledger against the shards.
class ArchiveCheck(Record):
    """What a check of an archive found. Example: ArchiveCheck(shards=4, groups=4096, trajectories=32768, steps=128)."""

    shards: int
    """In the manifest."""
    groups: int
    """In the manifest."""
    trajectories: int
    """Rows that can be read."""
    steps: int = 0
    """In the ledger."""
    damaged: int = 0
    """Shards that cannot be read."""
    duplicated: int = 0
    """Trajectories that are there more than once."""
    missing: int = 0
    """Trajectories of the ledger's steps that are not there."""
    problems: list[str] = []
    """A sentence for each thing found wrong."""

    @property
    def is_sound(self) -> bool:
        """Whether nothing was found wrong."""
        return not (self.duplicated or self.problems)


def check_archive(folder: Path, shards: list[ShardEntry], steps: list[StepEntry]) -> ArchiveCheck:
    """Read every byte."""
    found: Counter[str] = Counter()
    damages = []
    for shard in shards:
        try:
            check_shard(folder, shard)
            found.update(trajectory_ids_of(folder, shard))
        except ShardError as refused:
            damages.append(str(refused))
    missing = {entry.step: _missing(folder, entry, found) for entry in steps}
    return ArchiveCheck(
        shards=len(shards),
        groups=sum(shard.groups for shard in shards),
        trajectories=found.total(),
        steps=len(steps),
        damaged=len(damages),
        duplicated=found.total() - len(found),
        missing=sum(map(len, missing.values())),
        problems=damages + [_tell(step, names) for step, names in missing.items() if names],
    )


def _missing(folder: Path, entry: StepEntry, found: Counter[str]) -> list[str]:
    """Trajectories of a step that are in no shard; those of groups that were set aside are not missed."""
    return [
        name
        for group, names in zip(entry.group_ids, entry.trajectory_ids, strict=True)
        for name in names
        if name not in found and not aside_path(folder, group).is_file()
    ]


def _tell(step: int, missing: list[str]) -> str:
    return (
        f"step {step} must have all it trained on in a shard, got {len(missing)} trajectories that are in none, such "
        f"as {missing[0]}: restore the shard that held them."
    )


def _raise(refused: ShardError) -> None:
    raise refused


class Archive:
    """The shards that the manifest names, in the order they were written.

    Example: for stored in Archive(Path("runs/mine/archive")).read(TrajectoryFilter(outcome="retired")): ...
    """

    def __init__(self, folder: Path) -> None:
        """Read the manifest. Raises ArchiveError when there is none, or it is damaged."""
        self.folder = folder
        self._shards = read_manifest(folder)

    @property
    def shards(self) -> list[ShardEntry]:
        """As they were when the archive was opened."""
        return self._shards

    def steps(self) -> list[StepEntry]:
        """The ledger, in order; empty where the archive has none. Raises ArchiveError."""
        return read_ledger(self.folder)

    def read(
        self,
        wanted: TrajectoryFilter | None = None,
        *,
        decode: Decode | None = None,
        on_refused: Callable[[ShardError], None] = _raise,
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
            except ShardError as refused:
                on_refused(refused)

    def check(self) -> ArchiveCheck:
        """Read every byte: checksums, that no trajectory is there twice, and that those of the ledger are there.

        Raises ArchiveError when the ledger cannot be read.
        """
        return check_archive(self.folder, self._shards, self.steps())
