"""Batches of a replay with and without a ledger, and groups of an archive as an endless, seeded sequence."""

from pathlib import Path

import pytest

from slipstream.buffer.archive.index import LedgerWriter, ManifestWriter
from slipstream.buffer.archive.replay import Rollouts, plan_replay
from slipstream.buffer.codec import unpack
from slipstream.buffer.errors import ArchiveError
from slipstream.buffer.records import Claim, StepEntry
from slipstream.buffer.redis.run_store import open_own_store
from slipstream.configs.base import ConfigError
from slipstream.configs.run import RunConfig
from tests.builders import make_finished, make_run, write_archive
from tests.contract.stores import OLDEST_FIRST
from tests.unit.buffer.archive.test_ledger import make_step


def make_replay(archive: Path, *, steps: int = 2, groups: int = 2) -> RunConfig:
    learner = {"max_steps": steps, "prompts_per_step": groups}
    return make_run(mode="replay", replay={"path": str(archive)}, learner=learner, weights={"transport": "memory"})


def archive_of(folder: Path, *entries: StepEntry) -> Path:
    """Five groups that were archived in another order than that of the steps."""
    steps = {"4": [1], "3": [1], "2": [2], "1": [2, 3], "0": [3]}
    write_archive(folder, [make_finished(group, steps=used) for group, used in steps.items()])
    LedgerWriter(folder, ManifestWriter(folder)).append(list(entries))
    return folder


LEDGER = (
    make_step(1, "3", "4", weights=[0.5, 1.0]),
    make_step(2, "2", "1"),
    make_step(3, "0", "1", reused=[False, True]),
)


def test_a_store_yields_the_batches_of_the_ledger_and_a_group_as_often_as_it_was_used(tmp_path: Path) -> None:
    plan = plan_replay(make_replay(archive_of(tmp_path, *LEDGER), steps=3))
    assert plan.samples[1].weights == [0.5, 1.0]
    assert plan.samples[3].reused == [False, True]
    with open_own_store(tmp_path / "store", "run") as store:
        store.open_run("run", config_json="{}", num_rows=1, seed=0)
        store.load(plan.groups, samples=plan.samples)
        for entry in LEDGER:
            claim = store.claim(step=entry.step, version=entry.version, num_groups=2, rules=OLDEST_FIRST, lease_s=60.0)
            assert isinstance(claim, Claim)
            assert claim.group_ids == entry.group_ids
            store.commit(claim, entry)
        assert store.audit().is_sound


def test_without_a_ledger_or_with_other_sizes_groups_are_in_the_order_of_their_steps_and_those_without_come_last(
    tmp_path,
):
    plan = plan_replay(make_replay(archive_of(tmp_path / "a")))
    assert ([group.id for group in plan.groups], plan.samples) == (["4", "3", "2", "1", "0"], {})
    plan = plan_replay(make_replay(archive_of(tmp_path / "b", *LEDGER), steps=5, groups=1))
    assert (len(plan.groups), plan.samples) == (5, {})
    archive = write_archive(tmp_path / "c", [make_finished("0", steps=[]), make_finished("1", steps=[7])])
    assert [group.id for group in plan_replay(make_replay(archive, steps=1)).groups] == ["1", "0"]


@pytest.mark.parametrize(("entries", "steps", "most"), [(LEDGER, 4, 3), ((), 3, 2)])
def test_more_steps_than_are_stored_are_refused(tmp_path, entries, steps, most):
    with pytest.raises(ConfigError, match=rf"learner.max_steps must be <= {most} to replay .*, got {steps}"):
        plan_replay(make_replay(archive_of(tmp_path, *entries), steps=steps))


def test_a_step_with_missing_trajectories_is_refused(tmp_path: Path) -> None:
    archive = archive_of(tmp_path, *LEDGER[:1], make_step(2, "2", "9"))
    with pytest.raises(ArchiveError, match="must hold all trajectories of step 2 in its ledger, 9-0-0, 9-0-1, got"):
        plan_replay(make_replay(archive))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    poison = make_finished("99", state="quarantined", reason="claim_attempts", steps=[])
    shards = [[make_finished(str(10 * shard + each)) for each in range(3)] for shard in range(3)]
    dull = make_finished("98", state="rejected", reason="zero_advantage", steps=[])
    return write_archive(tmp_path, *shards, [poison, dull])


def test_each_group_comes_once_an_epoch_and_quarantined_or_rejected_ones_never(folder: Path) -> None:
    rollouts = Rollouts(folder, seed=3)
    assert rollouts.num_groups == 9
    epochs = [rollouts.take(first=9 * epoch, count=9)[0] for epoch in range(3)]
    assert all(sorted(epoch) == ["0", "1", "10", "11", "12", "2", "20", "21", "22"] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_depends_only_on_the_seed_and_members_come_by_index(folder: Path) -> None:
    whole = Rollouts(folder, seed=3).take(first=0, count=20)
    parts = Rollouts(folder, seed=3)
    assert [parts.take(first=place, count=1)[1][0] for place in range(20)] == whole[1]
    assert Rollouts(folder, seed=4).take(first=0, count=20)[0] != whole[0]
    members = [unpack(payload) for payload in whole[1][5]]
    assert [(member.group_id, member.index) for member in members] == [(whole[0][5], 0), (whole[0][5], 1)]


def test_an_archive_without_groups_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="must hold groups to train on, got none"):
        Rollouts(write_archive(tmp_path), seed=0)
