"""Checks of the machine: full disks, small containers, GPUs with a wrong driver."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from slipstream.launch.diagnose import machine
from slipstream.launch.diagnose.machine import (
    check_disk,
    check_gpus,
    check_hardware,
    check_memory,
    check_processes,
    judge_gpus,
)
from tests.builders import make_run

GIB = 2**30
H100 = "NVIDIA H100 80GB HBM3, 81559, 4, 580.95.05"


def plant_disk(monkeypatch: pytest.MonkeyPatch, *, free: int, inodes: int = 1000) -> None:
    blocks = free // 4096
    fake = SimpleNamespace(
        f_blocks=2 * blocks, f_bfree=blocks, f_bavail=blocks, f_frsize=4096, f_files=10**6, f_favail=inodes
    )
    monkeypatch.setattr(machine.os, "statvfs", lambda _: fake)


@pytest.mark.parametrize(
    ("free", "inodes", "verdict", "found"),
    [
        (100 * GIB, 1000, "ok", "MiB free), which holds"),
        (GIB // 2, 1000, "warn", "the run may need 1 GiB"),
        (0, 1000, "fail", "no room or no inode is left"),
        (100 * GIB, 0, "fail", "no room or no inode is left"),
    ],
)
def test_a_full_disk_fails(
    free: int, inodes: int, verdict: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_disk(monkeypatch, free=free, inodes=inodes)
    result = check_disk("disk of runs", tmp_path / "runs/mine", run=make_run())
    assert (result.verdict, bool(result.fix)) == (verdict, verdict != "ok")
    assert found in result.found


def test_a_disk_without_room_for_the_checkpoints_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_disk(monkeypatch, free=100 * GIB)
    monkeypatch.setattr(machine, "fingerprint", lambda _: SimpleNamespace(num_parameters=8 * 10**9))
    result = check_disk("disk of runs", tmp_path, run=make_run())
    assert result.verdict == "warn"
    assert "the run may need 359 GiB" in result.found


def test_a_folder_that_cannot_be_written_to_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "access", lambda *_: False)
    found = check_disk("disk of runs", tmp_path)
    assert (found.verdict, found.found) == ("fail", f"{tmp_path} cannot be written to")
    assert check_disk("disk of runs", tmp_path, is_over=True).verdict == "warn", "nothing is added to a finished run"


def plant_group(root: Path, *, version: int, **numbers: object) -> dict[str, Path]:
    """A control group `/job`; returns the arguments of the checks."""
    folder = root / "job" if version == 2 else root / "memory/job"
    folder.mkdir(parents=True)
    for name, number in numbers.items():
        (folder / name.replace("__", ".")).write_text(f"{number}\n")
    (root / "own").write_text("0::/job\n" if version == 2 else "0::/\n4:memory:/job\n")
    return {"root": root, "own": root / "own"}


def test_the_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory: Any = SimpleNamespace(total=64 * GIB, available=50 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert check_memory(root=tmp_path / "none", own=tmp_path / "none").found == "50.0 GiB free of 64.0 GiB"
    new = plant_group(tmp_path / "2", version=2, memory__max=8 * GIB, memory__current=7 * GIB)
    result = check_memory(**new)
    assert (result.verdict, result.found) == ("warn", "1.0 GiB free of 8.0 GiB, the limit of its container")
    (tmp_path / "2/job/memory.stat").write_text(f"anon 5\ninactive_file {3 * GIB}\n")
    assert check_memory(**new).verdict == "ok", "the kernel gives back what it keeps of files"
    (tmp_path / "2/job/memory.events").write_text("oom 3\noom_kill 2\n")
    assert check_memory(**new).found.endswith("2 of its processes were killed for it")
    numbers = {"memory__limit_in_bytes": 8 * GIB, "memory__usage_in_bytes": 7 * GIB}
    assert check_memory(**plant_group(tmp_path / "1", version=1, **numbers)).verdict == "warn"
    unlimited = {"memory__limit_in_bytes": 2**63 - 4096, "memory__usage_in_bytes": 7 * GIB}
    assert check_memory(**plant_group(tmp_path / "0", version=1, **unlimited)).verdict == "ok"


def test_few_processes_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (-1, -1))
    assert check_processes(root=tmp_path, own=tmp_path / "none").found == "unlimited"
    # One of version 2 has the files of all controllers.
    group = plant_group(tmp_path, version=2, pids__max=600, pids__current=500, memory__stat=f"inactive_file {GIB}")
    assert check_processes(**group).found == "only 100 may be started"
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (64, 64))
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    assert check_processes(root=tmp_path, own=tmp_path / "none").found == "only 64 may be started"


@pytest.mark.parametrize(
    ("num_gpus", "lines", "driver", "is_live", "verdict", "found"),
    [
        (0, [], "", False, "skipped", "no NVIDIA GPU here"),
        (8, [H100] * 8, "13.0", False, "ok", "8 x NVIDIA H100 80GB HBM3, 81559 MiB, driver 580.95.05, CUDA 13.0"),
        (8, [H100] * 8, "12.8", False, "fail", "serves CUDA 12.8, torch is for 13.0"),
        (1, [], "", False, "fail", "1 device files, but nvidia-smi lists no GPU"),
        (2, [H100, H100.replace(" 4,", " 40000,")], "13.0", False, "warn", "others use the memory of 1"),
        (2, [H100, H100.replace(" 4,", " 40000,")], "13.0", True, "ok", "2 x NVIDIA H100"),
        (1, ["NVIDIA GB10, [N/A], [N/A], 580.95"], "13.0", False, "ok", "1 x NVIDIA GB10"),
    ],
)
def test_gpus_are_judged_by_their_driver_and_by_who_uses_them(
    num_gpus: int, lines: list[str], driver: str, is_live: bool, verdict: str, found: str
) -> None:
    result = judge_gpus(num_gpus, lines, cuda="13.0", driver=driver, is_live=is_live)
    assert result.verdict == verdict
    assert found in result.found
    assert bool(result.fix) == (verdict in ("warn", "fail"))


def test_a_machine_without_nvidias_driver_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine, "_DEVICES", tmp_path)
    machine.count_gpus.cache_clear()
    assert check_gpus(cuda="", is_live=False).verdict == "skipped"
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    machine.count_gpus.cache_clear()
    assert check_gpus(cuda="", is_live=False).found == "2 device files, but nvidia-smi lists no GPU"
    machine.count_gpus.cache_clear()


def test_the_driver_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n[ $1 = --version ] && echo 'CUDA Version  : 12.8' || echo '{H100}'\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    machine.count_gpus.cache_clear()
    assert "serves CUDA 12.8, torch is for 13.0" in check_gpus(cuda="13.0", is_live=False).found
    machine.count_gpus.cache_clear()


def test_one_core_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, verdict in (({0}, "warn"), ({0, 1}, "ok")):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: cores)
        assert check_hardware().verdict == verdict
