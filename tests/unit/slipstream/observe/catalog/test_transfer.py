"""`slipstream data import` and `fetch`: files come back unchanged; what is no trajectory or no archive is refused."""

import json
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.buffer.archive.archive import Archive
from slipstream.buffer.codec import encode
from slipstream.buffer.trajectory import Reward, VersionSpan
from tests.builders import make_finished, write_archive
from tests.unit.slipstream.observe.catalog.data_command import complaint, run

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
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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


def facts(archive: Path) -> list[tuple[bytes, str, str, list[int]]]:
    """All but the time of archiving."""
    read = Archive(archive).read()
    return [(encode(stored.trajectory), stored.state, stored.reason, stored.steps) for stored in read]


def write_lines(*lines: dict[str, Any]) -> str:
    Path("rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return "rollouts.jsonl"


@pytest.mark.parametrize("file", ["out.jsonl", "out.parquet"])
def test_what_was_exported_comes_back_as_it_was(archive, capsys, file):
    assert run("export", archive, file) == 0
    assert run("import", file, "--into", "again") == 0
    assert "3 groups, 6 trajectories in again" in capsys.readouterr().out
    assert facts(Path("again")) == facts(archive)
    assert run("verify", "again") == 0


def test_filtered_exports_and_edited_lines_make_one_archive(archive):
    run("export", archive, "a.parquet", "--where", "outcome=rejected")
    run("export", archive, "b.jsonl", "--where", "step=1")
    rows = [json.loads(line) for line in Path("b.jsonl").read_text().splitlines()]
    file = write_lines(*(row for row in rows if row["reward"]["total"] < 0.5))
    assert run("import", "a.parquet", file, "--into", "again") == 0
    assert sorted(facts(Path("again"))) == sorted([*facts(archive)[:2], *facts(archive)[4:]])


def test_a_parquet_file_written_by_another_tool_is_imported(archive):
    run("export", archive, "out.parquet")
    table = pq.read_table("out.parquet")
    ids = table["token_ids"].cast(pa.large_list(pa.int64()))
    place = table.schema.get_field_index("token_ids")
    changed = table.replace_schema_metadata(None).set_column(place, "token_ids", ids)
    pq.write_table(changed.append_column("note", pa.array(["x"] * 6)), "edited.parquet")
    assert run("import", "edited.parquet", "--into", "again") == 0
    assert facts(Path("again")) == facts(archive)


def test_a_rollout_from_elsewhere_needs_six_fields(archive):
    assert run("import", write_lines(MINIMAL, MINIMAL | {"index": 1}), "--into", "again") == 0
    first, second = Archive(Path("again")).read()
    assert (first.trajectory.id, second.trajectory.id) == ("17-0-0", "17-0-1")
    assert (first.state, first.steps, first.versions) == ("retired", [], [0])
    assert first.trajectory.version_spans == [VersionSpan(2, 0)]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"generator_logprobs": [0, 0, nan]}, "JSON is malformed"),
        ({"generator_logprobs": [0, 0, None]}, "Expected `float`, got `null` - at `$.generator_logprobs[2]`"),
        ({"generator_logprobs": [0, 0, 0.5]}, "positive_logprob"),
        ({"generator_logprobs": [0, -0.1]}, "shape: generator_logprobs must be float32[3]"),
        ({"model_mask": [False] * 3}, "empty"),
        ({"token_ids": [4, 8, 2**31]}, "token ids must be from 0 to 2147483647"),
        ({"token_ids": [4, -1, 3]}, "token ids must be from 0 to 2147483647"),
        ({"reward": {"total": 1e300}}, "reward"),
        ({"reward": {"total": 1.0, "status": "fine"}}, "Invalid enum value 'fine'"),
        ({"index": -1}, "index must be from 0"),
        ({"index": 2**80}, "serialize ints"),
        ({"group_id": "seventeen"}, "group_id must be a whole number"),
        ({"id": "17-1-0"}, "id must be <group_id>-<attempt>-<index>"),
        ({"outcome": "ready"}, "outcome must be one of retired, rejected, expired, quarantined, evaluated, got"),
        ({"schema_version": 99}, "schema_version must be <= "),
        ({"version_spans": [[0, -1]]}, "version_spans"),
        ({"stop_reason": "tired" * 20}, "stop_reason"),
        ({"color": "red"}, "unknown field `color`"),
    ],
)
def test_a_line_that_is_no_trajectory_is_refused_by_number_and_nothing_is_written(archive, capsys, change, rule):
    file = write_lines(MINIMAL | {"group_id": "16"}, MINIMAL | change)
    told = complaint(capsys, "import", file, "--into", "again")
    assert told.startswith("error: rollouts.jsonl line 2 must be a trajectory: ")
    assert rule in told


@pytest.mark.parametrize(
    ("groups", "change", "rule"),
    [
        (["1", "2", "1"], {}, "line 3: the members of a group must stand together"),
        (["1", "1"], {}, "line 2: a group must have one member per index"),
        (["1", "1"], {"index": 1, "steps": [4]}, "line 2: the members of a group must have one outcome"),
    ],
)
def test_members_that_do_not_make_a_group_are_refused(archive, capsys, groups, change, rule):
    *others, last = [MINIMAL | {"group_id": group} for group in groups]
    assert rule in complaint(capsys, "import", write_lines(*others, last | change), "--into", "again")


def with_value(table: pa.Table, name: str, at: tuple[int, int], value: Any) -> pa.Table:
    """The table with another value at (row, token) of a column of lists."""
    column = table[name].to_pylist()
    column[at[0]][at[1]] = value
    place = table.schema.get_field_index(name)
    return table.set_column(place, name, pa.array(column, table.schema.field(name).type))


NEWER, LOGPROB = {b"slipstream.archive_schema": b"7"}, "generator_logprobs"


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (lambda table: table.drop_columns(["token_ids"]), " must have the columns of an archive, but lacks token_ids"),
        (lambda table: table.replace_schema_metadata(NEWER), " must have slipstream.archive_schema <= 2, got 7"),
        (lambda table: with_value(table, LOGPROB, (3, 7), nan), " row 4 must be a trajectory: nonfinite_logprob"),
        (lambda table: with_value(table, "model_mask", (1, 2), None), " row "),
    ],
)
def test_a_damaged_parquet_file_is_refused(archive, capsys, spoil, rule):
    run("export", archive, "out.parquet")
    pq.write_table(spoil(pq.read_table("out.parquet")), "spoilt.parquet")
    assert f"spoilt.parquet{rule}" in complaint(capsys, "import", "spoilt.parquet", "--into", "again")
    Path("spoilt.parquet").write_bytes(Path("out.parquet").read_bytes()[:700])
    assert "spoilt.parquet must be a Parquet file" in complaint(capsys, "import", "spoilt.parquet", "--into", "again")


@pytest.mark.parametrize(
    ("into", "rule"),
    [
        ("mine", "mode=replay replay.path=ARCHIVE"),
        ("runs/mine", "replay_mix.archive=ARCHIVE"),
        ("redis://localhost:6379/0", "a run that has a store"),
        ("archive", "--into must not exist yet"),
        ("no/where", "--into must lie in a folder that exists"),
    ],
)
def test_a_folder_that_cannot_become_an_archive_is_refused(archive, capsys, into, rule):
    Path("runs/mine").mkdir(parents=True)
    Path("runs/mine/config.yaml").write_text("name: mine\n")
    assert rule in complaint(capsys, "import", write_lines(MINIMAL), "--into", into)


def test_missing_unknown_and_empty_files_are_refused(archive, capsys):
    assert "FILE must exist" in complaint(capsys, "import", "none.jsonl", "--into", "again")
    assert "FILE must end in .jsonl or .parquet" in complaint(capsys, "import", "none.csv", "--into", "again")
    assert "FILE must hold at least one" in complaint(capsys, "import", write_lines(), "--into", "again")


def test_an_archive_is_copied_out_of_an_object_store_then_what_the_copy_lacks_and_no_damage(archive, capsys):
    uri = f"file://{archive}"
    assert run("fetch", uri, "--into", "copy") == 0
    assert capsys.readouterr().out.endswith("3 groups, 6 trajectories in copy\n")
    assert facts(Path("copy")) == facts(archive)
    write_archive(archive, [make_finished("4", steps=[3])])
    assert run("fetch", uri, "--into", "copy") == 0
    assert capsys.readouterr().out.endswith("4 groups, 8 trajectories in copy\n")
    assert facts(Path("copy")) == facts(archive)
    assert Archive(Path("copy")).check().problems == []
    shard = sorted(archive.glob("*.parquet"))[-1]
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    assert run("fetch", uri, "--into", "damaged") == 2
    assert "must have the checksum it was written with" in capsys.readouterr().err
    assert not Path("damaged/manifest.jsonl").exists()


def test_what_is_no_archive_and_folders_that_are_written_are_refused_by_fetch(archive, capsys):
    uri = f"file://{archive}"
    assert "has no manifest.jsonl" in complaint(capsys, "fetch", f"file://{archive}/nothing", "--into", "copy")
    assert "s3://BUCKET/PREFIX" in complaint(capsys, "fetch", "archive", "--into", "copy")
    secret = complaint(capsys, "fetch", "s3://key:secret@bucket/runs", "--into", "copy")
    assert "an address with a user in it" in secret
    assert "secret" not in secret
    assert "which a run writes" in complaint(capsys, "fetch", uri, "--into", "archive")
    other = write_archive(Path("other"), [make_finished("9")])
    (other / "writer.lock").unlink()
    assert "must have the first shards of" in complaint(capsys, "fetch", uri, "--into", "other")
    for uri in (f"file://{archive}", "s3://key:secret@bucket/archive"):
        refused = complaint(capsys, "ls", uri)
        assert "`slipstream data fetch URI --into FOLDER`" in refused
        assert "secret" not in refused
