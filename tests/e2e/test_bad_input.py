"""Bad input to the real commands: one error message, an exit code, nothing lost, nothing left running."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests import runs

pytestmark = pytest.mark.timeout(240)

SMALL = (
    "generators/engine=scripted",
    "learner/engine=torch",
    "prepare=[]",
    "model.path=models/digits-random",
    "learner.groups_per_step=4",
    "learner.max_steps=2",
    "evaluation.every_steps=0",
    "evaluation.monitor_prompts=2",
    "evaluation.final_prompts=4",
)
REWARDS = """
import time
def raises(sample): raise RuntimeError("no opinion")
def hangs_at_times(sample):
    if sample.extra_info["index"] % 4 == 0 and sample.response_token_ids[0] == 2: time.sleep(3600)
    return 1.0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = runs.make_task(tmp_path_factory.mktemp("bad"), warm=False)
    (made / "bad_rewards.py").write_text(REWARDS)
    drop_column(made / "data" / "digits" / "train.parquet", "reward_model", into=made / "data" / "unscored.parquet")
    shutil.copytree(made / "models" / "digits-random", made / "models" / "no-weights")
    (made / "models" / "no-weights" / "model.safetensors").unlink()
    return made


def drop_column(source: Path, column: str, *, into: Path) -> None:
    pq.write_table(pq.read_table(source).drop_columns([column]), into)


def launch(folder: Path, *overrides: str, timeout_s: float = 180) -> subprocess.CompletedProcess[str]:
    return run(folder, str(runs.ROOT / "run_async.py"), *SMALL, *overrides, timeout_s=timeout_s)


def run_role(folder: Path, role: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    return run(folder, "-m", f"slipstream.{role}", *SMALL, *overrides, timeout_s=90)


def run(folder: Path, *command: str, timeout_s: float, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_a_preparation_that_fails_is_named_and_leaves_no_run(folder: Path):
    step = "{creates: data/never, module: slipstream.scripts.make_digits_data, args: ['--task=nonsense']}"
    done = launch(folder, f"prepare=[{step}]", "name=unprepared")
    assert_ends_with_one_sentence(done, folder, "slipstream.scripts.make_digits_data --task=nonsense", "data/never")
    assert not (folder / "runs" / "unprepared").exists()


def assert_ends_with_one_sentence(done: subprocess.CompletedProcess[str], folder: Path, *words: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert len([line for line in lines if line.startswith("error: ")]) == 1, done.stderr
    assert lines[-1].startswith("error: "), done.stderr
    for word in words:
        assert word in lines[-1], lines[-1]
    assert "Traceback" not in done.stdout + done.stderr
    runs.assert_none_left(folder)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        # One key, one preset, and one contradiction: tests/unit/configs covers all forms.
        ("learner.max_step=3", ("learner.max_step", "learner.max_steps")),
        ("experiment=digits_gpu", ("experiment=digits_gpu", "experiment=digits_cpu")),
        ("algorithm/advantage=win_rate", ("algorithm.policy_loss=sppo", "policy_loss=ppo_clip")),
        ("model.path=models/nope", ("model.path", "models/nope", "no such folder")),
        ("model.path=data/digits", ("model.path", "data/digits", "no config.json")),
        ("data.train=data/nope.parquet", ("data/nope.parquet", "no such file")),
        ("data.heldout=data/unscored.parquet", ("data/unscored.parquet", "`reward_model`")),
        ("data.train=models/digits-random/config.json", ("config.json", "row 0", "JSON record")),
        ("generators.reward.function=no_rewards:f", ("generators.reward.function", "no module 'no_rewards'")),
        ("generators.reward.function=bad_rewards:raise", ("generators.reward.function", "Did you mean 'raises'")),
        ("broker.address=tcp://0.0.0.0:5757", ("broker.address", "loopback")),
    ],
)
def test_a_wrong_setting_is_found_before_anything_starts_and_the_name_stays_free(
    folder: Path, override: str, words: tuple[str, ...]
) -> None:
    done = launch(folder, "name=wrong", override)
    assert_ends_with_one_sentence(done, folder, *words)
    assert not (folder / "runs" / "wrong").exists()


def test_a_run_that_was_refused_trains_under_its_name_once_the_settings_are_corrected(folder: Path) -> None:
    for wrong, words in (
        ("data.max_prompt_tokens=2", ("data.max_prompt_tokens",)),
        ("model.path=models/no-weights", ()),
    ):
        assert_ends_with_one_sentence(launch(folder, "name=again", wrong), folder, *words)
        assert (folder / "runs" / "again" / "config.yaml").exists()
    done = launch(folder, "name=again")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "runs/again is reused" in done.stdout
    assert len(runs.metrics(folder, "again")) == 2
    assert_ends_with_one_sentence(launch(folder, "name=again"), folder, "name must be unused")


def test_a_port_in_use_is_named_and_its_owner_is_left_alone(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as owner:
        address = f"broker.address=tcp://127.0.0.1:{owner.getsockname()[1]}"
        assert_ends_with_one_sentence(launch(folder, "name=port", address), folder, "broker.address", "free to bind")
        assert_ends_with_one_sentence(run_role(folder, "broker", "name=port", address), folder, "free to bind")


def test_a_redis_that_does_not_answer_is_named(folder: Path) -> None:
    nobody = f"buffer.store.url=unix://{folder}/nobody.sock"
    done = launch(folder, "name=redis", "buffer/store=redis", nobody)
    assert_ends_with_one_sentence(done, folder, "nobody.sock", "buffer.store.url")


@pytest.mark.parametrize(
    ("role", "override", "words"),
    [
        ("broker", "data.train=data/nope.parquet", ("data/nope.parquet", "no such file")),
        ("broker", "learner.max_step=3", ("learner.max_steps",)),
        ("generators", "learner.max_step=3", ("learner.max_steps",)),
        ("learner", "model.path=models/nope", ("model.path", "no such folder")),
        ("learner", "learner.num_ranks=3", ("learner.num_ranks",)),
    ],
)
def test_a_role_started_by_hand_says_it_in_one_sentence(
    folder: Path, role: str, override: str, words: tuple[str, ...]
) -> None:
    assert_ends_with_one_sentence(run_role(folder, role, "name=hand", override), folder, *words)


@pytest.mark.slow
def test_a_role_that_finds_bad_input_is_named_with_its_error(folder: Path) -> None:
    done = launch(folder, "name=weightless", "model.path=models/no-weights")
    assert_ends_with_one_sentence(done, folder, "learner: model.path", "models/no-weights", "learner.log")


@pytest.mark.slow
def test_the_serial_run_says_it_in_one_sentence_too(folder: Path) -> None:
    serial = ("experiment=digits_serial", *SMALL[1:], "model.path=models/no-weights")
    done = run(folder, str(runs.ROOT / "run_async.py"), *serial, "name=serial", timeout_s=120)
    assert_ends_with_one_sentence(done, folder, "model.path", "models/no-weights")


@pytest.mark.long
def test_a_reward_function_that_hangs_at_times_costs_its_trajectories_and_no_more(folder: Path) -> None:
    hanging = ("generators.reward.function=bad_rewards:hangs_at_times", "generators.reward.timeout_s=0.3")
    # Groups that wait for a hanging call complete later than others. A longer run draws them.
    done = launch(folder, "name=hangs", "learner.max_steps=10", *hanging)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = runs.metrics(folder, "hangs")
    assert 0 < sum(row["learner/failed_fraction"] for row in rows) < len(rows)
    # Failures are excluded from the mean rather than counted as zero.
    assert {row["learner/reward_mean"] for row in rows} == {1.0}
    runs.assert_none_left(folder)


@pytest.mark.slow
def test_a_learner_that_dies_of_the_same_error_twice_at_its_start_ends_the_run(folder: Path) -> None:
    broken = folder / "broken"
    broken.mkdir()
    # A broken installation of torch, only in the learner.
    learner_alone = 'if sys.orig_argv[2:3] == ["slipstream.learner"]: sys.modules["torch"] = None'
    (broken / "sitecustomize.py").write_text(f"import sys\n{learner_alone}\n")
    address = f"broker.address=ipc://{folder}/broker.sock"
    done = run(
        folder,
        str(runs.ROOT / "run_async.py"),
        *SMALL,
        "name=broken",
        address,
        timeout_s=120,
        PYTHONPATH=f"{broken}:{os.environ.get('PYTHONPATH', '')}",
    )
    assert_ends_with_one_sentence(done, folder, "learner: ModuleNotFoundError: import of torch halted")
    assert done.stdout.count("learner restarted") == 1


@pytest.mark.slow
def test_deepspeed_trains_on_a_cpu_without_a_compiler(folder: Path) -> None:
    (folder / "empty").mkdir()
    overrides = (*SMALL, "learner/engine=deepspeed", "name=no_compiler")
    done = run(folder, str(runs.ROOT / "run_async.py"), *overrides, timeout_s=180, PATH=str(folder / "empty"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((folder / "runs" / "no_compiler" / "summary.json").read_text())["steps"] == 2
