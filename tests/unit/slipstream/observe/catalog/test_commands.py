"""Runs a command of `slipstream data` in this process."""

import json
import shlex
import shutil
from collections.abc import Callable
from math import nan
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel

from slipstream.buffer.archive.archive import Archive
from slipstream.buffer.archive.index import LedgerWriter, ManifestWriter
from slipstream.buffer.codec import encode
from slipstream.buffer.errors import ArchiveError
from slipstream.buffer.trajectory import Reward, VersionSpan
from slipstream.observe.catalog.catalog import open_catalog
from tests.builders import make_finished, make_run, write_archive
from tests.cases import cases
from tests.recorded_run import record_run
from tests.runs import exit_code
from tests.unit.buffer.archive.test_archive import make_step

NEWER, LOGPROB = {b"slipstream.archive_schema": b"7"}, "generator_logprobs"


def run(*arguments: object) -> int:
    """Return the exit code of a command of `slipstream data`."""
    return exit_code("data", *arguments)


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    """Return the lines of a command that succeeds, with runs of blanks collapsed."""
    assert run(*arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return [" ".join(line.split()) for line in out.splitlines() if line.strip()]


def complaint(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one sentence of a refused command, which prints nothing else and leaves no file."""
    capsys.readouterr()
    before = sorted(Path().iterdir())
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert (out, sorted(Path().iterdir())) == ("", before)
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    return err


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


@cases(
    "conditions, groups", ("reward>=0.6", "0"), ("outcome=retired version=0", "1"), ("text=jkl", "210"), ("text=lk", "")
)
def test_conditions_filter(archive, capsys, conditions, groups):
    lines = printed(capsys, "ls", archive, "--where", conditions)
    assert "".join(line.split()[0] for line in lines[1:]) == groups
    assert groups or lines == ["nothing matches"]
    assert groups or printed(capsys, "stats", archive, "--where", conditions) == ["nothing matches"]


def test_show_prints_origin_versions_and_tokens_of_a_trajectory(archive, capsys):
    lines = printed(capsys, "show", archive, "0-0-1")
    for expected in (
        *("trajectory 0-0-1", "group 0, member 1, attempt 0", "prompt test/0 of test", "outcome retired"),
        *("step 5 trained on it at version 4: lag 2", "reward 1, format 0.25, answer 0.75, right", "versions 2, 3"),
        *("0-5 abcdef", "6-8 version 2 -0.500 ghi", "9-11 version 3 -0.500 jkl"),
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


@cases(
    "arguments, rule",
    ("export {archive} out.csv", "OUT must end in .parquet or .jsonl"),
    ("export {archive} taken.jsonl", "OUT must not exist yet"),
    ("export {archive} nowhere/out.jsonl", "OUT must lie in a folder that exists"),
    ("ls missing", "SOURCE must be a run in runs/"),
    ("ls redis://localhost:1/0", "--run must name a run"),
    ("ls {archive} --where outcome=lost", "outcome must be one of open, ready"),
    ("ls {archive} --where text=x --tokenizer runs", "--tokenizer must be a tokenizer.json"),
    ("ls redis://localhost:notaport --run x", "must be a redis://"),
)
def test_a_wrong_argument_is_refused_in_one_sentence(archive, capsys, arguments, rule):
    Path("taken.jsonl").write_text("precious")
    assert rule in complaint(capsys, *arguments.format(archive=archive).split())
    assert Path("taken.jsonl").read_text() == "precious"


def test_a_damaged_shard_is_reported_by_verify_and_a_store_that_cannot_be_read_with_the_reason(archive, capsys):
    assert run("ls", "test", "--where", "outcome=retired") == 1
    out, err = capsys.readouterr()
    assert err.startswith("warning: only the archive is read: run 'test' must have a store, but")
    assert [line.split()[0] for line in out.splitlines()] == ["group", "1", "0"]
    assert run("refused", "test") == 2
    assert "only a store has rejected frames" in capsys.readouterr().err
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


LOGPROBS = np.array([0] * 6 + [-0.1, -1 / 3, -1e-30, -88.7, -0.0, -2.5], np.float32)
MINIMAL = {
    "group_id": "17",
    "index": 0,
    "token_ids": [4, 8, 3],
    "model_mask": [False, False, True],
    "generator_logprobs": [0, 0, -0.1],
    "reward": {"total": 1.0},
}


@pytest.fixture
def rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Groups of several shards with numbers that a careless format would round."""
    monkeypatch.chdir(tmp_path)
    fields: dict[str, Any] = {
        "generator_logprobs": LOGPROBS,
        "version_spans": [VersionSpan(6, 2), VersionSpan(9, 3)],
        "reward": Reward(1 / 3, {"a": 0.1, "b": 1 / 3 - 0.1}, is_correct=True),
        "extras": {"tool": ["x", 1, None, {"y": 0.5}]},
    }
    return write_archive(
        tmp_path / "archive",
        [make_finished("3", steps=[1, 2], **fields), make_finished("1", steps=[2], attempt=1)],
        [make_finished("2", state="rejected", reason="late", steps=[], reward=Reward(0.0, status="timeout"))],
    )


def facts(rounded: Path) -> list[tuple[bytes, str, str, list[int]]]:
    """All but the time of archiving."""
    read = Archive(rounded).read()
    return [(encode(stored.trajectory), stored.state, stored.reason, stored.steps) for stored in read]


def write_lines(*lines: dict[str, Any]) -> str:
    Path("rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return "rollouts.jsonl"


@pytest.mark.parametrize("file", ["out.jsonl", "out.parquet"])
def test_what_was_exported_comes_back_as_it_was(rounded, capsys, file):
    assert run("export", rounded, file) == 0
    assert run("import", file, "--into", "again") == 0
    assert "3 groups, 6 trajectories in again" in capsys.readouterr().out
    assert facts(Path("again")) == facts(rounded)
    assert run("verify", "again") == 0


def test_a_file_of_another_tool_or_edited_lines_or_a_rollout_of_six_fields_becomes_an_archive(rounded):
    run("export", rounded, "a.parquet", "--where", "outcome=rejected")
    run("export", rounded, "b.jsonl", "--where", "step=1")
    rows = [json.loads(line) for line in Path("b.jsonl").read_text().splitlines()]
    file = write_lines(*(row for row in rows if row["reward"]["total"] < 0.5))
    assert run("import", "a.parquet", file, "--into", "again") == 0
    assert sorted(facts(Path("again"))) == sorted([*facts(rounded)[:2], *facts(rounded)[4:]])
    run("export", rounded, "out.parquet")
    table = pq.read_table("out.parquet")
    ids = table["token_ids"].cast(pa.large_list(pa.int64()))
    place = table.schema.get_field_index("token_ids")
    changed = table.replace_schema_metadata(None).set_column(place, "token_ids", ids)
    pq.write_table(changed.append_column("note", pa.array(["x"] * 6)), "edited.parquet")
    assert run("import", "edited.parquet", "--into", "edited") == 0
    assert facts(Path("edited")) == facts(rounded)
    assert run("import", write_lines(MINIMAL, MINIMAL | {"index": 1}), "--into", "six") == 0
    first, second = Archive(Path("six")).read()
    assert (first.trajectory.id, second.trajectory.id) == ("17-0-0", "17-0-1")
    assert (first.state, first.steps, first.versions) == ("retired", [], [0])
    assert first.trajectory.version_spans == [VersionSpan(2, 0)]


@cases(
    "change, rule",
    ({"generator_logprobs": [0, 0, nan]}, "JSON is malformed"),
    ({"generator_logprobs": [0, 0, None]}, "Expected `float`, got `null` - at `$.generator_logprobs[2]`"),
    ({"generator_logprobs": [0, 0, 0.5]}, "positive_logprob"),
    ({"token_ids": [4, 8, 2**31]}, "token ids must be from 0 to 2147483647"),
    ({"reward": {"total": 1.0, "status": "fine"}}, "Invalid enum value 'fine'"),
    ({"index": -1}, "index must be from 0"),
    ({"index": 2**80}, "serialize ints"),
    ({"group_id": "seventeen"}, "group_id must be a whole number"),
    ({"id": "17-1-0"}, "id must be <group_id>-<attempt>-<index>"),
    ({"outcome": "ready"}, "outcome must be one of retired, rejected, expired, quarantined, evaluated, got"),
    ({"schema_version": 99}, "schema_version must be <= "),
    ({"color": "red"}, "unknown field `color`"),
)
def test_a_line_that_is_no_trajectory_is_refused_by_number_and_nothing_is_written(rounded, capsys, change, rule):
    file = write_lines(MINIMAL | {"group_id": "16"}, MINIMAL | change)
    refused = complaint(capsys, "import", file, "--into", "again")
    assert refused.startswith("error: rollouts.jsonl line 2 must be a trajectory: ")
    assert rule in refused


@cases(
    "lines, rule",
    ([MINIMAL | {"group_id": group} for group in "121"], "line 3: the members of a group must stand together"),
    ([MINIMAL, MINIMAL], "line 2: a group must have one member per index"),
    ([MINIMAL, MINIMAL | {"index": 1, "steps": [4]}], "line 2: the members of a group must have one outcome"),
    ([], "FILE must hold at least one"),
)
def test_lines_that_do_not_make_groups_and_other_files_are_refused(rounded, capsys, lines, rule):
    assert rule in complaint(capsys, "import", write_lines(*lines), "--into", "again")
    for file, rule in (("none.jsonl", "FILE must exist"), ("none.csv", "FILE must end in .jsonl or .parquet")):
        assert rule in complaint(capsys, "import", file, "--into", "again")


def with_value(table: pa.Table, name: str, at: tuple[int, int], value: Any) -> pa.Table:
    """The table with another value at (row, token) of a column of lists."""
    column = table[name].to_pylist()
    column[at[0]][at[1]] = value
    place = table.schema.get_field_index(name)
    return table.set_column(place, name, pa.array(column, table.schema.field(name).type))


@cases(
    "spoil, rule",
    (lambda table: table.drop_columns(["token_ids"]), " must have the columns of an archive, but lacks token_ids"),
    (lambda table: table.replace_schema_metadata(NEWER), " must have slipstream.archive_schema <= 2, got 7"),
    (lambda table: with_value(table, LOGPROB, (3, 7), nan), " row 4 must be a trajectory: nonfinite_logprob"),
    (lambda table: with_value(table, "model_mask", (1, 2), None), " row "),
)
def test_a_damaged_parquet_file_is_refused(rounded, capsys, spoil, rule):
    run("export", rounded, "out.parquet")
    pq.write_table(spoil(pq.read_table("out.parquet")), "spoilt.parquet")
    assert f"spoilt.parquet{rule}" in complaint(capsys, "import", "spoilt.parquet", "--into", "again")
    Path("spoilt.parquet").write_bytes(Path("out.parquet").read_bytes()[:700])
    assert "spoilt.parquet must be a Parquet file" in complaint(capsys, "import", "spoilt.parquet", "--into", "again")


@cases(
    "into, rule",
    ("mine", "mode=replay replay.path=ARCHIVE"),
    ("runs/mine", "replay_mix.archive=ARCHIVE"),
    ("redis://localhost:6379/0", "a run that has a store"),
    ("archive", "--into must not exist yet"),
    ("no/where", "--into must lie in a folder that exists"),
)
def test_a_folder_that_cannot_become_an_archive_is_refused(rounded, capsys, into, rule):
    Path("runs/mine").mkdir(parents=True)
    Path("runs/mine/config.yaml").write_text("name: mine\n")
    assert rule in complaint(capsys, "import", write_lines(MINIMAL), "--into", into)


def test_an_archive_is_copied_out_of_an_object_store_then_what_the_copy_lacks_and_no_damage(rounded, capsys):
    uri = f"file://{rounded}"
    assert run("fetch", uri, "--into", "copy") == 0
    assert capsys.readouterr().out.endswith("3 groups, 6 trajectories in copy\n")
    assert facts(Path("copy")) == facts(rounded)
    write_archive(rounded, [make_finished("4", steps=[3])])
    assert run("fetch", uri, "--into", "copy") == 0
    assert capsys.readouterr().out.endswith("4 groups, 8 trajectories in copy\n")
    assert facts(Path("copy")) == facts(rounded)
    assert Archive(Path("copy")).check().problems == []
    shard = sorted(rounded.glob("*.parquet"))[-1]
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    assert run("fetch", uri, "--into", "damaged") == 2
    assert "must have the checksum it was written with" in capsys.readouterr().err
    assert not Path("damaged/manifest.jsonl").exists()


def test_what_is_no_archive_and_folders_that_are_written_are_refused_by_fetch(rounded, capsys):
    uri = f"file://{rounded}"
    assert "has no manifest.jsonl" in complaint(capsys, "fetch", f"file://{rounded}/nothing", "--into", "copy")
    assert "s3://BUCKET/PREFIX" in complaint(capsys, "fetch", "archive", "--into", "copy")
    secret = complaint(capsys, "fetch", "s3://key:secret@bucket/runs", "--into", "copy")
    assert "an address with a user in it" in secret
    assert "secret" not in secret
    assert "which a run writes" in complaint(capsys, "fetch", uri, "--into", "archive")
    other = write_archive(Path("other"), [make_finished("9")])
    (other / "writer.lock").unlink()
    assert "must have the first shards of" in complaint(capsys, "fetch", uri, "--into", "other")
    for uri in (f"file://{rounded}", "s3://key:secret@bucket/archive"):
        refused = complaint(capsys, "ls", uri)
        assert "`slipstream data fetch URI --into FOLDER`" in refused
        assert "secret" not in refused


OFFSET = 450
"""A byte of the token ids: a shard with another one can still be read."""


def flip_a_bit(data: bytes) -> bytes:
    """In a column of a shard, or in the last number of a first line: what is read is still a table, or JSON."""
    end = data.find(b"}\n")
    place = next(at for at in range(end, 0, -1) if data[at : at + 1].isdigit()) if end > 0 else OFFSET
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


SHARD = "shard-00000002.parquet"
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "halved": lambda data: data[: len(data) // 2],
    "empty": lambda _: b"",
    "zeroed": lambda data: bytes(len(data)),
    "a flipped bit": flip_a_bit,
    "deleted": lambda _: b"",
    "two lines dropped": lambda data: b"".join(data.splitlines(keepends=True)[:-2]),
    "no text": lambda data: data[:30] + b"\xff" + data[31:],
}
FILES = {"ledger.jsonl": DAMAGES, "manifest.jsonl": DAMAGES, SHARD: list(DAMAGES)[:5]}
COMMANDS = {
    "verify": "data verify mine/archive",
    "stats": "data stats mine/archive",
    "step": "explain step 2 mine",
    "ls": "data ls mine/archive",
    "show": "data show mine/archive 1-0-0",
    "export": "data export mine/archive out.jsonl",
}
UNREAD = {"ledger.jsonl": {"ls", "export"}}
"""Commands that show nothing of a file."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has lost its store, with an archive of three groups, a shard and a step each."""
    called = record_run(tmp_path_factory.mktemp("whole"))
    folder = write_archive(called / "archive", *([make_finished(str(group), steps=[group + 1])] for group in range(3)))
    ledger = LedgerWriter(folder, ManifestWriter(folder))
    ledger.append([make_step(step, str(step - 1)) for step in (1, 2, 3)])
    return called


@pytest.fixture
def damaged(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(whole, "mine")
    return tmp_path / "mine" / "archive"


def called(capsys: pytest.CaptureFixture[str], command: str) -> tuple[int, str]:
    """(exit code, all that was printed)."""
    return exit_code(*COMMANDS[command].split()), "".join(capsys.readouterr())


def test_a_whole_archive_is_read(damaged, capsys):
    for command in COMMANDS:
        code, text = called(capsys, command)
        assert (code, "damaged=1" in text, "warning" in text) == (0, False, False), f"{command}: {text}"


@cases("name, damage", *((name, damage) for name in FILES for damage in FILES[name]))
def test_damage_is_named_by_every_command_that_reads_the_file(damaged, capsys, name, damage):
    path = damaged / name
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    if damage == "deleted":
        path.unlink()
    for command in COMMANDS.keys() - UNREAD.get(name, set()):
        code, text = called(capsys, command)
        assert (code in (1, 2), name in text) == (True, True), f"{command}: {text}"


def test_a_catalog_marks_damaged_shards_and_shows_the_rest(damaged):
    (damaged / SHARD).write_bytes(flip_a_bit((damaged / SHARD).read_bytes()))
    (damaged / "ledger.jsonl").unlink()
    with open_catalog(str(damaged)) as catalog:
        assert catalog.rows["group_id"].to_pylist() == ["0", "0", "2", "2"]
        assert [SHARD in note or "ledger.jsonl" in note for note in catalog.notes] == [True, True]
    (damaged / "manifest.jsonl").write_bytes(b"")
    with pytest.raises(ArchiveError), open_catalog(str(damaged)):
        pass
