"""A full disk is recognized in the errors of every library, named, and waited for."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis
import torch
from safetensors.torch import save_file
from structlog.testing import capture_logs

from slipstream.runtime.disk import DiskWait, describe_disk, is_disk_full
from tests.fakes import no_file_above


def fill(path: Path) -> None:
    with open("/dev/full", "wb", buffering=0) as full:  # noqa: PTH123
        full.write(path.name.encode())


def test_a_full_disk_is_recognized(tmp_path: Path):
    with pytest.raises(OSError, match="No space") as of_the_system:
        fill(tmp_path)
    with no_file_above(10), pytest.raises(Exception, match="File too large") as of_rust:
        save_file({"weight": torch.zeros(1000)}, tmp_path / "file")
    of_redis = redis.ResponseError("MISCONF Errors writing to the AOF file: No space left on device")
    for error in (of_the_system.value, of_rust.value, of_redis):
        assert is_disk_full(error), error


@pytest.mark.parametrize("error", [PermissionError(13, "denied"), ValueError("no"), redis.ConnectionError("gone")])
def test_other_errors_are_not_taken_for_one_and_end_the_wait(tmp_path: Path, error: Exception):
    assert not is_disk_full(error)

    def write() -> None:
        raise error

    with pytest.raises(type(error)):
        DiskWait().retry(write, what="a file", path=tmp_path)


def test_a_disk_is_named_by_its_mount_also_for_a_file_that_is_not_there_yet(tmp_path: Path):
    described = describe_disk(tmp_path / "not" / "there")
    assert described.endswith(f"which holds {tmp_path}/not/there")
    mount = Path(described.split(" (")[0])
    assert mount.is_mount()
    assert tmp_path.is_relative_to(mount)


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
