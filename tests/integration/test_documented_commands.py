"""Every documented command that this machine can run ends well, in a folder with what its page assumes."""

import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from docs.tools.site import HTML, build
from tests import runs
from tests.shape.test_commands import COMMANDS, Command

HUB = "it needs the hub"
CANNOT_RUN = {
    r"make .*": "it is a part of .ci/run, or listed in tests/shape/test_commands.py with its test",
    r"(ssh|rsync|export) .*": "another machine",
    r"python -m (tests\.|benchmarks\.).*": "minutes each; tests run them in a short form (TRIED_BY)",
    r"python -m slipstream\.(broker|learner|generators).*": "a role waits for others: test_dead_ends.py",
    r"slipstream (watch|view|status --watch).*": "it ends with its terminal or at Ctrl-C",
    r"slipstream (scale|drain|pause|profile) .*": "it changes a run in progress: tests/integration/test_scaling.py",
    r"slipstream (run|diagnose|launch) .*experiment=\w+_[18]gpu.*": "it needs GPUs",
    r"slipstream run .*model\.path=Qwen/.*": HUB,
    r"slipstream sft .*model\.path=Qwen/.*": HUB,
    r"slipstream plan experiment=.*": "the config of its model is on the hub",
    r".*make_prompts (gsm8k|nq).*": HUB,
    r"slipstream launch (?!.*--print).*": "no Slurm or Kubernetes here; the same with --print runs",
    r".*(s3://|HOST|10\.0\.0\.\d).*": "its machines, networks and buckets do not exist",
    r".*(cluster\.kind=ray|wandb|cluster cluster\.|diagnose cluster).*": "it needs a cluster or an account",
    r".*experiment=examples/(black_box_agent|verifiers_environment|reasoning_gym)/.*": "it needs optional packages",
    r".*make_prompts reasoning_gym.*": "it needs an optional package",
    r".*experiment=(examples/|picture_digits).*": "minutes of warm-up; tests/e2e/test_examples.py runs it",
    r".*runs/(calculator|interaction|search|reasoning_gym).*": "minutes: tests/e2e/test_examples.py runs it",
    r".*otlp_endpoint=.*": "no collector listens here",
    r"slipstream run -m .*(recipe|rates).*": "six runs each; the sweep of seeds runs",
    r".*launch slurm .*--print": "its network does not exist here",
}
"""Pattern of commands -> why they cannot run in this test."""
TINY = (
    *("learner.max_steps=2", "learner.prompts_per_step=4", "evaluation.every_steps=0", "evaluation.num_prompts=2"),
    *("evaluation.num_final_prompts=4", "evaluation.stop=null", "evaluation.goals=[]"),
    *("generators/engine=hf", "learner/engine=torch"),
)
PLACEHOLDERS = {
    **dict.fromkeys(("RUN", "SOURCE", "digits_cpu", "flat", "second_try"), "mine"),
    **{
        "MODEL": "runs/mine/final_model",
        "TARGET": "made",
        "sft.train_path=FILE": "sft.train_path=right.parquet",
        "model.path=FOLDER": "model.path=models/mine",
        "ID": "0-0-0",
    },
    **{"runs/digits_cpu": "runs/mine", "runs/digits_cpu/final_model": "runs/mine/final_model"},
    **{"380-0-3": "0-0-0", "12": "1", "step=3": "step=1", "profile.steps=[20,22]": "profile.steps=[1,2]"},
    "replay.path=runs/NAME/archive": "replay.path=runs/mine/archive",
    "runs/mine/checkpoints/step-00000050": "runs/mine/checkpoints/step-00000002",
}
"""Word of a document -> what it is here."""
NAMED_FILES = {
    "my_module.py": "def my_loss(inputs, beta=0.1):\n    return -inputs.advantages * inputs.log_ratio.exp()\n",
    "my_logger.py": "class Mine:\n    def __init__(self, run): ...\n    def log(self, step, metrics): ...\n",
    "run_qwen2-7b.sh": "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo\n",
    "train_ppo.sh": "python3 -m openrlhf.cli.train_ppo_ray --rollout.n_samples_per_prompt 8\n",
    "grpo.yaml": "num_generations: 8\n",
    "rl.toml": "[orchestrator]\nbatch_size = 8\n",
    "outputs/2026-01-05/.hydra/config.yaml": "algorithm: {adv_estimator: grpo}\n",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run `mine`, and the models, data and modules that pages name."""
    made = runs.make_task(tmp_path_factory.mktemp("documents"), warm=True)
    runs.train(made, "run", "name=mine", "learner.checkpoint.every_steps=1", *TINY)
    for name in ("mine", "base"):
        shutil.copytree(made / "runs" / "mine" / "final_model", made / "models" / name)
    rows = pq.read_table(made / "data" / "digits" / "heldout.parquet").slice(0, 4)
    for name in ("mine", "others", "aime", "data/aime/heldout", "data/gsm8k/train"):
        (made / name).parent.mkdir(exist_ok=True)
        pq.write_table(rows, made / f"{name}.parquet")
    texts = [
        {"prompt": f"{number}=", "answer": number, "response": "54321", "text": number, "title": "a"}
        for number in ("12345", "54321")
    ]
    for name in ("answers.jsonl", "base.jsonl", "trained.jsonl", "prompts.jsonl", "train.jsonl", "corpus.jsonl"):
        (made / name).write_text("".join(json.dumps(row) + "\n" for row in texts))
    for name in ("answers", "right"):
        pq.write_table(pa.Table.from_pylist(texts), made / f"{name}.parquet")
    for name, text in NAMED_FILES.items():
        (made / name).parent.mkdir(exist_ok=True, parents=True)
        (made / name).write_text(text)
    runs.call(runs.command("data", "export", "mine", "good.parquet"), made)
    runs.call(runs.command("generate", "runs/mine", "--out=answers", "--prompts=2", "--samples=8"), made)
    return made


def arguments_of(command: Command) -> list[str]:
    words = [PLACEHOLDERS.get(word, word) for word in command.words[1:]]
    if words == ["convert", "mine", "made"]:
        # The name of a run is no folder.
        return ["convert", "runs/mine", "made"]
    if words[0] in ("evaluate", "generate"):
        few = ["--prompts=2"] if words[0] == "generate" and "--prompts" not in words else []
        return [*words, *few, "generators/engine=hf"]
    if words[0] not in ("run", "sft"):
        return words
    given = {word.lstrip("+").partition("=")[0] for word in words}
    tiny = [text for text in TINY if text.partition("=")[0] not in given and not command.printed]
    if "sft" in words:
        tiny = ["learner.epochs=null", "learner.max_steps=2", *["model.max_length=32"] * ("model.path" in given)]
    if any(word.startswith("learner.checkpoint.best") for word in words):
        tiny = [text.replace("evaluation.every_steps=0", "evaluation.every_steps=1") for text in tiny]
    # The run that is resumed has two steps.
    steps = ["learner.max_steps=3"] if {"resume=true", "resume=auto"} & {*words} and "name=mine" in words else []
    return [*words, *(text for text in tiny if not (steps and text.startswith("learner.max_steps"))), *steps]


RUNNABLE = [
    command
    for command in COMMANDS
    if not any(re.fullmatch(pattern, shlex.join(command.words)) for pattern in CANNOT_RUN)
]
EXECUTED = {shlex.join(each.words): each for each in {(*arguments_of(each),): each for each in RUNNABLE}.values()}
"""Those that are the same here are executed once."""


@pytest.mark.long
def test_commands_that_cannot_run_here_are_documented() -> None:
    shown = [shlex.join(command.words) for command in COMMANDS]
    assert not [pattern for pattern in CANNOT_RUN if not any(re.fullmatch(pattern, words) for words in shown)]
    assert len(RUNNABLE) > 80


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("words", EXECUTED)
def test_a_documented_command_ends_well(words: str, world: Path, tmp_path: Path) -> None:
    command = EXECUTED[words]
    shutil.copytree(world, tmp_path, dirs_exist_ok=True)
    if "run" in command.words and "resume" not in words and "name=" in words:
        # A page that starts a run has no run of this name yet.
        shutil.rmtree(tmp_path / "runs" / "mine")
    if "convert" in words:
        shutil.rmtree(tmp_path / "models" / "mine", ignore_errors=True)
    if "--out" in command.words:
        shutil.rmtree(tmp_path / "answers")
    if "export" in command.words:
        (tmp_path / command.words[4]).unlink()
    start = [sys.executable] if command.words[0] == "python" else runs.command()
    environment = {"PYTHONPATH": f"{runs.ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = runs.call([*start, *arguments_of(command)], tmp_path, timeout_s=500, **environment)
    assert "Traceback" not in done.stdout + done.stderr, done.stdout[-2000:] + done.stderr[-3000:]
    if command.printed:
        assert command.printed in done.stderr
        return
    # `explain` and `diagnose` report what they find with 1.
    expected = (0, 1) if command.words[1] in ("explain", "diagnose", "plan") else (0,)
    assert done.returncode in expected, done.stdout[-2000:] + done.stderr[-3000:]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_every_page_is_built_and_makes_no_external_requests() -> None:
    assert build() == HTML / "index.html"
    pages = {str(path.relative_to(HTML)): path.read_text() for path in HTML.rglob("*.html")}
    assert {"index.html", "docs/settings/index.html", "examples/calculator/index.html"} <= set(pages)
    assert {"modules/index.html", "learner/training/trainer/index.html"} <= set(pages)
    loaded = re.compile(r'<(?:script|link|img)[^>]*(?:src|href)="?(https?:[^" >]+)')
    foreign = {address for text in pages.values() for address in loaded.findall(text)}
    assert foreign == set()


FOLDER = runs.ROOT / "docs" / "tutorials"
PIECE = re.compile(r"^(?:`([\w.]+)`:\n\n)?```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make_task(tmp_path_factory.mktemp("tutorials"), warm=True)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(page.stem for page in FOLDER.glob("*.md")))
def test_tutorial(name: str, task: Path, tmp_path: Path) -> None:
    for made in ("data", "models"):
        (tmp_path / made).symlink_to(task / made)
    pieces = PIECE.findall((FOLDER / f"{name}.md").read_text(encoding="utf-8"))
    commands = [text for file, kind, text in pieces if kind == "sh" and not file]
    assert commands
    for file, _, text in pieces:
        if file:
            (tmp_path / file).write_text(text, encoding="utf-8")
    search = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for text in commands:
        done = runs.call(["bash", "-euo", "pipefail", "-c", text], tmp_path, timeout_s=300, PATH=search)
        assert done.returncode == 0, f"{text}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
