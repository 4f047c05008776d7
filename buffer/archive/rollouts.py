"""Rollouts: the groups of an archive as an endless, seeded sequence, to be trained on beside a run's own.

Each group comes once per epoch. An epoch visits the shards in a random order, and the groups within a shard in another,
so that one shard at a time is in memory. The groups of a step depend on seed and step alone, so that a resumed run
continues where it stopped.
"""

from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import numpy as np

from slipstream.buffer.archive.archive import Archive, read_images
from slipstream.buffer.archive.manifest import ShardEntry
from slipstream.buffer.archive.shard_reader import TRAINABLE, read_column, read_shard
from slipstream.buffer.codec import encode
from slipstream.buffer.errors import ArchiveError

_STREAM = 3
"""Keeps these random numbers apart from those of `sampling.py`, which use the same seed."""


class Rollouts:
    """The sequence, for one learner.

    Example: Rollouts(Path("runs/mine/archive"), seed=0).take(first=0, count=16)
    """

    def __init__(self, folder: Path, *, seed: int) -> None:
        """Read the group ids. Raises ArchiveError when there are none, or a shard is damaged."""
        self._folder = folder
        self._seed = seed
        self._shards = Archive(folder).shards
        self._group_ids = [
            list(dict.fromkeys(read_column(folder, shard, "group_id", where=TRAINABLE))) for shard in self._shards
        ]
        self._loaded: tuple[str, dict[str, list[bytes]]] = ("", {})
        if not self.num_groups:
            raise ArchiveError(f"the archive {folder} must hold groups to train on, got none: name another.")

    @property
    def num_groups(self) -> int:
        """Number of groups in an epoch."""
        return sum(map(len, self._group_ids))

    def take(self, *, first: int, count: int) -> tuple[list[str], list[list[bytes]]]:
        """Return ids and encoded trajectories (by index) of `count` groups from number `first` of the sequence on."""
        found = [self._group_at(number) for number in range(first, first + count)]
        return [group_id for group_id, _ in found], [payloads for _, payloads in found]

    def images(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return the bytes of the named images that the archive has."""
        return read_images(self._folder, names)

    def _group_at(self, number: int) -> tuple[str, list[bytes]]:
        epoch, offset = divmod(number, self.num_groups)
        for index in self._shuffled(len(self._shards), epoch):
            group_ids = self._group_ids[index]
            if offset < len(group_ids):
                group_id = group_ids[self._shuffled(len(group_ids), epoch, index)[offset]]
                return group_id, self._payloads(self._shards[index])[group_id]
            offset -= len(group_ids)
        raise AssertionError("every group of an epoch is in one of its shards")

    def _shuffled(self, count: int, *path: int) -> list[int]:
        # Raw draws and a stable sort: numpy keeps the streams of its bit generators, not its `permutation`.
        draws = np.random.PCG64([self._seed, _STREAM, *path]).random_raw(count)
        return np.argsort(draws, kind="stable").tolist()

    def _payloads(self, shard: ShardEntry) -> dict[str, list[bytes]]:
        # Consecutive groups lie in one shard, so that the newest alone is kept.
        if self._loaded[0] != shard.file:
            rows = read_shard(self._folder, shard, where=TRAINABLE)
            groups = groupby((stored.trajectory for stored in rows), key=lambda trajectory: trajectory.group_id)
            payloads = {name: list(map(encode, sorted(members, key=attrgetter("index")))) for name, members in groups}
            self._loaded = (shard.file, payloads)
        return self._loaded[1]
