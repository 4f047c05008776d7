"""Batches of a replay, from an archive with and without a ledger."""

from pathlib import Path

import pytest

from slipstream.buffer.archive.index import LedgerWriter, ManifestWriter
from slipstream.buffer.archive.replay import plan_replay
from slipstream.buffer.errors import ArchiveError, ShardError
from slipstream.buffer.records import Claim, StepEntry
from slipstream.buffer.redis.run_store import open_own_store
from slipstream.configs.base import ConfigError
from slipstream.configs.run import RunConfig
from tests.builders import make_finished, make_run, write_archive
from tests.contract.stores import OLDEST_FIRST
from tests.unit.buffer.archive.test_ledger import make_step


def make_replay(archive: Path, *, steps: int = 2, groups: int = 2) -> RunConfig:
    return make_run(
        mode="replay",
        replay={"path": str(archive)},
        learner={"max_steps": steps, "groups_per_step": groups},
        weights={"transport": "memory"},
    )


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


def test_each_step_claims_the_batch_of_the_ledger(tmp_path: Path) -> None:
    plan = plan_replay(make_replay(archive_of(tmp_path, *LEDGER), steps=3))
    assert [plan.samples[step].group_ids for step in (1, 2, 3)] == [["3", "4"], ["2", "1"], ["0", "1"]]
    assert plan.samples[1].weights == [0.5, 1.0]
    assert plan.samples[3].reused == [False, True]


def test_a_store_yields_the_batches_of_the_ledger_and_a_group_as_often_as_it_was_used(tmp_path: Path) -> None:
    plan = plan_replay(make_replay(archive_of(tmp_path, *LEDGER), steps=3))
    with open_own_store(tmp_path / "store", "run") as store:
        store.open_run("run", config_json="{}", num_rows=1, seed=0)
        store.load(plan.groups, samples=plan.samples)
        for entry in LEDGER:
            claim = store.claim(step=entry.step, version=entry.version, num_groups=2, rules=OLDEST_FIRST, lease_s=60.0)
            assert isinstance(claim, Claim)
            assert claim.group_ids == entry.group_ids
            store.commit(claim, entry)
        assert store.audit().is_sound


def test_without_a_ledger_groups_are_in_the_order_of_their_steps(tmp_path: Path) -> None:
    plan = plan_replay(make_replay(archive_of(tmp_path)))
    assert ([group.id for group in plan.groups], plan.samples) == (["4", "3", "2", "1", "0"], {})


def test_batches_of_another_size_are_made_of_the_same_groups_in_order(tmp_path: Path) -> None:
    plan = plan_replay(make_replay(archive_of(tmp_path, *LEDGER), steps=5, groups=1))
    assert (len(plan.groups), plan.samples) == (5, {})


@pytest.mark.parametrize(("entries", "steps", "most"), [(LEDGER, 4, 3), ((), 3, 2)])
def test_more_steps_than_are_stored_are_refused(
    tmp_path: Path, entries: tuple[StepEntry, ...], steps: int, most: int
) -> None:
    with pytest.raises(ConfigError, match=rf"learner.max_steps must be <= {most} to replay .*, got {steps}"):
        plan_replay(make_replay(archive_of(tmp_path, *entries), steps=steps))


def test_a_step_with_missing_trajectories_is_refused(tmp_path: Path) -> None:
    archive = archive_of(tmp_path, *LEDGER[:1], make_step(2, "2", "9"))
    with pytest.raises(ArchiveError, match="must hold all trajectories of step 2 in its ledger, 9-0-0, 9-0-1, got"):
        plan_replay(make_replay(archive))


def test_a_shard_cut_in_the_middle_is_refused_by_name(tmp_path: Path) -> None:
    shard = archive_of(tmp_path, *LEDGER) / "shard-00000001.parquet"
    shard.write_bytes(shard.read_bytes()[:200])
    with pytest.raises(ShardError, match=r"^shard-00000001.parquet must have \d+ bytes"):
        plan_replay(make_replay(tmp_path))


def test_groups_without_a_step_come_last(tmp_path: Path) -> None:
    write_archive(tmp_path, [make_finished("0", steps=[]), make_finished("1", steps=[7])])
    assert [group.id for group in plan_replay(make_replay(tmp_path, steps=1)).groups] == ["1", "0"]
