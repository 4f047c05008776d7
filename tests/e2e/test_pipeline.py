"""The whole pipeline with real vLLM, DeepSpeed, and Redis on a CPU."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests import runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

SMALL = (
    "prepare=[]",
    "evaluation.monitor_prompts=32",
    "evaluation.final_prompts=64",
    "learner.checkpoint.every_steps=5",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make_task(tmp_path_factory.mktemp("pipeline"), warm=True)


@pytest.fixture(scope="module")
def printed(folder: Path) -> str:
    """The output of a 40-step run, `learns`."""
    return runs.train(folder, *SMALL, "name=learns", "learner.max_steps=40", "profile.steps=[20,21]", timeout_s=400)


@pytest.mark.core
def test_reward_rises_log_probs_agree_and_nothing_is_left_running(folder: Path, printed: str):
    rows = runs.metrics(folder, "learns")
    rewards = [row["learner/reward_mean"] for row in rows]
    summary = runs.summary(folder, "learns")
    assert len(rows) == 40
    assert sum(rewards[-8:]) / 8 > sum(rewards[:4]) / 4 + 0.03
    assert summary["logprob_diff_max"] < 1e-3
    assert max(row["learner/failed_fraction"] for row in rows) == 0
    assert max(row["lag/max"] for row in rows) <= 4
    assert "curve" in printed
    for product in ("curve.png", "final_model/config.json", "config.yaml", "versions.json", "logs/learner.log"):
        assert (folder / "runs" / "learns" / product).exists()
    runs.assert_none_left(folder)


@pytest.mark.core
def test_the_run_says_where_its_wall_time_went(folder: Path, printed: str):
    summary, rows = runs.summary(folder, "learns"), runs.metrics(folder, "learns")
    times = {each["role"]: each for each in summary["times"]["roles"]}
    assert list(times) == ["learner", "generator", "broker", "store"]
    for role in ("learner", "generator", "broker"):
        assert sum(times[role]["shares"].values()) == pytest.approx(1, abs=0.01)
    assert summary["times"]["step_s"] * 40 == pytest.approx(summary["train_seconds"], rel=0.02)
    shares = times["learner"]["shares"]
    trained_s = sum(shares[phase] for phase in ("batch", "compute", "optimizer", "committing"))
    # Time between the phases is `rest`. It is larger on a busy machine.
    measured = sum(row["learner/train_s"] for row in rows) / 40 / summary["times"]["step_s"]
    assert trained_s - 0.01 <= measured <= trained_s + shares["rest"] + 0.01
    # vLLM's engine process computes the most.
    assert times["generator"]["cpu_s"] > times["learner"]["cpu_s"] > times["broker"]["cpu_s"] > 0
    assert f"where the wall time went: 40 steps of {summary['times']['step_s']:.3g} s" in printed


@pytest.mark.core
@pytest.mark.usefixtures("printed")
def test_the_recorded_steps_show_every_trajectory_from_its_lease_to_the_version_it_made(folder: Path):
    roles = ("trajectories", "broker (", "generator-0 (", "learner (", "learner torch (", "generator-0 torch (")
    runs.assert_traced(folder, "learns", steps=(20, 21), per_step=32 * 8, processes=roles)


@pytest.mark.usefixtures("printed")
def test_the_final_model_measures_as_the_run_reported_it(folder: Path):
    model = "runs/learns/final_model"
    output = runs.train(folder, "evaluate", model, "--json", "generators/engine=hf", *SMALL)
    found = {each["set"]: each["score"] for each in json.loads(output)["evaluations"]}
    assert found["greedy"]["num_answers"] == 64
    # Engines that round differently may break a tie differently: one answer of 64.
    assert found["greedy"]["metrics"]["accuracy"]["mean"] == pytest.approx(
        runs.summary(folder, "learns")["accuracy_greedy"], abs=1.5 / 64
    )


def test_a_used_name_is_refused(folder: Path):
    (folder / "runs" / "taken").mkdir(parents=True)
    (folder / "runs" / "taken" / "config.yaml").write_text("")
    done = subprocess.run(
        runs.command(*SMALL, "name=taken"), cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "taken" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_ctrl_c_ends_everything_within_ten_seconds(folder: Path):
    with (folder / "interrupted.out").open("w") as output:
        started = subprocess.Popen(
            runs.command(*SMALL, "name=interrupted"),
            cwd=folder,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        runs.until(lambda: metrics_exist(folder, "interrupted"), timeout_s=180, what="the first step")
        started.send_signal(signal.SIGINT)
        sent_at = time.monotonic()
        assert started.wait(timeout=30) == 130
        assert time.monotonic() - sent_at < 10
        runs.assert_none_left(folder)
    finally:
        runs.kill_tree(started)


def metrics_exist(folder: Path, name: str) -> bool:
    return (folder / "runs" / name / "metrics.jsonl").exists()
