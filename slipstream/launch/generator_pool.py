"""GeneratorPool: a launcher's generator processes; placement: GPUs of each role."""

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from itertools import takewhile
from typing import NamedTuple

from slipstream.cluster.role_process import RoleDiedError, RoleProcess
from slipstream.configs.base import ConfigError, require
from slipstream.configs.engines import ScriptedEngineConfig, VllmEngineConfig
from slipstream.configs.run import RunConfig

DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
_MAX_PER_CORE = 4
"""Generators per core: a guard against typos, not a recommendation."""
_LEAVE_TIMEOUT_S = 30.0
"""Time for a generator to return its leases before it is killed."""


def visible_gpus(variables: Mapping[str, str] = os.environ, *, torch_version: str | None = None) -> list[str]:
    """GPUs available to this process, by number or UUID; none for a CPU build of torch. Does not load torch."""
    if "cpu" in (metadata.version("torch") if torch_version is None else torch_version):
        return []
    if DEVICES_VARIABLE not in variables:
        return [str(number) for number in range(len(ask_gpus("index")))]
    names = (name.strip() for name in variables[DEVICES_VARIABLE].split(","))
    # CUDA ignores everything after the first negative number.
    return list(takewhile(lambda name: name and not name.startswith("-"), names))


def gpu_gib(name: str) -> float:
    """Memory of a GPU, GiB. Raises ConfigError."""
    try:
        return min(float(size) for size in ask_gpus("memory.total", "-i", name)) / 1024
    except ValueError as error:
        must = f"nvidia-smi must report the memory of GPU {name}, which all roles share"
        raise ConfigError(f"{must}, but does not: set generators.engine.kv_cache_gib.") from error


def ask_gpus(field: str, *options: str) -> list[str]:
    """Query nvidia-smi: one line per GPU, none without a driver."""
    return run_smi(f"--query-gpu={field}", "--format=csv,noheader,nounits", *options).splitlines()


def run_smi(*options: str) -> str:
    """Output of nvidia-smi; empty if it fails."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, timeout=20, check=True).stdout
    return ""


def place(run: RunConfig, *, gpus: Sequence[str]) -> dict[str, list[str]]:
    """Role -> GPUs, first the learner's; all roles share a single one. Raises ConfigError for too few.

    With learner.device=cpu only vLLM gets GPUs.
    """
    if not gpus:
        return {}
    engine, on_cpu = run.generators.engine, run.learner.device == "cpu"
    num_ranks = 0 if on_cpu else run.learner.num_ranks
    per_engine = 0 if on_cpu or isinstance(engine, ScriptedEngineConfig) else 1
    per_engine = engine.num_workers if isinstance(engine, VllmEngineConfig) else per_engine
    must, why = f"be <= the GPUs here ({len(gpus)})", "each of these processes needs its own GPU"
    require(num_ranks <= len(gpus), "learner.num_ranks", must, got=num_ranks, why=why)
    workers = "generators.engine.tensor_parallel_size x pipeline_parallel_size"
    require(per_engine <= len(gpus), workers, must, got=per_engine, why=why)
    names = [f"generator-{number}" for number in range(run.generators.count)]
    num_gpus = {"learner": num_ranks} | dict.fromkeys(names, per_engine)
    if len(gpus) == 1:
        return {name: list(gpus[:count]) for name, count in num_gpus.items()}
    needed, sizes = sum(num_gpus.values()), "learner.num_ranks + generators.count x workers of an engine"
    why = "reduce them, or start generators on other machines by hand"
    require(needed <= len(gpus), sizes, must, got=needed, why=why)
    free = iter(gpus)
    return {name: [next(free) for _ in range(count)] for name, count in num_gpus.items()}


def check_placement(run: RunConfig) -> None:
    """Raise ConfigError if this machine lacks GPUs for the roles."""
    gpus = visible_gpus()
    must = "have an NVIDIA GPU that this process may use and a CUDA build of torch"
    why = "use learner.device=auto, or look at CUDA_VISIBLE_DEVICES and `nvidia-smi -L`"
    require(bool(gpus) or run.learner.device != "cuda", "learner.device=cuda", must, got="none", why=why)
    is_fit, why = run.weights.backend != "nccl" or len(gpus) >= 2, "use weights.backend=auto"
    must = "have a GPU for the learner and others for the generators"
    require(is_fit, "weights.backend=nccl", must, got=f"{len(gpus)} here", why=why)
    place(run, gpus=gpus)


def check_target(run: RunConfig, target: int, *, num_cores: int) -> None:
    """Raise ConfigError for an implausible number of generators."""
    scale = run.generators.autoscale
    limit = max(run.generators.count, scale.max if scale else 0, _MAX_PER_CORE * num_cores)
    must = f"be <= {limit} on this machine of {num_cores} cores"
    why = "lower it, start some on other machines by hand, or start the run with that generators.count"
    require(target <= limit, "generators", must, got=target, why=why)


class Event(NamedTuple):
    """An event of a role: Event("generator-1", "generator-1 left")."""

    role: str
    message: str


class GeneratorPool:
    """Keeps `target` generators running.

    Life: set_target -> (poll | set_target)* -> the launcher stops `roles`.
    """

    def __init__(self, make: Callable[[str], RoleProcess], *, has_others: Callable[[], bool] = lambda: False) -> None:
        """`make(name)` builds a process. `has_others`: whether other generators run outside this pool."""
        self._make = make
        self._has_others = has_others
        self._active: dict[str, RoleProcess] = {}
        self._leaving: dict[str, tuple[RoleProcess, float]] = {}
        self.target = 0

    @property
    def active_names(self) -> set[str]:
        return set(self._active)

    @property
    def names(self) -> set[str]:
        return {*self._active, *self._leaving}

    @property
    def roles(self) -> list[RoleProcess]:
        return [*self._active.values(), *(role for role, _ in self._leaving.values())]

    def set_target(self, target: int) -> list[Event]:
        """Ask surplus generators to leave, highest numbers first, and start missing ones."""
        self.target = target
        surplus = sorted(self._active, key=lambda name: int(name.rpartition("-")[2]))[target:]
        for name in surplus:
            role = self._active.pop(name)
            role.terminate()
            self._leaving[name] = (role, time.monotonic() + _LEAVE_TIMEOUT_S)
        leaving = [Event(name, f"{name} is asked to leave: the target is {target}") for name in surplus]
        return leaving + self._start_missing()

    def poll(self) -> list[Event]:
        """Restart, reap, and start processes. Raises RoleDiedError if the last generator cannot run."""
        events = [event for name in list(self._active) for event in self._poll_active(name)]
        for name, (role, ends_at) in list(self._leaving.items()):
            if (is_late := role.is_running) and time.monotonic() < ends_at:
                continue
            role.stop(ends_at=0.0)
            del self._leaving[name]
            fate = f"was killed: it did not leave within {_LEAVE_TIMEOUT_S:g} s" if is_late else "left"
            events.append(Event(name, f"{name} {fate}"))
        return events + self._start_missing()

    def _poll_active(self, name: str) -> list[Event]:
        role = self._active[name]
        if role.has_finished:
            # The user drained it.
            self._remove(name)
            return [Event(name, f"{name} left; the target is {self.target} now")]
        try:
            return [Event(name, message) for message in role.poll()]
        except RoleDiedError as death:
            if len(self._active) == 1 and not self._has_others():
                raise
            self._remove(name)
            reason = str(death).splitlines()[0]
            return [Event(name, f"{name} is abandoned, the target is {self.target} now: {reason}")]

    def _remove(self, name: str) -> None:
        self._active.pop(name).stop(ends_at=0.0)
        self.target -= 1

    def _start_missing(self) -> list[Event]:
        # A leaving generator keeps its name, because it still holds the GPUs of that name.
        names = [f"generator-{number}" for number in range(self.target)]
        free = [name for name in names if name not in self.names]
        started = free[: max(0, self.target - len(self._active))]
        for name in started:
            self._active[name] = self._make(name)
            self._active[name].start()
        return [Event(name, f"{name} started ({self._active[name].place})") for name in started]
