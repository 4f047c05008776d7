"""A newcomer's first hour: own data, reward, and model; a bug, a stop, a resume, an evaluation, a comparison."""

import json
import random
import signal
import subprocess
from pathlib import Path

import pytest

from tests import runs

# In CI, other tests refuse a reward, stop, resume, evaluate, and show a status.
pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
BUGGY = "def score(sample):\n    return float(sample.response == sample.answer)\n"
FIXED = "def score(sample):\n    return float(sample.response[:1] == sample.ground_truth[:1])\n"
OWN = [
    *("name=mine", "data.train=mine.jsonl", "data.eval=heldout.jsonl", "data.max_prompt_tokens=16"),
    *("model.path=models/mine", "model.dtype=float32", "generators.reward.function=rewards.py:score"),
    *("generators/engine=hf", "learner/engine=torch", "generators.sampling.max_tokens=6", "learner.prompts_per_step=4"),
    *("evaluation.num_prompts=2", "evaluation.num_final_prompts=4", "evaluation.before_training=false"),
]


def write_rows(path: Path, *, num_rows: int, seed: int) -> None:
    chosen = random.Random(seed)
    numbers = [str(chosen.randrange(10000, 99999)) for _ in range(num_rows)]
    path.write_text("".join(json.dumps({"question": f"{n}=", "answer": n[::-1]}) + "\n" for n in numbers))


def call(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return runs.call(runs.command(*words), folder)


def test_the_first_hour(tmp_path: Path) -> None:
    runs.make_task(tmp_path, warm=False)
    (tmp_path / "models" / "digits-random").rename(tmp_path / "models" / "mine")
    write_rows(tmp_path / "mine.jsonl", num_rows=40, seed=1)
    write_rows(tmp_path / "heldout.jsonl", num_rows=8, seed=2)

    (tmp_path / "rewards.py").write_text(BUGGY)
    refused = call(tmp_path, "run", *OWN)
    assert (refused.returncode, refused.stdout.count("step ")) == (2, 0)
    for words in ("AttributeError", "rewards.py:2: `return float"):
        assert words in refused.stderr.splitlines()[-1], refused.stderr

    (tmp_path / "rewards.py").write_text(FIXED)
    printed = tmp_path / "out"
    first = runs.start(printed, runs.command("run", *OWN, "learner.max_steps=100000"), tmp_path)
    try:
        runs.until(lambda: "step    2/" in printed.read_text(), what="two steps", timeout_s=100)
        first.send_signal(signal.SIGTERM)
        assert first.wait(timeout=60) == 130, printed.read_text()
    finally:
        runs.kill_tree(first)
    assert "continue: slipstream run name=mine resume=true" in printed.read_text()
    reached = len(runs.metrics(tmp_path, "mine"))

    resumed = call(tmp_path, "run", "name=mine", "resume=true", f"learner.max_steps={reached + 2}")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert f"resuming after step {reached}, the newest checkpoint" in resumed.stdout
    assert f"mine: done after {reached + 2} steps; final evaluation on 4 prompts: accuracy" in resumed.stdout
    shown = call(tmp_path, "status", "mine")
    assert (shown.returncode, "mine: done after" in shown.stdout) == (0, True), shown.stderr

    evaluated = call(tmp_path, "evaluate", "models/mine", "runs/mine", "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    assert call(tmp_path, "resume", "mine").stdout.startswith("mine is finished: it ended after")
    measured = json.loads(evaluated.stdout)["evaluations"]
    assert {each["model"] for each in measured} == {"models/mine", "runs/mine/final_model"}
    assert {each["score"]["num_prompts"] for each in measured} == {4}
    assert [bool(each["difference"]) for each in measured] == [each["model"] != "models/mine" for each in measured]
