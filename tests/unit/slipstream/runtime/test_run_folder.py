"""The run folder refuses used names and keeps metrics true after a resume."""

import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from slipstream.configs.base import ConfigError
from slipstream.runtime.run_folder import RunFolder
from tests.builders import make_run
from tests.fakes import no_file_above


def test_a_used_name_is_refused_unless_the_run_is_resumed(tmp_path: Path):
    RunFolder(make_run(runs_dir=str(tmp_path))).claim()
    with pytest.raises(ConfigError, match="resume=true"):
        RunFolder(make_run(runs_dir=str(tmp_path))).claim()
    RunFolder(make_run(runs_dir=str(tmp_path), resume=True)).claim()


def test_it_records_configuration_and_versions(tmp_path: Path):
    folder = RunFolder(make_run(runs_dir=str(tmp_path)))
    folder.claim()
    assert "name: test" in (folder.path / "config.yaml").read_text()
    assert "python" in json.loads((folder.path / "versions.json").read_text())


def test_rows_of_rolled_back_steps_are_dropped(tmp_path: Path):
    folder = RunFolder(make_run(runs_dir=str(tmp_path)))
    folder.claim()
    assert folder.keep_metrics(up_to_step=3) == []
    for step in range(1, 6):
        folder.append_metrics({"step": step, "time_s": float(step)})
    assert [row["step"] for row in folder.keep_metrics(up_to_step=3)] == [1, 2, 3]
    assert len(folder.metrics.read_text().splitlines()) == 3


WHOLE = [{"step": step, "time_s": float(step)} for step in (1, 2, 3)]


@pytest.mark.parametrize(
    ("damage", "lines", "steps"),
    [
        (b'{"step": 4, "ti', [4], [1, 2, 3]),
        (b"\0" * 100, [4], [1, 2, 3]),
        (b"\0" * 100 + b"\n", [4], [1, 2, 3]),
        (b'{"step": 4, "ti{"step": 5, "time_s": 5.0}\n', [4], [1, 2, 3]),
        (b'\xff\n[1]\n{}\n{"step": "4"}\n{"step": 4}\n', [4, 5, 6, 7], [1, 2, 3, 4]),
    ],
)
def test_damaged_rows_are_dropped_with_a_word_and_the_whole_ones_are_kept(
    tmp_path: Path, damage: bytes, lines: list[int], steps: list[int]
):
    folder = RunFolder(make_run(runs_dir=str(tmp_path)))
    folder.claim()
    for row in WHOLE:
        folder.append_metrics(row)
    with folder.metrics.open("ab") as file:
        file.write(damage)
    with capture_logs() as logged:
        assert [row["step"] for row in folder.keep_metrics(up_to_step=9)] == steps
    assert [(line["event"], line["lines"]) for line in logged] == [("damaged_metrics_dropped", lines)]
    folder.append_metrics({"step": 6, "time_s": 6.0})
    with capture_logs() as logged:
        assert [row["step"] for row in folder.keep_metrics(up_to_step=9)] == [*steps, 6]
    assert logged == []


def test_a_full_disk_takes_a_row_whole_or_not_at_all(tmp_path: Path):
    folder = RunFolder(make_run(runs_dir=str(tmp_path)))
    folder.claim()
    folder.append_metrics(WHOLE[0])
    before = folder.metrics.read_bytes()
    with no_file_above(len(before) + 10), pytest.raises(OSError, match="File too large"):
        folder.append_metrics(WHOLE[1])
    assert folder.metrics.read_bytes() == before
    folder.append_metrics(WHOLE[1])
    with no_file_above(10), pytest.raises(OSError, match="File too large"):
        folder.keep_metrics(up_to_step=1)
    assert folder.keep_metrics(up_to_step=9) == WHOLE[:2]
    assert not list(folder.path.glob("*.new"))


def test_a_role_that_restarts_on_a_full_disk_leaves_the_files_of_its_launcher(tmp_path: Path):
    begun = RunFolder(make_run(runs_dir=str(tmp_path)))
    with no_file_above(10), pytest.raises(ConfigError, match="must have room"):
        begun.claim()
    begun.claim()
    before = (begun.path / "config.yaml").read_bytes()
    with no_file_above(10), capture_logs() as logged:
        RunFolder(make_run(runs_dir=str(tmp_path), resume=True)).open()
    assert [line["event"] for line in logged] == ["run_folder_not_updated"]
    assert (begun.path / "config.yaml").read_bytes() == before
