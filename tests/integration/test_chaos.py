"""Runs under chaos. `python -m tests.chaos` does the same with any number of kills."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import ROOT, processes_of, until


def run_chaos(*, seed: int, kills: int, timeout_s: float) -> None:
    """Raise AssertionError with the command's whole output unless the run is sound."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", f"--seed={seed}", f"--kills={kills}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lost=0 duplicated=0 skipped_prompts=0" in done.stdout
    assert f"kills={kills} stops=" in done.stdout
    assert "verdict: sound" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_whose_roles_are_killed_has_the_outcome_of_an_uninterrupted_one() -> None:
    run_chaos(seed=1, kills=4, timeout_s=280)


@pytest.mark.core
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_was_acknowledged_is_accounted_for_after_acts_at_points_and_cut_connections() -> None:
    # Few kills: two or three of the thirteen acts, which takes half a minute.
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--engine=light", "--seed=5", "--kills=3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verdict: sound" in done.stdout


def play_matrix(*options: str, timeout_s: float) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--matrix", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 problems" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_failure_of_the_matrix_is_survived() -> None:
    play_matrix("--only=kill -9 of learner at before_seal", timeout_s=280)


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_every_failure_of_the_matrix_is_survived() -> None:
    play_matrix(timeout_s=2300)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_killed_harness_leaves_no_process(tmp_path: Path) -> None:
    harness = subprocess.Popen(
        [sys.executable, "-m", "tests.chaos"],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: any(tmp_path.glob("chaos-*/runs/chaos/store/redis.pid")), timeout_s=60, what="a store")
    finally:
        harness.kill()
        harness.wait()
    until(lambda: not processes_of(tmp_path), timeout_s=30, what="the end of all roles")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_act_leaves_acknowledged_trajectories_accounted_for(seed: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--engine=light", f"--seed={seed}", "--kills=20"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_a_run_whose_roles_are_killed_many_times_has_the_outcome_of_an_uninterrupted_one(seed: int) -> None:
    run_chaos(seed=seed, kills=60, timeout_s=580)
