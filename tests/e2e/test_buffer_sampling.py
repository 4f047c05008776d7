"""Whole serial runs that reuse groups, mix in stored ones, or drop stale ones."""

from pathlib import Path

import pytest

from slipstream.buffer.archive.archive import Archive
from slipstream.buffer.archive.trajectory_filter import TrajectoryFilter
from tests import runs

pytestmark = pytest.mark.slow

SMALL = (
    "experiment=digits_serial",
    "model.path=models/digits-random",
    "prepare=[]",
    "learner.groups_per_step=4",
    "learner.max_steps=4",
    "evaluation.monitor_prompts=4",
    "evaluation.final_prompts=8",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make_task(tmp_path_factory.mktemp("drawing"), warm=False)


def train(folder: Path, name: str, *overrides: str) -> list[dict[str, float]]:
    runs.train(folder, *SMALL, f"name={name}", *overrides)
    return runs.metrics(folder, name)


def steps_of_groups(folder: Path, name: str) -> dict[str, list[int]]:
    archive = Archive(folder / "runs" / name / "archive")
    return {stored.trajectory.group_id: stored.steps for stored in archive.read(TrajectoryFilter(outcome="retired"))}


@pytest.fixture(scope="module")
def reused(folder: Path) -> list[dict[str, float]]:
    return train(folder, "reused", "buffer.reuse.max_uses=2", "buffer.reuse.fresh_fraction=0.5")


def test_used_groups_fill_half_of_each_step(folder: Path, reused: list[dict[str, float]]):
    assert [row["buffer/reused_fraction"] for row in reused] == [0, 0.5, 0.5, 0.5]
    steps = steps_of_groups(folder, "reused")
    assert len(steps) == 4 + 2 + 2 + 2
    assert all(len(used_in) in (1, 2) and len(set(used_in)) == len(used_in) for used_in in steps.values())
    assert sum(map(len, steps.values())) == 4 * 4


@pytest.mark.long
def test_stored_rollouts_are_mixed_in(folder: Path, reused: list[dict[str, float]]):
    mixed = ("buffer.mix.archive=runs/reused/archive", "buffer.mix.fraction=0.25")
    rows = train(folder, "mixed", *mixed)
    assert [row["learner/trajectories"] for row in rows] == [row["learner/trajectories"] for row in reused]
    assert len(steps_of_groups(folder, "mixed")) == 4 * 3, "a quarter of each step came from the archive"
    assert max(row["lag/max"] for row in rows) <= 4, "another run's versions are no lag"
    assert [row["learner/loss"] for row in train(folder, "mixed-again", *mixed)] == [
        row["learner/loss"] for row in rows
    ]


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("prioritized-drop", ("buffer/sampler=prioritized", "buffer.staleness.on_stale=drop")),
        pytest.param("freshest-mask", ("buffer/sampler=freshest",), marks=pytest.mark.long),
    ],
)
def test_every_policy_trains_to_the_end(folder: Path, name: str, overrides: tuple[str, ...]):
    rows = train(folder, name, "buffer.staleness.max_lag=1", *overrides)
    assert len(rows) == 4
    for row in rows:
        assert row["buffer/length_bias"] > 0
        split = row["buffer/lag_in_flight"] + row["buffer/lag_publish"] + row["buffer/lag_queue"]
        assert split >= row["lag/mean"] - 1e-9, "the oldest token of a trajectory is at least as old as the mean one"
