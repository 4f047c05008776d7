"""MetricsTable: a growing file as columns."""

import json
import os
from pathlib import Path

import pytest

from slipstream.observe.metrics_rows import MetricsFile, MetricsTable, read_tail


def write(path: Path, *rows: dict, end: str = "\n") -> None:
    with path.open("a") as file:
        file.write("\n".join(map(json.dumps, rows)) + end)


def test_a_file_that_is_not_there_yet_is_empty_and_is_read_once_it_is(tmp_path):
    table = MetricsTable(tmp_path / "metrics.jsonl")
    assert (table.poll(), len(table), table.keys) == ([], 0, [])
    write(table.path, {"step": 1, "a": 0.5})
    assert table.poll() == [{"step": 1, "a": 0.5}]
    assert (table.poll(), len(table), table.generation) == ([], 1, 0)


def test_a_value_that_a_row_lacks_is_null_wherever_its_key_began(tmp_path):
    table = MetricsTable(tmp_path / "metrics.jsonl")
    write(table.path, {"step": 1, "a": 1.0}, {"step": 2, "b": 2.0}, {"step": 3, "a": 3.0})
    table.poll()
    assert table.series(["step", "a", "b", "c"]) == {
        "step": [1, 2, 3], "a": [1.0, None, 3.0], "b": [None, 2.0, None],
    }  # fmt: skip
    assert [table.row(index) for index in range(3)] == [
        {"step": 1, "a": 1.0},
        {"step": 2, "b": 2.0},
        {"step": 3, "a": 3.0},
    ]
    assert (table.newest("b"), table.newest("c")) == (2.0, None)


def test_a_line_that_is_being_written_is_read_when_it_is_whole(tmp_path):
    table = MetricsTable(tmp_path / "metrics.jsonl")
    write(table.path, {"step": 1}, end="\n")
    with table.path.open("a") as file:
        file.write('{"step": 2, "a"')
        file.flush()
        assert [row["step"] for row in table.poll()] == [1]
        file.write(": 7}\n")
    assert table.poll() == [{"step": 2, "a": 7}]


def test_damaged_lines_are_left_out_and_numbers_that_are_not_finite_are_null(tmp_path):
    table = MetricsTable(tmp_path / "metrics.jsonl")
    table.path.write_text('{"step": 1, "a": NaN}\n\0\0\0\n{"step": "x"}\n[1]\n{"step": 2, "a": Infinity}\n')
    assert [row["step"] for row in table.poll()] == [1, 2]
    assert table.series(["a"]) == {"a": [None, None]}


@pytest.mark.parametrize("steps", [[1], [1, 12, 13]])
def test_a_replaced_file_is_read_again_whether_it_is_shorter_or_longer(tmp_path, steps):
    # A run that resumes rewrites its file without the steps that are rolled back.
    table = MetricsTable(tmp_path / "metrics.jsonl")
    write(table.path, {"step": 1}, {"step": 2})
    table.poll()
    write(tmp_path / "new", *({"step": step} for step in steps))
    os.replace(tmp_path / "new", table.path)  # noqa: PTH105
    assert [row["step"] for row in table.poll()] == steps
    assert (len(table), table.generation) == (len(steps), 1)


def test_a_file_system_that_does_not_answer_is_asked_again(tmp_path, monkeypatch):
    table = MetricsTable(tmp_path / "metrics.jsonl")
    write(table.path, {"step": 1})
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda *_: (_ for _ in ()).throw(OSError(116, "Stale file handle")))
        assert table.poll() == []
    assert table.poll() == [{"step": 1}]


def test_a_file_that_can_be_opened_but_not_read_is_asked_again(tmp_path):
    table = MetricsTable(tmp_path / "metrics.jsonl")
    # At its beginning nothing is mapped.
    table.path.symlink_to("/proc/self/mem")
    assert (table.poll(), len(table)) == ([], 0)
    table.path.unlink()
    write(table.path, {"step": 1})
    assert [row["step"] for row in table.poll()] == [1]


def test_what_is_nested_is_kept_of_the_newest_row(tmp_path):
    table = MetricsTable(tmp_path / "metrics.jsonl")
    write(table.path, {"step": 1, "lag/histogram": {"0": 3}}, {"step": 2, "lag/histogram": {"1": 4}, "other": [1]})
    table.poll()
    assert table.nested == {"lag/histogram": {"1": 4}}
    assert table.keys == ["step"]


def test_values_have_as_many_digits_as_a_screen_shows(tmp_path):
    table = MetricsTable(tmp_path / "metrics.jsonl")
    write(table.path, {"step": 1, "a": 0.123456789, "b": 123456789.0})
    table.poll()
    assert table.series(["a", "b"]) == {"a": [0.123457], "b": [123457000.0]}


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
