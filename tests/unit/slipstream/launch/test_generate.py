"""`slipstream generate` and `evaluate`: every answer once, even after interruptions; changed settings are refused."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import pytest

from slipstream import cli
from slipstream.buffer.archive.archive import Archive
from slipstream.buffer.errors import RunConflictError
from slipstream.configs.base import ConfigError
from slipstream.configs.run import RunConfig
from slipstream.generators.errors import GeneratorError
from slipstream.launch import generate as generate_module
from slipstream.launch.evaluate import evaluate, tables
from slipstream.launch.generate import generate
from slipstream.runtime.command_line import make_console
from tests.builders import make_run
from tests.tiny_model import make_tiny_model


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    rows = [
        {"prompt": f"{row}=", "data_source": f"task-{row % 2}", "reward_model": {"ground_truth": str(row)}}
        for row in range(12)
    ]
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


def test_a_changed_setting_is_refused_in_one_sentence(run: RunConfig, tmp_path: Path) -> None:
    out = tmp_path / "out"
    generate(run, out, samples=1, num_prompts=1, is_scored=True)
    with pytest.raises(RunConflictError, match=r"^samples must stay 1 .* got 2: "):
        generate(run, out, samples=2, num_prompts=1, is_scored=True)
    with pytest.raises(RunConflictError, match=r"^seed must stay 0 "):
        generate(msgspec.structs.replace(run, seed=7), out, samples=1, num_prompts=1, is_scored=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match="--out must be a new folder"):
        generate(run, tmp_path / "full", samples=1, num_prompts=1, is_scored=True)


def test_a_wrong_setting_of_a_call_without_answers_can_be_corrected(run: RunConfig, tmp_path: Path) -> None:
    broken = make_run(generators={"reward": {"function": "nosuch:f"}}).generators
    wrong = msgspec.structs.replace(run, generators=broken)
    with pytest.raises(ConfigError, match="no module 'nosuch'"):
        generate(wrong, tmp_path / "out", samples=1, num_prompts=1, is_scored=True)
    assert generate(run, tmp_path / "out", samples=1, num_prompts=1, is_scored=True)[1] == 1
    lost = msgspec.structs.replace(run, model=msgspec.structs.replace(run.model, path=str(tmp_path / "nosuch")))
    for refused in (
        lambda: generate(lost, tmp_path / "new", samples=1, num_prompts=1, is_scored=True),
        lambda: evaluate(run, [lost.model.path], out=tmp_path / "new"),
    ):
        with pytest.raises(ConfigError, match=r"model\.path must be a folder with .*nosuch': there is no such folder"):
            refused()
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
    run = msgspec.structs.replace(
        run, generators=msgspec.structs.replace(run.generators, engine=engine, max_concurrency=4)
    )
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
    assert [(each.model, each.set) for each in found] == [
        (model, name) for model in (run.model.path, other) for name in ("hard", "greedy")
    ]
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


def test_commands_without_a_model_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["evaluate", "seed=1"], ["generate", "a", "b", "--out", "x"]):
        with pytest.raises(SystemExit):
            cli.main(words)
    printed = capsys.readouterr().err
    assert "MODEL must be a folder" in printed
    assert "generate must have one model, got a, b." in printed


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
