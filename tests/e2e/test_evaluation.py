"""Evaluations of a run: each of one version, stored, and used to name the best checkpoint."""

import json
from pathlib import Path

import pytest

from slipstream.buffer.archive.archive import Archive
from slipstream.buffer.archive.trajectory_filter import TrajectoryFilter
from tests import runs

pytestmark = pytest.mark.slow


def test_every_answer_of_an_evaluation_is_of_its_version_and_kept(tmp_path: Path) -> None:
    folder = runs.make_task(tmp_path, warm=False)
    often = ("evaluation.every_steps=2", "evaluation.monitor_prompts=12", "learner.max_steps=8")
    best = ("learner.checkpoint.best.metric=eval/reward_sampled", "learner.checkpoint.keep=1", "generators.count=2")
    output = runs.train(folder, *runs.SMALL, *often, *best, "name=evaluated")
    run = folder / "runs" / "evaluated"
    found: dict[str, set[int]] = {}
    counts: dict[str, int] = {}
    for stored in Archive(run / "archive").read(TrajectoryFilter(outcome="evaluated")):
        name = stored.trajectory.group_id.rpartition(":")[0]
        found.setdefault(name, set()).update(stored.versions)
        counts[name] = counts.get(name, 0) + 1
    monitored = {name: versions for name, versions in found.items() if name.startswith("step-")}
    assert len(monitored) == 4 * 2
    assert {name: {int(name.split("-")[1])} for name in monitored} == monitored
    assert set(counts.values()) == {4, 12}, "the final and the monitored rows"
    rows = [row for row in runs.metrics(folder, "evaluated") if "eval/version" in row]
    assert {row["eval/version"] for row in rows} <= {2, 4, 6, 8}
    chosen = json.loads((run / "best.json").read_text())
    assert chosen["value"] >= max(row["eval/reward_sampled"] for row in rows)
    assert (run / "checkpoints" / chosen["checkpoint"]["name"]).is_dir()
    assert (run / "best_model" / "config.json").is_file()
    assert f"step {chosen['checkpoint']['step']}, eval/reward_sampled" in output
