"""MetricsTable: a growing file as columns."""

import json
import os
from pathlib import Path

import pytest

from slipstream.observe.metrics_rows import Health, MetricsFile, MetricsTable, read_tail


def write(path: Path, *rows: dict, end: str = "\n") -> None:
    with path.open("a") as file:
        file.write("\n".join(map(json.dumps, rows)) + end)


@pytest.fixture
def table(tmp_path: Path) -> MetricsTable:
    return MetricsTable(tmp_path / "metrics.jsonl")


def test_a_file_that_is_not_there_yet_is_empty_and_is_read_once_it_is(table):
    assert (table.poll(), len(table), table.keys) == ([], 0, [])
    write(table.path, {"step": 1, "a": 0.5})
    assert table.poll() == [{"step": 1, "a": 0.5}]
    assert (table.poll(), len(table), table.generation) == ([], 1, 0)


def test_a_value_that_a_row_lacks_is_null_and_others_have_as_many_digits_as_a_screen_shows(table):
    rows = [{"step": 1, "a": 0.123456789}, {"step": 2, "b": 123456789.0}, {"step": 3, "a": 3.0}]
    write(table.path, *rows)
    table.poll()
    columns = {"step": [1, 2, 3], "a": [0.123457, None, 3.0], "b": [None, 123457000.0, None]}
    assert table.series(["step", "a", "b", "c"]) == columns
    assert [table.row(index) for index in range(3)] == rows
    assert (table.newest("b"), table.newest("c")) == (123456789.0, None)


def test_a_line_that_is_being_written_is_read_when_it_is_whole(table):
    write(table.path, {"step": 1})
    with table.path.open("a") as file:
        file.write('{"step": 2, "a"')
        file.flush()
        assert [row["step"] for row in table.poll()] == [1]
        file.write(": 7}\n")
    assert table.poll() == [{"step": 2, "a": 7}]


def test_damaged_lines_are_left_out_and_numbers_that_are_not_finite_are_null(table):
    table.path.write_text('{"step": 1, "a": NaN}\n\0\0\0\n{"step": "x"}\n[1]\n{"step": 2, "a": Infinity}\n')
    assert [row["step"] for row in table.poll()] == [1, 2]
    assert table.series(["a"]) == {"a": [None, None]}


@pytest.mark.parametrize("steps", [[1], [1, 12, 13]])
def test_a_replaced_file_is_read_again_whether_it_is_shorter_or_longer(tmp_path, table, steps):
    # A run that resumes rewrites its file without the steps that are rolled back.
    write(table.path, {"step": 1}, {"step": 2})
    table.poll()
    write(tmp_path / "new", *({"step": step} for step in steps))
    os.replace(tmp_path / "new", table.path)  # noqa: PTH105
    assert [row["step"] for row in table.poll()] == steps
    assert (len(table), table.generation) == (len(steps), 1)


def test_a_file_that_cannot_be_opened_or_read_is_asked_again(table, monkeypatch):
    # It can be opened, and nothing is mapped at its beginning.
    table.path.symlink_to("/proc/self/mem")
    assert (table.poll(), len(table)) == ([], 0)
    table.path.unlink()
    write(table.path, {"step": 1})
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda *_: (_ for _ in ()).throw(OSError(116, "Stale file handle")))
        assert table.poll() == []
    assert table.poll() == [{"step": 1}]


def test_what_is_nested_is_kept_of_the_newest_row(table):
    write(table.path, {"step": 1, "lag/histogram": {"0": 3}}, {"step": 2, "lag/histogram": {"1": 4}, "other": [1]})
    table.poll()
    assert (table.nested, table.keys) == ({"lag/histogram": {"1": 4}}, ["step"])


def test_the_tail_is_read_without_the_rest(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_tail(path) == []
    write(path, *({"step": step, "text": "x" * 1000} for step in range(1, 1001)))
    tail = read_tail(path)
    assert tail[-1]["step"] == 1000
    assert len(tail) < 300


def test_a_file_is_read_on_from_its_position_and_after_a_resume_that_cut_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    assert file.read(0).rows == []
    lines = [json.dumps({"step": step}) + "\n" for step in (1, 2, 3)]
    path.write_text("".join(lines) + '{"step": 4')
    changes = file.read(0)
    assert [each["step"] for each in changes.rows] == [1, 2, 3]
    path.write_text("".join(lines[:2]))
    assert file.read(changes.position).rows == []
    cut = file.read(changes.position).position
    path.write_text("".join([*lines[:2], '{"step": 3, "again": 1}\n']))
    assert file.read(cut).rows == [{"step": 3, "again": 1}]


def test_a_metric_outside_of_its_range_is_a_warning_until_it_has_returned():
    health = Health()
    for step in range(1, 4):
        health.add({"step": step, "learner/ess": 0.9})
    assert health.warnings == []
    health.add({"step": 4, "learner/ess": 0.2})
    health.add({"step": 5, "learner/ess": 0.1, "learner/failed_fraction": 0.5})
    failed, ess = health.warnings
    assert (failed.metric, failed.value, failed.since_step) == ("learner/failed_fraction", 0.5, 5)
    assert (ess.metric, ess.value, ess.since_step, ess.healthy) == ("learner/ess", 0.1, 4, ">= 0.3")
    assert "max_lag" in ess.advice
    for step in range(6, 9):
        health.add({"step": step, "learner/ess": 0.9, "learner/failed_fraction": 0.0})
    assert health.warnings == []
