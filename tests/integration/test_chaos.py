"""Runs under chaos. `python -m tests.chaos` does the same with any number of kills."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import ROOT, processes_of, until


def run_chaos(*options: str, timeout_s: float) -> str:
    """Return the output of a sound run, else raise AssertionError with it."""
    command = [sys.executable, "-m", "tests.chaos", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# In CI: tests/integration/test_roles_die.py kills every role of a run.
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_a_run_whose_roles_are_killed_has_the_outcome_of_an_uninterrupted_one(seed: int) -> None:
    printed = run_chaos(f"--seed={seed}", "--kills=60", timeout_s=580)
    for words in ("lost=0 duplicated=0 skipped_prompts=0", "kills=60 stops=", "verdict: sound"):
        assert words in printed


@pytest.mark.core
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_was_acknowledged_is_accounted_for_after_acts_at_points_and_cut_connections() -> None:
    # Few kills: two or three of the acts, which takes half a minute.
    assert "verdict: sound" in run_chaos("--engine=light", "--seed=5", "--kills=3", timeout_s=280)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_act_leaves_acknowledged_trajectories_accounted_for(seed: int) -> None:
    run_chaos("--engine=light", f"--seed={seed}", "--kills=20", timeout_s=580)


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_every_failure_of_the_matrix_is_survived() -> None:
    assert "0 problems" in run_chaos("--matrix", timeout_s=2300)


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_killed_harness_leaves_no_process(tmp_path: Path) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    harness = subprocess.Popen([sys.executable, "-m", "tests.chaos"], cwd=ROOT, env=environment, **silent)
    try:
        until(lambda: any(tmp_path.glob("chaos-*/runs/chaos/store/redis.pid")), timeout_s=60, what="a store")
    finally:
        harness.kill()
        harness.wait()
    until(lambda: not processes_of(tmp_path), timeout_s=30, what="the end of all roles")
