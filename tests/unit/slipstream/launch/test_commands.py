"""Commands on a run: which run they mean, and what they refuse."""

import os
from pathlib import Path

import msgspec
import pytest

from slipstream.cli import main
from slipstream.configs.base import ConfigError
from slipstream.configs.load import load
from slipstream.launch.commands import scale
from slipstream.observe.run_status import RunStatus
from slipstream.runtime.run_folder import RunFolder, find_run
from tests.fakes import STATUS_ROW, status_of


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught:
        main(["status", *arguments])
    return caught.value.code, capsys.readouterr().err


def test_json_holds_every_field_and_decodes_to_the_same_status():
    status = status_of(ready_versions={3: 5, 1: 2}, rows=(STATUS_ROW,))
    plain = msgspec.json.decode(msgspec.json.encode(status))
    assert plain.keys() == set(RunStatus.__struct_fields__)
    assert plain["ready_by_lag"] == {"0": 5, "2": 2}
    assert msgspec.json.decode(msgspec.json.encode(status), type=RunStatus) == status


def test_a_run_that_does_not_exist_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs_dir = f"runs_dir={tmp_path}"
    missing = f"{tmp_path}/mine must be a run folder"
    code, error = failure(capsys, runs_dir, "name=mine")
    assert (code, f"{missing}, but has no config.yaml: there is no run in" in error) == (2, True)
    code, error = failure(capsys, runs_dir)
    assert (code, "there must be a run in" in error) == (2, True)
    with pytest.raises(ConfigError, match=missing):
        scale(["generators=2", runs_dir, "name=mine"])


@pytest.mark.parametrize("content", [b"name: [\n  - {\nseed: 1", b"\xff\xfe\x00", b"", b"nosuch: 1", b"seed: x"])
def test_a_broken_configuration_is_one_sentence(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_bytes(content)
    code, error = failure(capsys, f"runs_dir={tmp_path}", "mine")
    assert code == 2
    (line,) = error.splitlines()
    assert line.startswith(f"error: {tmp_path}/mine/config.yaml must be a run configuration of this version")
    assert line.endswith("restore it, or use the version that started the run.")


def test_a_run_is_found_by_name_folder_or_setting_and_a_wrong_name_gets_the_nearest(tmp_path: Path):
    runs_dir = f"runs_dir={tmp_path}"
    for name in ("digits", "addition"):
        RunFolder(load(["experiment=digits_serial", f"name={name}", runs_dir])).open()
    folder = tmp_path / "digits"
    for words in (["digits", runs_dir], ["name=digits", runs_dir], [str(folder)]):
        assert find_run(words, command="plot") == folder
    with pytest.raises(ConfigError, match="did you mean 'digits'"):
        find_run(["digts", runs_dir], command="plot")
    with pytest.raises(ConfigError, match=r"there are '(digits', 'addition|addition', 'digits)'"):
        find_run(["mine", runs_dir], command="plot")


def test_without_a_name_the_newest_run_is_meant(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for age, name in enumerate(("newest", "older", "oldest")):
        folder = RunFolder(load(["experiment=digits_serial", f"name={name}", f"runs_dir={tmp_path}"]))
        folder.open()
        os.utime(folder.path / "config.yaml", (1e9 - age, 1e9 - age))
    code, error = failure(capsys, f"runs_dir={tmp_path}")
    assert code == 2
    assert "run 'newest' must have a store to inspect, but with mode=serial it is private" in error


@pytest.mark.parametrize("words", [[], ["generators=-1"], ["generators=two"], ["generators=1", "generators=2"]])
def test_scale_needs_one_number(words: list[str]):
    with pytest.raises(ConfigError, match="scale needs generators=N"):
        scale(words)


@pytest.mark.parametrize(
    "words", [["status"], ["scale", "generators=2"], ["drain", "generator-0"], ["pause"], ["profile"]]
)
def test_every_command_says_that_a_run_has_ended(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("slipstream.observe.reader.COMMAND_TIMEOUT_S", 0.05)
    folder = RunFolder(load(["name=mine", f"runs_dir={tmp_path}"]))
    folder.open()

    def answer() -> str:
        with pytest.raises(SystemExit) as caught:
            main([*words, f"runs_dir={tmp_path}"])
        assert caught.value.code == 1
        return capsys.readouterr().err

    assert "run 'mine' is not in progress here" in answer()
    folder.lock()
    assert "no store answered at" in answer()
    folder.write_summary({})
    assert "run 'mine' has ended and its store does not answer: its results are in" in answer()
