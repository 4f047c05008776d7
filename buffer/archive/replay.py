"""Replay: stored groups as an endless, seeded sequence, and the plan of a replay run.

Each epoch yields every group once, in random order of and within shards, so only one shard is in memory. The groups of
a step depend only on seed and step, so a resumed run continues where it stopped.
"""

from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import numpy as np

from slipstream.buffer.archive.archive import Archive, read_images
from slipstream.buffer.archive.shards import TRAINABLE, read_column, read_shard
from slipstream.buffer.archive.trajectory_filter import TrajectoryFilter
from slipstream.buffer.codec import encode, unpack
from slipstream.buffer.errors import ArchiveError
from slipstream.buffer.records import StoredGroup
from slipstream.buffer.sampling import Sample
from slipstream.configs.base import ConfigError, Record
from slipstream.configs.run import RunConfig

_STREAM = 3
"""Random stream, distinct from those of `sampling.py`."""


class Rollouts:
    """Endless sequence of archived groups for one learner.

    Example: Rollouts(Path("runs/mine/archive"), seed=0).take(first=0, count=16)
    """

    def __init__(self, folder: Path, *, seed: int) -> None:
        """Read the group ids. Raises ArchiveError if there are none, ShardError for a damaged shard."""
        self._folder = folder
        self._seed = seed
        self._shards = Archive(folder).shards
        columns = (read_column(folder, shard, "group_id", where=TRAINABLE) for shard in self._shards)
        self._group_ids = [list(dict.fromkeys(column)) for column in columns]
        self._loaded: tuple[str, dict[str, list[bytes]]] = ("", {})
        if not self.num_groups:
            raise ArchiveError(f"the archive {folder} must hold groups to train on, got none: name another.")

    @property
    def num_groups(self) -> int:
        return sum(map(len, self._group_ids))

    def take(self, *, first: int, count: int) -> tuple[list[str], list[list[bytes]]]:
        """Ids and encoded trajectories (by index) of `count` groups, from position `first` of the sequence."""
        found = [self._group_at(number) for number in range(first, first + count)]
        return [group_id for group_id, _ in found], [payloads for _, payloads in found]

    def images(self, names: Iterable[str]) -> dict[str, bytes]:
        return read_images(self._folder, names)

    def _group_at(self, number: int) -> tuple[str, list[bytes]]:
        epoch, offset = divmod(number, self.num_groups)
        for index in self._shuffled(len(self._shards), epoch):
            group_ids = self._group_ids[index]
            if offset < len(group_ids):
                group_id = group_ids[self._shuffled(len(group_ids), epoch, index)[offset]]
                shard = self._shards[index]
                # Consecutive groups share a shard, so cache one.
                if self._loaded[0] != shard.file:
                    rows = (stored.trajectory for stored in read_shard(self._folder, shard, where=TRAINABLE))
                    groups = groupby(rows, key=attrgetter("group_id"))
                    by_index = ((name, sorted(members, key=attrgetter("index"))) for name, members in groups)
                    self._loaded = (shard.file, {name: list(map(encode, members)) for name, members in by_index})
                return group_id, self._loaded[1][group_id]
            offset -= len(group_ids)
        raise AssertionError("every group of an epoch is in one of its shards")

    def _shuffled(self, count: int, *path: int) -> list[int]:
        # Across versions, numpy keeps the streams of bit generators stable, but not `permutation`.
        return np.argsort(np.random.PCG64([self._seed, _STREAM, *path]).random_raw(count), kind="stable").tolist()


# --- the plan of a replay ---------------------------------------------------------------------------------------------
class ReplayPlan(Record):
    """Training data of a replay.

    Example: ReplayPlan(groups=[StoredGroup(id="17", ...), ...], samples={1: Sample(["17", "12"], ...), ...})
    """

    groups: list[StoredGroup]
    """By the first step that trained on them; groups without a known step come last, in archive order."""
    samples: dict[int, Sample]
    """Step -> its claim by the ledger; empty to claim in the order of `groups`."""


def plan_replay(run: RunConfig) -> ReplayPlan:
    """Read the archive that the run replays.

    Steps repeat the ledger's batches if all have the replay's size; otherwise, they claim the stored groups in order.
    Raises ArchiveError, or ConfigError if the archive holds too few steps.
    """
    archive, per_step = Path(run.replay.path), run.claimed_groups_per_step
    groups, steps = stored_groups(archive), Archive(archive).steps()
    if any(len(entry.group_ids) != per_step for entry in steps):
        steps = []
    num_steps = len(steps) or len(groups) // per_step
    if run.learner.max_steps > num_steps:
        must = f"learner.max_steps must be <= {num_steps} to replay {archive}, got {run.learner.max_steps}"
        raise ConfigError(f"{must}: it holds {len(groups)} groups and {num_steps} steps.")
    replayed = steps[: run.learner.max_steps]
    stored = {group.id: [unpack(payload).id for payload in group.payloads] for group in groups}
    for entry in replayed:
        for group_id, names in zip(entry.group_ids, entry.trajectory_ids, strict=True):
            if stored.get(group_id) != names:
                raise ArchiveError(
                    f"{archive} must hold all trajectories of step {entry.step} in its ledger, {', '.join(names)}, got "
                    f"{', '.join(stored.get(group_id, [])) or 'none of them'}: `slipstream data verify {archive}` "
                    "lists what else is missing."
                )
    ones, none = [1.0] * per_step, [False] * per_step
    plan = {each.step: Sample(each.group_ids, each.weights or ones, each.reused or none) for each in replayed}
    return ReplayPlan(groups, plan)


def stored_groups(archive: Path) -> list[StoredGroup]:
    """Retired groups (trained on, or imported). Raises ArchiveError."""
    rows = Archive(archive).read(TrajectoryFilter(outcome="retired"))
    groups = []
    for group_id, members in groupby(rows, key=lambda stored: stored.trajectory.group_id):
        group = sorted(members, key=lambda stored: stored.trajectory.index)
        payloads = [encode(stored.trajectory) for stored in group]
        groups.append(StoredGroup(group_id, "retired", "", group[0].steps, payloads))
    # Stable: groups of one step keep the archive's order.
    return sorted(groups, key=lambda group: (not group.steps, group.steps[:1]))
