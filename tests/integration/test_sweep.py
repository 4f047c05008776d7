"""A sweep as a user starts it: it survives failed runs, stops in order, and continues."""

import json
import signal
from pathlib import Path

import pytest

from tests import runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SWEEP = ("run", "-m", "seed=1,2", *runs.SMALL, "name=swept", "evaluation.before_training=false")


def read_states(folder: Path) -> dict[str, str]:
    found = json.loads((folder / "runs" / "swept" / "sweep.json").read_text())
    return {run["name"]: run["state"] for run in found["runs"]}


def test_a_sweep_goes_on_after_a_failed_run_and_says_why_it_failed(tmp_path: Path) -> None:
    runs.make_task(tmp_path, warm=False)
    # A run that ends well: the next test.
    words = (*SWEEP, "model.path=models/one,models/two", "learner.max_steps=2")
    done = runs.call(runs.command(*words[:2], "seed=3", *words[3:]), tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    for name in ("one", "two"):
        reason = f"got 'models/{name}': there is no such folder."
        assert reason in done.stdout, "below the table"
        assert reason in done.stderr, "as printed by the run"
    assert done.stderr.splitlines()[-1] == "error: 2 of 2 runs failed: swept-path-models_one, swept-path-models_two"
    assert set(read_states(tmp_path).values()) == {"failed"}


@pytest.mark.long
def test_a_stopped_sweep_continues_where_it_stopped(tmp_path: Path) -> None:
    runs.make_task(tmp_path, warm=False)
    printed = tmp_path / "out"
    sweep = runs.start(printed, runs.command(*SWEEP, "learner.max_steps=100000"), tmp_path)
    try:
        runs.until(lambda: "step    2/" in printed.read_text(), what="a step", timeout_s=60)
        sweep.send_signal(signal.SIGINT)
        assert sweep.wait(timeout=60) == 130, printed.read_text()
    finally:
        runs.kill_tree(sweep)
    runs.assert_none_left(tmp_path)
    assert "saves a checkpoint" in printed.read_text()
    assert "name=swept resume=auto" in printed.read_text()
    assert read_states(tmp_path) == {"swept-seed-1": "stopped", "swept-seed-2": "waiting"}
    reached = len(runs.metrics(tmp_path, "swept-seed-1"))
    again = (*SWEEP, f"learner.max_steps={reached + 2}", "resume=auto")
    done = runs.call(runs.command(*again), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"resuming after step {reached}, the newest checkpoint" in done.stdout
    assert read_states(tmp_path) == {"swept-seed-1": "done", "swept-seed-2": "done"}
    (combination,) = json.loads((tmp_path / "runs" / "swept" / "sweep.json").read_text())["combinations"]
    assert combination["num_runs"] == 2
    trained = (tmp_path / "runs" / "swept-seed-2" / "metrics.jsonl").read_bytes()
    assert runs.call(runs.command(*again), tmp_path).returncode == 0
    assert (tmp_path / "runs" / "swept-seed-2" / "metrics.jsonl").read_bytes() == trained, "it was finished"
    refused = runs.call(runs.command(*again[:-1]), tmp_path)
    assert refused.stderr.startswith("error: name must be unused in runs/, got 'swept-seed-1'"), "before any run starts"
