"""Serial runs that reuse groups, mix in stored groups, or drop stale groups."""

from pathlib import Path

import pytest

from slipstream.buffer.archive.archive import Archive
from slipstream.buffer.archive.trajectory_filter import StoredTrajectory, TrajectoryFilter
from tests import runs

pytestmark = pytest.mark.slow

SMALL = ("experiment=digits_serial", *runs.RANDOM, *runs.FEW, "learner.max_steps=4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make_task(tmp_path_factory.mktemp("drawing"), warm=False)


def train(folder: Path, name: str, *overrides: str) -> list[dict[str, float]]:
    runs.train(folder, *SMALL, f"name={name}", *overrides)
    return runs.metrics(folder, name)


def retired(folder: Path, name: str) -> dict[str, StoredTrajectory]:
    """One trajectory of each trained group."""
    archive = Archive(folder / "runs" / name / "archive")
    return {stored.trajectory.group_id: stored for stored in archive.read(TrajectoryFilter(outcome="retired"))}


@pytest.fixture(scope="module")
def reused(folder: Path) -> list[dict[str, float]]:
    return train(folder, "reused", "buffer.reuse.max_uses=2", "buffer.reuse.fresh_fraction=0.5")


def test_used_groups_fill_half_of_each_step(folder: Path, reused: list[dict[str, float]]):
    assert [row["buffer/reused_fraction"] for row in reused] == [0, 0.5, 0.5, 0.5]
    steps = [stored.steps for stored in retired(folder, "reused").values()]
    assert len(steps) == 4 + 2 + 2 + 2
    assert all(len(used_in) in (1, 2) and len(set(used_in)) == len(used_in) for used_in in steps)
    assert sum(map(len, steps)) == 4 * 4


@pytest.mark.long
def test_stored_rollouts_are_mixed_in(folder: Path, reused: list[dict[str, float]]):
    rows = train(folder, "mixed", "replay_mix.archive=runs/reused/archive", "replay_mix.fraction=0.25")
    assert [row["learner/trajectories"] for row in rows] == [row["learner/trajectories"] for row in reused]
    assert len(retired(folder, "mixed")) == 4 * 3, "a quarter of each step came from the archive"
    assert max(row["lag/max"] for row in rows) <= 4, "another run's versions have no lag"


# In CI: tests/contract/test_store_sampling.py.
@pytest.mark.long
def test_a_prioritized_sampler_that_drops_stale_groups_trains_to_the_end(folder: Path):
    policy = ("buffer/sampler=prioritized", "staleness.on_stale=drop", "staleness.max_lag=1")
    rows = train(folder, "prioritized", *policy)
    assert len(rows) == 4
    for row in rows:
        assert row["buffer/length_bias"] > 0
        split = row["buffer/lag_in_flight"] + row["buffer/lag_publish"] + row["buffer/lag_queue"]
        assert split >= row["lag/mean"] - 1e-9, "a trajectory's oldest token is at least as old as its mean token"
