"""Runs under chaos. `python -m tests.chaos` does the same with any number of kills."""

import subprocess
import sys

import pytest

from tests.runs import ROOT


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
