"""The run folder refuses used names and keeps metrics true after a resume."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import redis
import torch
from safetensors.torch import save_file
from structlog.testing import capture_logs

from slipstream.configs.base import ConfigError
from slipstream.configs.run import RunConfig
from slipstream.runtime.disk import DiskWait, describe_disk, is_disk_full
from slipstream.runtime.run_folder import RunFolder, find_run
from tests.builders import make_run
from tests.cases import cases
from tests.fakes import no_file_above

WHOLE = [{"step": step, "time_s": float(step)} for step in (1, 2, 3)]


def folder_in(runs_dir: Path, **settings: object) -> RunFolder:
    return RunFolder(make_run(runs_dir=str(runs_dir), **settings))


def test_the_name_of_a_run_that_ended_before_it_published_weights_is_free_again(tmp_path, capsys):
    refused = folder_in(tmp_path)
    refused.claim()
    assert "name: test" in (refused.path / "config.yaml").read_text()
    assert "python" in json.loads((refused.path / "versions.json").read_text())
    (refused.store / "appendonly.aof").touch()
    (refused.logs / "broker.log").touch()
    with pytest.raises(ConfigError, match="must have one launcher"):
        folder_in(tmp_path, seed=1).claim()
    refused.unlock()
    assert capsys.readouterr().out == ""
    again = folder_in(tmp_path, seed=1)
    again.claim()
    assert "is reused: its run ended before it published weights" in capsys.readouterr().out
    assert "seed: 1" in (again.path / "config.yaml").read_text()
    assert [*again.store.iterdir()] == []
    assert (again.logs / "broker.log").exists()


@cases("made", "", "metrics.jsonl", "summary.json", "checkpoints/step-00000001", "archive/shard-00000001.parquet")
def test_a_used_name_is_refused_unless_the_run_is_resumed(tmp_path: Path, made: str):
    used = folder_in(tmp_path)
    used.claim()
    if made:
        used.archive.mkdir()
        (used.path / made).touch()
    else:
        used.record_training()
    (used.store / "appendonly.aof").touch()
    used.unlock()
    with pytest.raises(ConfigError, match="resume=true"):
        folder_in(tmp_path).claim()
    folder_in(tmp_path, resume=True).claim()
    assert (used.store / "appendonly.aof").exists()


@pytest.mark.parametrize("resume", [False, True, "auto"])
def test_a_run_in_one_process_is_not_resumed(tmp_path: Path, resume: bool | str):
    one_process = {"mode": "serial", "weights": {"transport": "memory"}}
    used = folder_in(tmp_path, **one_process)
    used.claim()
    used.record_training()
    used.unlock()
    words = r"resume must be false with mode=serial, .* of a model below .*/test/checkpoints"
    with pytest.raises(ConfigError, match=words if resume else "which exists") as refused:
        folder_in(tmp_path, resume=resume, **one_process).check_name()
    assert "resume=true" not in str(refused.value)


def test_auto_begins_a_run_or_goes_on_where_true_only_goes_on_and_a_discarded_run_frees_its_name(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"name must be that of a run with resume=true, got 'test', .*resume=auto"):
        folder_in(tmp_path, resume=True).claim()
    assert not (tmp_path / "test" / "config.yaml").exists()
    shutil.rmtree(tmp_path / "test", ignore_errors=True)
    for is_new in (True, False):
        folder = folder_in(tmp_path, resume="auto")
        folder.claim()
        folder.discard()
        folder.unlock()
        assert folder.path.exists() is not is_new
        folder.path.mkdir(exist_ok=True)
        (folder.path / "mine").touch()
    assert (folder.path / "mine").exists(), "what was there before is kept"


@cases(
    "damage, lines, steps",
    (b'{"step": 4, "ti', [4], [1, 2, 3]),
    (b"\0" * 100, [4], [1, 2, 3]),
    (b"\0" * 100 + b"\n", [4], [1, 2, 3]),
    (b'{"step": 4, "ti{"step": 5, "time_s": 5.0}\n', [4], [1, 2, 3]),
    (b'\xff\n[1]\n{}\n{"step": "4"}\n{"step": 4}\n', [4, 5, 6, 7], [1, 2, 3, 4]),
)
def test_damaged_rows_are_dropped_with_a_word_and_the_whole_ones_are_kept(tmp_path, damage, lines, steps):
    folder = folder_in(tmp_path)
    folder.claim()
    assert [*folder.keep_metrics(up_to_step=3)] == []
    for row in [*WHOLE, {"step": 4, "time_s": 4.0}]:
        folder.append_metrics(row)
    assert [*folder.keep_metrics(up_to_step=3)] == WHOLE, "rows of rolled back steps are dropped"
    with folder.metrics.open("ab") as file:
        file.write(damage)
    with capture_logs() as logged:
        assert [row["step"] for row in folder.keep_metrics(up_to_step=9)] == steps
    assert [(line["event"], line["lines"]) for line in logged] == [("damaged_metrics_dropped", lines)]
    folder.append_metrics({"step": 6, "time_s": 6.0})
    with capture_logs() as logged:
        assert [row["step"] for row in folder.keep_metrics(up_to_step=9)] == [*steps, 6]
    assert logged == []


def test_a_full_disk_takes_a_row_whole_or_not_at_all_and_leaves_the_files_of_the_launcher(tmp_path: Path):
    folder = folder_in(tmp_path)
    with no_file_above(10), pytest.raises(OSError, match="File too large"):
        folder.claim()
    folder.claim()
    config = (folder.path / "config.yaml").read_bytes()
    with no_file_above(10), capture_logs() as logged:
        folder_in(tmp_path, resume=True).open()
    assert [line["event"] for line in logged] == ["run_folder_not_updated"]
    assert (folder.path / "config.yaml").read_bytes() == config
    folder.append_metrics(WHOLE[0])
    before = folder.metrics.read_bytes()
    with no_file_above(len(before) + 10), pytest.raises(OSError, match="File too large"):
        folder.append_metrics(WHOLE[1])
    assert folder.metrics.read_bytes() == before
    folder.append_metrics(WHOLE[1])
    with no_file_above(10), pytest.raises(OSError, match="File too large"):
        folder.keep_metrics(up_to_step=1)
    assert [*folder.keep_metrics(up_to_step=9)] == WHOLE[:2]
    assert not list(folder.path.glob("*.new"))


@pytest.mark.parametrize("name", ["..", ".", "../up", "a/b", "/tmp/x", "", "a\n", "a b", ".hidden", "x" * 81])
def test_a_name_that_is_not_one_part_of_a_path_is_refused(tmp_path: Path, name: str):
    with pytest.raises((ConfigError, msgspec.ValidationError)):
        RunFolder(msgspec.convert(msgspec.to_builtins(make_run()) | {"name": name}, RunConfig))
    if name:
        with pytest.raises(ConfigError, match="the name or the folder of a run"):
            find_run([f"runs_dir={tmp_path}/runs", f"name={name}"], command="plot")


def test_folder_and_sockets_are_for_their_owner_alone_whatever_the_length_of_the_path_and_the_environment(
    tmp_path, monkeypatch
):
    (tmp_path / "test").mkdir(mode=0o755)
    folder = folder_in(tmp_path)
    folder.open()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder.path, folder.sockets)] == [0o700, 0o700]
    folders = [folder_in(tmp_path / (letter * 100)) for letter in "aab"]
    first, again, other = (folder.sockets for folder in folders)
    assert first == again != other
    assert len(bytes(first)) < 60
    folders[0].lock()
    assert stat.S_IMODE(first.stat().st_mode) == 0o700
    folders[0].unlock()
    assert not first.exists()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert folders[0].sockets == first


@pytest.mark.parametrize("letter", ["a", "é"])
def test_the_own_socket_of_the_broker_fits_however_long_the_path(tmp_path: Path, letter: str):
    for letters in (*range(0, 120, 7), 73, 74, 75):
        folder = folder_in(tmp_path / (letter * letters))
        assert Path(folder.broker_address.removeprefix("ipc://")).parent == folder.sockets
        assert len((folder.sockets / "weights-12345678.sock").as_posix().encode()) <= 107, letters
    given = make_run(runs_dir=str(tmp_path), broker={"address": "tcp://127.0.0.1:5757"})
    assert RunFolder(given).broker_address == "tcp://127.0.0.1:5757"


def test_a_folder_of_somebody_else_and_a_link_in_place_of_the_short_one_are_refused(tmp_path, monkeypatch):
    folder = folder_in(tmp_path / ("a" * 100))
    folder.sockets.symlink_to(tmp_path)
    try:
        with pytest.raises(ConfigError, match="must be a folder, got a symbolic link"):
            folder.lock()
    finally:
        folder.sockets.unlink()
    monkeypatch.setattr("os.getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="must belong to this user, got one of user"):
        folder_in(tmp_path).make()


HOLD = """
import sys
from slipstream.runtime.run_folder import RunFolder
from tests.builders import make_run
folder = RunFolder(make_run(runs_dir=sys.argv[1]))
folder.claim()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_run_has_one_owner_until_that_process_is_gone(tmp_path: Path):
    command, pipe = [sys.executable, "-c", HOLD, str(tmp_path)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "held\n"
        second = folder_in(tmp_path, resume=True)
        for refused in (second.check_name, second.claim, second.lock):
            with pytest.raises(ConfigError, match=f"process {owner.pid} runs it"):
                refused()
        owner.kill()
    second.claim()


def fill(path: Path) -> None:
    with open("/dev/full", "wb", buffering=0) as full:  # noqa: PTH123
        full.write(path.name.encode())


def test_a_full_disk_is_recognized_and_named_by_its_mount_also_for_a_file_that_is_not_there_yet(tmp_path: Path):
    with pytest.raises(OSError, match="No space") as of_the_system:
        fill(tmp_path)
    with no_file_above(10), pytest.raises(Exception, match="File too large") as of_rust:
        save_file({"weight": torch.zeros(1000)}, tmp_path / "file")
    of_redis = redis.ResponseError("MISCONF Errors writing to the AOF file: No space left on device")
    for error in (of_the_system.value, of_rust.value, of_redis):
        assert is_disk_full(error), error
    described = describe_disk(tmp_path / "not" / "there")
    assert described.endswith(f"which holds {tmp_path}/not/there")
    mount = Path(described.split(" (")[0])
    assert mount.is_mount()
    assert tmp_path.is_relative_to(mount)


@pytest.mark.parametrize("error", [PermissionError(13, "denied"), ValueError("no"), redis.ConnectionError("gone")])
def test_other_errors_are_not_taken_for_one_and_end_the_wait(tmp_path: Path, error: Exception):
    assert not is_disk_full(error)
    with pytest.raises(type(error)):
        DiskWait().retry(lambda: (_ for _ in ()).throw(error), what="a file", path=tmp_path)


def test_a_write_is_repeated_until_there_is_room_and_the_wait_is_shown(tmp_path: Path):
    reasons: list[str] = []
    calls: list[str] = []
    disk = DiskWait(while_waiting=lambda: calls.append("kept alive"), retry_every_s=0.001)

    def write() -> str:
        reasons.append(disk.reason)
        if len(reasons) < 4:
            fill(tmp_path)
        return "written"

    with capture_logs() as logged:
        assert disk.retry(write, what="the metrics", path=tmp_path) == "written"
    assert reasons[0] == disk.reason == ""
    assert all("room for the metrics on the disk" in reason and str(tmp_path) in reason for reason in reasons[1:])
    assert calls == ["kept alive"]
    assert [line["event"] for line in logged] == ["disk_full", "disk_has_room"]
    assert os.strerror(28) in logged[0]["error"]


def test_a_write_is_repeated_once_there_is_more_room_else_ever_less_often(tmp_path, monkeypatch):
    time, tried_at = SimpleNamespace(now=0.0), list[float]()
    time.monotonic = lambda: time.now
    time.sleep = lambda seconds: vars(time).update(now=time.now + seconds)
    monkeypatch.setattr("slipstream.runtime.disk.time", time)
    monkeypatch.setattr("slipstream.runtime.disk._free_bytes", lambda path: 2**21 if time.now >= 9.0 else 0)

    def write() -> None:
        tried_at.append(time.now)
        if time.now < 9.0:
            fill(tmp_path)

    DiskWait().retry(write, what="a checkpoint", path=tmp_path)
    assert tried_at == [0.0, 1.0, 3.0, 7.0, 9.0]
