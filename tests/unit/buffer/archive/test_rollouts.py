"""The groups of an archive as an endless, seeded sequence."""

from pathlib import Path

import pytest

from slipstream.buffer.archive.replay import Rollouts
from slipstream.buffer.codec import unpack
from slipstream.buffer.errors import ArchiveError
from tests.builders import make_finished, write_archive


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    poison = make_finished("99", outcome="quarantined", reason="claim_attempts", steps=[])
    shards = [[make_finished(str(10 * shard + each)) for each in range(3)] for shard in range(3)]
    dull = make_finished("98", outcome="rejected", reason="zero_signal", steps=[])
    return write_archive(tmp_path, *shards, [poison, dull])


def test_each_group_comes_once_an_epoch_and_quarantined_or_rejected_ones_never(folder: Path) -> None:
    rollouts = Rollouts(folder, seed=3)
    assert rollouts.num_groups == 9
    epochs = [rollouts.take(first=9 * epoch, count=9)[0] for epoch in range(3)]
    assert all(sorted(epoch) == ["0", "1", "10", "11", "12", "2", "20", "21", "22"] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_depends_only_on_the_seed(folder: Path) -> None:
    whole = Rollouts(folder, seed=3).take(first=0, count=20)
    parts = Rollouts(folder, seed=3)
    assert [parts.take(first=place, count=1)[1][0] for place in range(20)] == whole[1]
    assert Rollouts(folder, seed=4).take(first=0, count=20)[0] != whole[0]


def test_a_group_has_all_its_members_by_index(folder: Path) -> None:
    (group_id,), (payloads,) = Rollouts(folder, seed=3).take(first=5, count=1)
    members = [unpack(payload) for payload in payloads]
    assert [(member.group_id, member.index) for member in members] == [(group_id, 0), (group_id, 1)]


def test_an_archive_without_groups_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="must hold groups to train on, got none"):
        Rollouts(write_archive(tmp_path), seed=0)
