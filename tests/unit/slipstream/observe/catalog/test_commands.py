"""The commands on an archive: what they print, and how they end."""

import json
import shlex
from pathlib import Path

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel

from slipstream.buffer.trajectory import Reward, VersionSpan
from tests.builders import make_finished, make_run, write_archive
from tests.unit.slipstream.observe.catalog.data_command import complaint, printed, run

LETTERS = "abcdefghijkl"
"""The tokenizer: token `n` is the `n`-th letter."""


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Archive of a run with a tokenizer: two groups that were trained on, and one that was rejected."""
    monkeypatch.chdir(tmp_path)
    Path("models/test").mkdir(parents=True)
    tokenizer = Tokenizer(WordLevel({letter: number for number, letter in enumerate(LETTERS)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save("models/test/tokenizer.json")
    folder = Path("runs/test/archive")
    spans = [VersionSpan(6, 2), VersionSpan(9, 3)]
    right = Reward(1.0, {"format": 0.25, "answer": 0.75}, is_correct=True)
    late = {"state": "rejected", "reason": "late", "reward": Reward(0.0, status="timeout", detail="5 s")}
    write_archive(
        folder,
        [make_finished("0", reward=right, version_spans=spans, steps=[5]), make_finished("1", steps=[6])],
        [make_finished("2", steps=[], data_source="sums", **late)],
    )
    (folder.parent / "config.yaml").write_bytes(msgspec.yaml.encode(make_run()))
    rows = [{"step": step, "version": step} for step in range(1, 7)]
    (folder.parent / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_ls_has_a_line_per_group_or_trajectory_and_stats_count_and_distribute(archive, capsys):
    listed = printed(capsys, "ls", archive)
    assert listed == [
        "group members reward prompt answer outcome tokens versions steps data source reason",
        "2 2 0.000 abcdef ghijkl rejected 12 0 sums late",
        "1 2 0.500 abcdef ghijkl retired 12 0 6 test",
        "0 2 1.000 abcdef ghijkl retired 12 2-3 5 test",
    ]
    assert printed(capsys, "ls", archive, "--limit", 1) == [*listed[:2], "the newest 1; more with --limit"]
    lines = printed(capsys, "ls", archive, "-t", "--where", "outcome=rejected")
    assert lines[1:] == [f"2-0-{index} timeout abcdef ghijkl rejected 12 0 sums late" for index in (1, 0)]
    lines = printed(capsys, "stats", archive)
    assert "retired 2 4 0.75 50.0% 0 12 6 3.25" in lines, "half of the tokens of one group are younger"
    assert "rejected 1 2 - 0.0% 2 12 6 -" in lines
    assert "sums 1 2 - 0.0% 2 12 6 -" in lines
    assert "reward 0.75 0.5 0.5 0.75 1 1" in lines
    assert "lag of the oldest token 3.5 2 2 3.5 5 5" in lines


@pytest.mark.parametrize(
    ("conditions", "groups"),
    [("reward>=0.6", "0"), ("outcome=retired version=0", "1"), ("text=jkl", "210"), ("text=lk", "")],
)
def test_conditions_filter(archive, capsys, conditions, groups):
    lines = printed(capsys, "ls", archive, "--where", conditions)
    assert "".join(line.split()[0] for line in lines[1:]) == groups
    assert groups or lines == ["nothing matches"]
    assert groups or printed(capsys, "stats", archive, "--where", conditions) == ["nothing matches"]


def test_show_prints_origin_versions_and_tokens_of_a_trajectory(archive, capsys):
    lines = printed(capsys, "show", archive, "0-0-1")
    for expected in (
        "trajectory 0-0-1",
        "group 0, member 1, attempt 0",
        "prompt test/0 of test",
        "outcome retired",
        "step 5 trained on it at version 4: lag 2",
        "reward 1, format 0.25, answer 0.75, right",
        "versions 2, 3",
        "0-5 abcdef",
        "6-8 version 2 -0.500 ghi",
        "9-11 version 3 -0.500 jkl",
    ):
        assert expected in lines
    lines = printed(capsys, "show", archive, "0-0-1", "--tokens")
    assert (lines[-12], lines[-1]) == ("0 0 a", "11 11 version 3 -0.5000 l")
    assert "ID must be a trajectory in" in complaint(capsys, "show", archive, "9-0-0")


def test_exported_lines_hold_the_texts_too(archive, capsys):
    printed(capsys, "export", archive, "out.jsonl", "--limit", 1)
    (row,) = map(json.loads, Path("out.jsonl").read_text().splitlines())
    assert (row["id"], row["outcome"], row["steps"]) == ("0-0-0", "retired", [5])
    assert (row["prompt"], row["response"]) == ("abcdef", "ghijkl")
    assert (row["token_ids"], row["version_spans"]) == (list(range(12)), [[6, 2], [9, 3]])
    assert "step 5 trained on it" in printed(capsys, "show", "out.jsonl", "0-0-0")
    lines = printed(capsys, "export", archive, "out.parquet", "--where", "reward>=0.6")
    assert lines == ["2 trajectories in out.parquet"]
    expected = pq.read_table(archive / "shard-00000001.parquet").slice(0, 2)
    assert pq.read_table("out.parquet").equals(expected), "the columns of an archive"
    assert "a file has no accounts" in complaint(capsys, "verify", "out.jsonl")


@pytest.mark.parametrize(
    ("out", "rule"),
    [
        ("out.csv", "OUT must end in .parquet or .jsonl"),
        ("taken.jsonl", "OUT must not exist yet"),
        ("nowhere/out.jsonl", "OUT must lie in a folder that exists"),
    ],
)
def test_an_impossible_export_is_refused(archive, capsys, out, rule):
    Path("taken.jsonl").write_text("precious")
    assert rule in complaint(capsys, "export", archive, out)
    assert Path("taken.jsonl").read_text() == "precious"


def test_a_run_whose_store_cannot_be_read_is_read_from_its_archive_with_the_reason(archive, capsys):
    assert run("ls", "test", "--where", "outcome=retired") == 1
    out, err = capsys.readouterr()
    assert err.startswith("warning: only the archive is read: run 'test' must have a store, but")
    assert [line.split()[0] for line in out.splitlines()] == ["group", "1", "0"]
    assert run("refused", "test") == 2
    assert "only a store has rejected frames" in capsys.readouterr().err


def test_an_archive_is_verified_and_a_damaged_shard_is_reported_and_the_others_are_shown(archive, capsys):
    lines = ["2 shards, 3 groups, 6 trajectories, 0 steps", "damaged=0 duplicated=0 missing=0"]
    assert printed(capsys, "verify", archive) == lines
    shard = archive / "shard-00000001.parquet"
    shard.write_bytes(shard.read_bytes()[:-100])
    assert run("ls", archive) == 1
    out, err = capsys.readouterr()
    assert err.startswith("warning: shard-00000001.parquet must have ")
    assert [line.split()[0] for line in out.splitlines()] == ["group", "2"]
    assert run("verify", archive) == 1
    assert "damaged=1 duplicated=0 missing=0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["ls", "missing"], "SOURCE must be a run in runs/"),
        (["ls", "redis://localhost:1/0"], "--run must name a run"),
        (["ls", "{archive}", "--where", "outcome=lost"], "outcome must be one of open, ready"),
        (["ls", "{archive}", "--where", "text=x", "--tokenizer", "runs"], "--tokenizer must be a tokenizer.json"),
        (["ls", "redis://localhost:notaport", "--run", "x"], "must be a redis://"),
    ],
)
def test_a_wrong_argument_is_refused_in_one_sentence(archive, capsys, arguments, rule):
    assert rule in complaint(capsys, *(argument.format(archive=archive) for argument in arguments))


def test_without_a_tokenizer_ids_are_shown_and_texts_are_not_searched(archive, capsys):
    Path("models/test/tokenizer.json").write_text("{}")
    assert "must be a tokenizer of the `tokenizers` library" in complaint(capsys, "show", archive, "0-0-0")
    Path("models/test/tokenizer.json").unlink()
    assert "9-11 version 3 -0.500 9 10 11" in printed(capsys, "show", archive, "0-0-1")
    assert "a condition on text needs a tokenizer" in complaint(capsys, "ls", archive, "--where", "text=x")


def test_an_archive_of_a_run_of_another_version_is_read_with_the_tokenizer_of_its_model(archive, capsys):
    with (archive.parent / "config.yaml").open("a") as file:
        file.write("no_such_field: 1\n")
    printed(capsys, "export", archive, "out.jsonl")
    assert printed(capsys, "ls", archive, "--where", "reward>=0.6")[1:]
    Path("models/test").rename(archive.parent / "final_model")
    assert "9-11 version 3 -0.500 jkl" in printed(capsys, "show", archive, "0-0-1")


def test_control_characters_of_a_model_do_not_reach_the_terminal(archive, capsys):
    hostile = "\x1b[2J[red]x\u202e"
    write_archive(archive, [make_finished("7", data_source=hostile, token_ids=np.arange(12, dtype=np.int32))])
    assert run("ls", archive, "--where", f"source={shlex.quote(hostile)}") == 0
    assert "\\x1b[2J[red]x\\u202e" in capsys.readouterr().out
