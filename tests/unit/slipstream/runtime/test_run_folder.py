"""The run folder refuses used names and keeps metrics true after a resume."""

import json
from pathlib import Path

import pytest

from slipstream.configs.base import ConfigError
from slipstream.runtime.run_folder import RunFolder
from tests.builders import make_run


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


def test_an_incomplete_last_row_is_dropped(tmp_path: Path):
    folder = RunFolder(make_run(runs_dir=str(tmp_path)))
    folder.claim()
    folder.append_metrics({"step": 1, "time_s": 1.0})
    with folder.metrics.open("a") as file:
        file.write('{"step": 2, "ti')
    assert [row["step"] for row in folder.keep_metrics(up_to_step=5)] == [1]
    folder.append_metrics({"step": 2, "time_s": 2.0})
    assert [row["step"] for row in folder.keep_metrics(up_to_step=5)] == [1, 2]
