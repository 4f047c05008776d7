"""Checks of this machine: processor, memory, disks, limits of processes, GPUs. Loads without torch."""

import os
import platform
import re
import resource
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import psutil

from slipstream.configs.run import RunConfig
from slipstream.diagnose.checks import Finding, Verdict
from slipstream.launch.generator_pool import ask_gpus
from slipstream.runtime.disk import describe_disk, nearest_folder
from slipstream.runtime.model_files import fingerprint
from slipstream.runtime.process import GROUPS, OWN_GROUPS, group_limits, read_text

_CPU_INFO, _DEVICES = Path("/proc/cpuinfo"), Path("/dev")
_MIN_MEMORY = 2 * 2**30
_MIN_DISK, _LITTLE_DISK = 256 * 2**20, 2**30
_BYTES_OF_A_PARAMETER = 16
"""In a checkpoint: weights, their float32 copies and both moments."""
_MIN_PROCESSES = 512
"""Processes and threads of a small run, most of them of torch and vLLM."""
_SMI_TIMEOUT_S = 20.0
_PLAN = "`slipstream plan` tells what each process takes"


# --- processor and memory --------------------------------------------------------------------------------------------
def check_hardware() -> Finding:
    """Describe the machine; a run of several processes on one core is possible, but slow."""
    model = re.search(r"^model name\s*:\s*(.*)$", read_text(_CPU_INFO), re.MULTILINE)
    cores, total = len(os.sched_getaffinity(0)), psutil.virtual_memory().total
    name = model[1] if model else platform.processor()
    found = f"{name}, {cores} of {os.cpu_count()} cores, {total / 2**30:.1f} GiB"
    if cores > 1:
        return Finding("hardware", "ok", found)
    return Finding("hardware", "warn", found, fix="give it more cores: learner and generators share this one")


def check_memory(*, root: Path = GROUPS, own: Path = OWN_GROUPS) -> Finding:
    """Compare free memory, and what is left of a container's limit, with what a small run takes."""
    machine, limits = psutil.virtual_memory(), group_limits("memory", root=root, own=own)
    free = min([machine.available, *(each.left for each in limits)])
    total = min([machine.total, *(each.limit for each in limits)])
    found = f"{free / 2**30:.1f} GiB free of {total / 2**30:.1f} GiB"
    found += ", the limit of its container" if total < machine.total else ""
    texts = [read_text(each.folder / "memory.events") for each in limits[:1]]
    killed = sum(int(number) for text in texts for number in re.findall(r"^oom_kill (\d+)$", text, re.MULTILINE))
    if killed:
        fix = f"raise the container's limit, or lower what the run takes: {_PLAN}"
        return Finding("memory", "warn", f"{found}; {killed} of its processes were killed for it", fix=fix)
    if free < _MIN_MEMORY:
        return Finding("memory", "warn", found, fix=f"end other processes, or use a machine with more: {_PLAN}")
    return Finding("memory", "ok", found)


def check_processes(*, root: Path = GROUPS, own: Path = OWN_GROUPS) -> Finding:
    """Look at how many processes and threads this user, and what is left of them to its container, may start."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = [each.left for each in group_limits("pids", root=root, own=own)]
    # Root's are not limited by the first.
    limits += [soft] if soft != resource.RLIM_INFINITY and os.getuid() else []
    if not limits or min(limits) >= _MIN_PROCESSES:
        return Finding("processes", "ok", f"{min(limits):,} may be started" if limits else "unlimited")
    fix = "ulimit -u 65536, docker run --pids-limit=-1, or TasksMax of its service"
    return Finding("processes", "warn", f"only {max(0, min(limits)):,} may be started", fix=fix)


# --- disks -----------------------------------------------------------------------------------------------------------
def check_disk(name: str, path: Path, *, run: RunConfig | None = None, is_over: bool = False) -> Finding:
    """Measure the disk of a folder, which may not exist yet, and whether it can be written to; also for the checkpoints
    of a run, unless that is over."""
    folder = nearest_folder(path)
    stats = os.statvfs(folder)
    free, found = stats.f_bavail * stats.f_frsize, describe_disk(path)
    model = fingerprint(run.model.path) if run else None
    checkpoint = _BYTES_OF_A_PARAMETER * ((model and model.num_parameters) or 0)
    # The newest is written before the oldest is deleted.
    needed = _LITTLE_DISK + (checkpoint * (run.learner.checkpoint.keep + 1) if run and not is_over else 0)
    if not os.access(folder, os.W_OK):
        verdict: Verdict = "warn" if is_over else "fail"
        return Finding(name, verdict, f"{folder} cannot be written to", fix="make it yours, or name another folder")
    if free < _MIN_DISK or (stats.f_files and not stats.f_favail):
        return Finding(name, "fail", f"no room or no inode is left on {found}", fix="delete files, or use another disk")
    if free < needed:
        fix = "make room, or lower learner.checkpoint.keep"
        return Finding(name, "warn", f"{found}; the run may need {needed / 2**30:.0f} GiB", fix=fix)
    return Finding(name, "ok", found)


# --- GPUs ------------------------------------------------------------------------------------------------------------
@cache
def count_gpus() -> int:
    """Count the GPUs of this machine: those that NVIDIA's driver lists, else those that have a device file."""
    return len(ask_gpus("index")) or len([each for each in _DEVICES.glob("nvidia*") if each.name[6:].isdecimal()])


def _driver_cuda() -> str:
    """Return the newest CUDA version that the driver serves; empty if it does not tell."""
    try:
        command = ["nvidia-smi", "--version"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"^CUDA Version\s*:\s*([\d.]+)", done.stdout, re.MULTILINE)
    return found[1] if found else ""


def check_gpus(*, cuda: str, is_live: bool) -> Finding:
    """Ask the driver, and compare its CUDA version with torch's `cuda`; `is_live`: this run uses the GPUs already."""
    lines = ask_gpus("name,memory.total,memory.used,driver_version")
    return judge_gpus(count_gpus(), lines, cuda=cuda, driver=_driver_cuda() if lines else "", is_live=is_live)


def judge_gpus(num_gpus: int, lines: Sequence[str], *, cuda: str, driver: str, is_live: bool) -> Finding:
    """Judge what the driver tells of each GPU: name, memory, memory in use (MiB), version of the driver."""
    if not num_gpus:
        return Finding("GPUs", "skipped", "no NVIDIA GPU here")
    if not lines:
        fix = "look at `nvidia-smi`: after an update of the driver, restart the machine or its container"
        return Finding("GPUs", "fail", f"{num_gpus} device files, but nvidia-smi lists no GPU", fix=fix)
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    found = f"{len(rows)} x {rows[0][0]}, {rows[0][1]} MiB, driver {rows[0][3]}"
    if cuda and driver and int(driver.split(".")[0]) < int(cuda.split(".")[0]):
        fix = f"update the driver to one for CUDA {cuda.split('.')[0]}, or install a torch for CUDA {driver}"
        return Finding("GPUs", "fail", f"{found} serves CUDA {driver}, torch is for {cuda}", fix=fix)
    taken = [str(at) for at, (_, size, used, *_) in enumerate(rows) if _is_taken(size, used)]
    if taken and not is_live:
        fix = "end the processes that `nvidia-smi` lists, or choose others with CUDA_VISIBLE_DEVICES"
        return Finding("GPUs", "warn", f"{found}; others use the memory of {', '.join(taken)}", fix=fix)
    return Finding("GPUs", "ok", f"{found}, CUDA {driver or 'unknown'}")


def _is_taken(size: str, used: str) -> bool:
    # A GPU that shares the machine's memory tells neither.
    return size.isdecimal() and used.isdecimal() and int(used) > 0.1 * int(size)
