"""Supervised fine-tuning, started like a user would, on the digits task and a tiny model."""

import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.runtime.run_folder import is_held
from tests import runs
from tests.tiny_model import make_tiny_model
from tests.tolerance import largest_difference

pytestmark = pytest.mark.slow

SMALL = [
    *("experiment=digits_sft", "prepare=[]", "model.path=tiny", "learner.device=cpu"),
    *("learner.optimizer.schedule=constant", "learner.max_steps=6", "learner.checkpoint.every_steps=3"),
    *("sft.batch_size=32", "sft.eval_every_steps=3", "sft.eval_rows=100"),
]
TWO_RANKS = ("learner.num_ranks=2", "learner/engine=deepspeed_zero2", "learner.tokens_per_microbatch=64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sft")
    make_tiny_model(made / "tiny")
    runs.run_script(made, "slipstream.scripts.make_digits_data", "--task=reverse", "--digits=5", "--out=data/digits")
    return made


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict:
    """Weights that the command of a run trains without interruption."""
    runs.train(folder, *SMALL, "name=whole")
    return load_file(folder / "runs/whole/final_model/model.safetensors")


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, subprocess.CompletedProcess[str]]:
    """Learners, one after the other."""
    storage = f"storage.uri=file://{folder}/remote"
    overrides = {
        "a column": ("name=bad", "data.columns={response: answer}"),
        "a length": ("name=bad", "model.max_length=8", *TWO_RANKS),
        "begun": ("name=moved", storage, "learner.max_steps=3"),
        "resumed": ("name=moved", storage, "runs_dir=elsewhere", "resume=true"),
        "absent": ("name=none", storage, "runs_dir=elsewhere", "resume=true"),
    }
    calls = {name: runs.Call("slipstream.learner.__main__", (*SMALL, *own)) for name, own in overrides.items()}
    return runs.call_each(calls, folder, imports=["slipstream.learner.role"], GLOO_SOCKET_IFNAME="lo")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("a column", "must have the column `answer`"),
        ("a length", "row 0: it must hold at most model.max_length (8) tokens, got 12"),
    ],
)
def test_bad_input_ends_with_one_sentence(folder: Path, ended, name: str, complaint: str) -> None:
    assert ended[name].returncode == 2
    (sentence,) = (line for line in ended[name].stderr.splitlines() if line.startswith("error: "))
    assert complaint in sentence
    assert "Traceback" not in ended[name].stderr
    assert not (folder / "runs" / "bad").exists()


def test_the_command_of_a_run_trains_a_supervised_model_of_transformers(folder: Path, whole: dict) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "runs/whole/final_model")
    assert largest_difference(dict(model.named_parameters()), whole) == 0
    assert AutoTokenizer.from_pretrained(folder / "runs/whole/final_model").eos_token == "<eos>"
    # It held the lock on the run until it ended.
    assert (folder / "runs/whole/run.lock").read_text()
    assert not is_held(folder / "runs/whole")


def test_a_learner_resumes_a_run_elsewhere_from_its_object_store(folder: Path, whole: dict, ended) -> None:
    for name in ("begun", "resumed"):
        assert ended[name].returncode == 0, ended[name].stdout[-3000:] + ended[name].stderr[-3000:]
    resumed = load_file(folder / "elsewhere/moved/final_model/model.safetensors")
    assert all(tensor.equal(resumed[name]) for name, tensor in whole.items())
    sent = load_file(folder / "remote/moved/final_model/model.safetensors")
    assert all(tensor.equal(resumed[name]) for name, tensor in sent.items())
    assert (ended["absent"].returncode, "but elsewhere/ and file://" in ended["absent"].stderr) == (2, True)
