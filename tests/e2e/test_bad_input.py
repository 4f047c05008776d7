"""Bad input to the real commands: one error message, an exit code, nothing lost, nothing left running."""

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests import runs
from tests.runs import Call, call_each

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SMALL = ("experiment=digits_cpu", "generators/engine=scripted", *runs.SMALL[3:], "learner.max_steps=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = runs.make_task(tmp_path_factory.mktemp("bad"), warm=False)
    (made / "bad_rewards.py").write_text("def raises(sample): raise RuntimeError\n")
    rows = pq.read_table(made / "data" / "digits" / "train.parquet")
    pq.write_table(rows.drop_columns(["reward_model"]), made / "data" / "unscored.parquet")
    shutil.copytree(made / "models" / "digits-random", made / "models" / "damaged")
    (made / "models" / "damaged" / "model.safetensors").write_bytes(b"damaged")
    return made


def launch(folder: Path, name: str, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return runs.call(runs.command(*SMALL, f"name={name}", *overrides), folder, timeout_s=180, **environment)


def assert_ends_with_one_sentence(done: subprocess.CompletedProcess[str], folder: Path, *words: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:], done.stderr
    for word in words:
        assert word in lines[-1], lines[-1]
    assert "Traceback" not in done.stdout + done.stderr
    runs.assert_none_left(folder)


WRONG = {
    "learner.max_step=3": ("learner.max_step", "learner.max_steps"),
    "experiment=digits_gpu": ("experiment=digits_gpu", "experiment=digits_cpu"),
    "algorithm/advantage=win_rate": ("algorithm.policy_loss must be sppo", "got ppo_clip"),
    "model.path=data/digits": ("model.path", "data/digits", "no config.json"),
    "data.max_prompt_tokens=2": ("data.max_prompt_tokens",),
    "data.eval=data/unscored.parquet": ("data/unscored.parquet", "`reward_model`"),
    "generators.reward.function=bad_rewards:raise": ("generators.reward.function", "Did you mean 'raises'"),
    "broker.address=tcp://0.0.0.0:5757": ("broker.address", "loopback"),
    "prepare=[{creates: data/never, module: slipstream.scripts.make_digits_data, args: ['--task=nonsense']}]": (
        *("slipstream.scripts.make_digits_data --task=nonsense", "data/never"),
    ),
}
"""One setting of each kind, and words of its error: unit tests cover all forms."""
BY_HAND = {
    "broker": ("data.train=data/nope.parquet", "data/nope.parquet", "no such file"),
    "generators": ("learner.max_step=3", "learner.max_steps"),
    "learner": ("model.path=models/nope", "model.path", "no such folder"),
}
"""Role -> a wrong setting, and words of its error."""
SERIAL = ("experiment=digits_serial", *SMALL[2:], "model.path=models/damaged", "name=serial")
NO_REDIS = ("name=redis", "buffer/store=redis", "buffer.store.url=unix:///nowhere/nobody.sock")


@pytest.fixture(scope="module")
def wrong(folder: Path) -> dict[str, subprocess.CompletedProcess[str]]:
    command = "slipstream.cli"
    calls = {each: Call(command, (*SMALL, "name=wrong", each)) for each in WRONG}
    calls |= {"serial": Call(command, SERIAL), "redis": Call(command, (*SMALL, *NO_REDIS))}
    for role, (override, *_) in BY_HAND.items():
        calls[role] = Call(f"slipstream.{role}.__main__", (*SMALL, "name=hand", override))
    return call_each(calls, folder, imports=["slipstream.launch.run", "slipstream.launch.serial"])


@pytest.mark.parametrize("override", WRONG)
def test_a_wrong_setting_is_found_before_anything_starts_and_the_name_stays_free(
    folder: Path, wrong: dict[str, subprocess.CompletedProcess[str]], override: str
) -> None:
    assert_ends_with_one_sentence(wrong[override], folder, *WRONG[override])
    assert not (folder / "runs" / "wrong").exists()


def test_a_serial_run_a_role_started_by_hand_and_a_redis_that_does_not_answer_take_one_sentence_too(
    folder: Path, wrong: dict[str, subprocess.CompletedProcess[str]]
) -> None:
    assert_ends_with_one_sentence(wrong["serial"], folder, "model.path", "models/damaged")
    assert_ends_with_one_sentence(wrong["redis"], folder, "nobody.sock", "buffer.store.url")
    for role, (_, *words) in BY_HAND.items():
        assert_ends_with_one_sentence(wrong[role], folder, *words)


def test_a_refused_run_trains_under_its_name_once_the_settings_are_right_even_without_a_compiler(folder: Path) -> None:
    refused = launch(folder, "again", "model.path=models/damaged")
    assert_ends_with_one_sentence(refused, folder, "learner: model.path", "models/damaged", "learner.log")
    assert (folder / "runs" / "again" / "config.yaml").exists()
    # DeepSpeed compiles its optimizer for CPUs if it finds a compiler.
    (folder / "empty").mkdir()
    done = launch(folder, "again", "learner/engine=deepspeed", PATH=str(folder / "empty"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "runs/again is reused" in done.stdout
    assert len(runs.metrics(folder, "again")) == 2
    assert_ends_with_one_sentence(launch(folder, "again"), folder, "name must be unused")


def test_a_port_in_use_is_named_and_its_owner_is_left_alone(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as owner:
        address = f"broker.address=tcp://127.0.0.1:{owner.getsockname()[1]}"
        programs = {"slipstream.cli": "port", "slipstream.broker.__main__": "hand"}
        calls = {name: Call(module, (*SMALL, f"name={name}", address)) for module, name in programs.items()}
        for done in call_each(calls, folder, imports=["slipstream.launch.run"]).values():
            assert_ends_with_one_sentence(done, folder, "broker.address", "free to bind")


def test_a_learner_that_dies_of_the_same_error_twice_at_its_start_ends_the_run(folder: Path) -> None:
    broken = folder / "broken"
    broken.mkdir()
    # A broken installation of torch, only in the learner.
    learner_alone = 'if sys.orig_argv[2:3] == ["slipstream.learner"]: sys.modules["torch"] = None'
    (broken / "sitecustomize.py").write_text(f"import sys\n{learner_alone}\n")
    address = f"broker.address=ipc://{folder}/broker.sock"
    done = launch(folder, "broken", address, PYTHONPATH=f"{broken}:{os.environ.get('PYTHONPATH', '')}")
    assert_ends_with_one_sentence(done, folder, "learner: ModuleNotFoundError: import of torch halted")
    assert done.stdout.count("learner restarted") == 1
