"""`slipstream generate` and `evaluate`: every answer once, even after interruptions; changed settings are refused."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream import cli
from slipstream.buffer.archive.archive import Archive
from slipstream.buffer.errors import RunConflictError
from slipstream.configs.base import ConfigError
from slipstream.configs.run import RunConfig
from slipstream.generators.errors import GeneratorError
from slipstream.launch import generate as generate_module
from slipstream.launch.evaluate import evaluate, score_files, tables
from slipstream.launch.generate import generate
from slipstream.runtime.command_line import make_console
from tests.builders import make_run
from tests.cases import cases
from tests.runs import exit_code
from tests.tiny_model import make_tiny_model

PENALTY = "generators.reward.function=length_penalty"


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    truths = [{"prompt": f"{row}=", "reward_model": {"ground_truth": str(row)}} for row in range(12)]
    rows = [truth | {"data_source": f"task-{number % 2}"} for number, truth in enumerate(truths)]
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = [
        {"name": "hard", "path": str(tmp_path / "heldout.jsonl"), "samples": 4},
        {"name": "greedy", "path": str(tmp_path / "heldout.jsonl"), "temperature": 0.0},
    ]
    return make_run(
        model={"path": str(make_tiny_model(tmp_path / "model"))},
        data={"train": str(tmp_path / "train.jsonl"), "eval": sets},
        generators={"reward": {"num_workers": 0, "function": "position_match"}, "max_concurrency": 16},
    )


def ids(folder: Path) -> list[str]:
    return sorted(stored.trajectory.id for stored in Archive(folder).read())


def all_ids(*, prompts: int, samples: int) -> list[str]:
    return sorted(f"{row}-0-{index}" for row in range(prompts) for index in range(samples))


def test_every_prompt_is_answered_and_more_of_them_the_next_time(run: RunConfig, tmp_path: Path) -> None:
    run = msgspec.structs.replace(run, data=msgspec.structs.replace(run.data, eval=""))
    out = tmp_path / "out"
    stored, made = generate(run, out, samples=3, num_prompts=5, is_scored=True)
    assert (stored, made, ids(out)) == ([], 15, all_ids(prompts=5, samples=3))
    stored, made = generate(run, out, samples=3, num_prompts=None, is_scored=True)
    assert (len(stored), made, ids(out)) == (15, 21, all_ids(prompts=12, samples=3))
    rewards = [each.trajectory.reward for each in Archive(out).read()]
    assert {reward.status for reward in rewards} == {"ok"}
    assert {each.trajectory.sampling.temperature for each in Archive(out).read()} == {1.0}, "no greedy baseline"
    assert Archive(out).check().is_sound
    generate(run, tmp_path / "unscored", samples=1, num_prompts=2, is_scored=False)
    statuses = [each.trajectory.reward.status for each in Archive(tmp_path / "unscored").read()]
    assert statuses == ["error", "error"], "answers without a reward are never zeros"


def test_a_changed_setting_is_refused_and_a_wrong_one_of_a_call_without_answers_can_be_corrected(run, tmp_path) -> None:
    def make(run: RunConfig, name: str = "out", *, samples: int = 1) -> int:
        return generate(run, tmp_path / name, samples=samples, num_prompts=1, is_scored=True)[1]

    broken = make_run(generators={"reward": {"function": "nosuch:f"}}).generators
    with pytest.raises(ConfigError, match="no module 'nosuch'"):
        make(msgspec.structs.replace(run, generators=broken))
    assert make(run) == 1
    with pytest.raises(RunConflictError, match=r"^samples must stay 1 .* got 2: "):
        make(run, samples=2)
    with pytest.raises(RunConflictError, match=r"^seed must stay 0 "):
        make(msgspec.structs.replace(run, seed=7))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match="--out must be a new folder"):
        make(run, "full")
    lost = msgspec.structs.replace(run, model=msgspec.structs.replace(run.model, path=str(tmp_path / "nosuch")))
    words = r"model\.path must be a folder with .*nosuch': there is no such folder"
    with pytest.raises(ConfigError, match=words):
        make(lost, "new")
    with pytest.raises(ConfigError, match=words):
        evaluate(run, [lost.model.path], out=tmp_path / "new")
    assert not (tmp_path / "new").exists()


KILLED = """
import sys
from pathlib import Path
import msgspec
from slipstream.configs.run import RunConfig
from slipstream.launch import generate
generate._FLUSH_S = 0.05
run = msgspec.json.decode(sys.argv[1], type=RunConfig)
generate.generate(run, Path(sys.argv[2]), samples=2, num_prompts=None, is_scored=True)
"""


@pytest.mark.slow
def test_a_killed_call_goes_on_with_the_answers_that_it_lacks(run: RunConfig, tmp_path: Path) -> None:
    out = tmp_path / "out"
    engine = msgspec.structs.replace(run.generators.engine, seconds_per_token=0.05)
    generators = msgspec.structs.replace(run.generators, engine=engine, max_concurrency=4)
    run = msgspec.structs.replace(run, generators=generators)
    command = [sys.executable, "-c", KILLED, msgspec.json.encode(run).decode(), str(out)]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as killed:
        ends_at = time.monotonic() + 60
        # The second one: the first may not be in the index yet.
        while len(list(out.glob("shard-*.parquet"))) < 2:
            assert time.monotonic() < ends_at, (tmp_path / "log").read_text()
            time.sleep(0.02)
        killed.send_signal(signal.SIGKILL)
    stored, made = generate(run, out, samples=2, num_prompts=None, is_scored=True)
    assert 0 < len(stored) < 24
    assert len(stored) + made == 24
    assert ids(out) == all_ids(prompts=12, samples=2)


def test_models_are_measured_on_the_same_prompts_and_compared(run: RunConfig, tmp_path: Path) -> None:
    run = msgspec.structs.replace(run, data=msgspec.structs.replace(run.data, train=""))
    reported = evaluate(run, [run.model.path])
    assert [each.score.num_prompts for each in reported] == [len(run.evaluation.rows(12)[1])] * 2
    other = str(make_tiny_model(tmp_path / "other", seed=1))
    out = tmp_path / "out"
    found = evaluate(run, [run.model.path, other], out=out, is_whole=True)
    assert [(each.model, each.set) for each in found] == [*product((run.model.path, other), ("hard", "greedy"))]
    hard = found[0]
    assert (hard.score.num_prompts, hard.score.num_answers, hard.score.num_failed) == (12, 48, 0)
    assert {"accuracy", "reward", "pass@4", "maj@4", "best@4", "worst@4"} <= hard.score.metrics.keys()
    assert {source: part.num_answers for source, part in hard.by_source.items()} == {"task-0": 24, "task-1": 24}
    # The scripted engine takes no notice of the model.
    assert {estimate.mean for estimate in found[2].difference.values()} == {0.0}
    assert len(ids(out / "model-1")) == len(ids(out / "model-2")) == 60
    assert evaluate(run, [run.model.path, other], out=out, is_whole=True) == found, "nothing is made again"
    assert len(ids(out / "model-1")) == 60
    console = make_console()
    with console.capture() as printed:
        console.print(*tables(found))
    assert "accuracy of task-1" in printed.get()
    headers = [column.header for column in tables(found)[0].columns]
    assert headers == ["", run.model.path, other, f"{other} minus the first"]


GRADED = [
    # Prompt, truth, responses, stop reason: 2 of 3 right, 0 of 1, and 1 of 2 in two rows.
    ("1+1=", "2", ["2", "3", "2"], "stop"),
    ("2+2=", "4", ["4"], "length"),
    ("3+3=", "6", ["6"], "stop"),
    ("3+3=", "6", ["7"], "stop"),
]


def write_responses(path: Path, *, as_list: bool = True, column: str = "responses", **changed: str) -> Path:
    """Write GRADED, one row per prompt or, without `as_list`, per response. `changed`: response -> another."""
    rows = []
    for number, (prompt, truth, responses, reason) in enumerate(GRADED):
        values = {"prompt": prompt, "reward_model": {"ground_truth": truth}, "stop_reason": reason}
        values["data_source"] = f"task-{number % 2}"
        given = [changed.get(f"r{text}", text) for text in responses]
        rows += [values | {column: each} for each in ([given] if as_list else given)]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@cases(
    "name, form",
    ("r.parquet", {}),
    ("r.jsonl", {"as_list": False, "column": "response"}),
    ("r.jsonl", {"column": "written"}),
)
def test_existing_responses_are_scored_without_a_model(tmp_path: Path, capsys, name: str, form: dict[str, Any]) -> None:
    file = write_responses(tmp_path / name, **form)
    words = ["generators.reward.function=exact_match", "generators.reward.num_workers=0"]
    words += ["data.columns.response=written"] if form.get("column") == "written" else []
    cli.main(["evaluate", "--responses", str(file), "--json", *words])
    [found] = json.loads(capsys.readouterr().out)["evaluations"]
    score, metrics = found["score"], found["score"]["metrics"]
    assert (found["model"], found["set"], found["temperature"]) == (str(file), "responses", None)
    assert (score["num_prompts"], score["num_answers"], score["num_failed"], score["max_tokens"]) == (3, 6, 0, 0)
    # exact_match refuses an answer that was cut off.
    means = {name: round(each["mean"], 6) for name, each in metrics.items()}
    assert (means["accuracy"], means["reward"]) == (0.5, 0.5)
    # pass@2 of (3 answers, 2 right) is 1, of (2 answers, 1 right) 1; the third prompt has one answer.
    assert (means["pass@2"], means["pass@3"]) == (1.0, 1.0)
    assert found["by_source"]["task-0"]["num_answers"] == 4


def test_files_of_responses_are_compared_and_a_model_counts_their_tokens(run: RunConfig, tmp_path: Path) -> None:
    base = write_responses(tmp_path / "base.jsonl")
    better = write_responses(tmp_path / "better.jsonl", r3="2", r7="6")
    first, second = score_files(run, [base, better])
    assert first.score.max_tokens == 2, "a digit and the end token"
    assert second.difference["accuracy"].mean == pytest.approx(2 / 6)
    other = tmp_path / "other.jsonl"
    other.write_text("".join(line for line in base.open() if "2+2" not in line))
    with pytest.raises(ConfigError, match=r"^files of responses must have the same prompts .* but .*other\.jsonl has"):
        score_files(run, [base, other])


@cases(
    "words, message",
    ([], r"`response` or `responses` or .* must be a text or a list of texts, got only .* with data\.columns"),
    (["data.columns.response=written"], r"`written` must be a text .* got 7 in row r/00000 of "),
    (["data.columns.prompt=nosuch"], r"`nosuch` must be filled"),
    (["data.columns.response=text", PENALTY], r"MODEL must name the model .*, got none: length_penalty needs"),
    (["--all"], r"takes one model or run at most, no --out, and no --all, got --all\."),
    (["a", "b"], r"takes one model or run at most, .* got a, b\."),
)
def test_responses_that_cannot_be_scored_are_refused_in_one_sentence(tmp_path, capsys, words, message) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text('{"prompt": "1=", "answer": "1", "written": 7, "text": "1"}\n')
    reward = ["generators.reward.arguments={max_tokens: 9}"] if any("penalty" in word for word in words) else []
    assert exit_code("evaluate", "--responses", file, "generators.reward.num_workers=0", *words, *reward) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert re.search(message, printed), printed
    assert "Traceback" not in printed


def test_what_an_engine_prints_before_it_fails_is_in_a_file(tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with generate_module._engine_output():
        os.write(1, b"weights loaded")
    assert not list(tmp_path.iterdir())
    refused = pytest.raises(GeneratorError, match=r"^no memory; the engine's output is in ")
    with refused as caught, generate_module._engine_output():
        subprocess.run(["sh", "-c", "echo Traceback >&2"], check=True)
        raise GeneratorError("no memory")
    assert Path(str(caught.value).rpartition(" ")[2]).read_text() == "Traceback\n"
    os.write(1, b"shown")
    assert (*capfd.readouterr(),) == ("shown", "")
