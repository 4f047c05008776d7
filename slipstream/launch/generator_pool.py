"""GeneratorPool: the generators that a launcher keeps: as many as wanted, restarted when they die, drained when too many."""

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile

from slipstream.configs.base import ConfigError
from slipstream.configs.generators import VllmEngineConfig
from slipstream.configs.run import RunConfig
from slipstream.runtime.process import RoleDiedError, RoleProcess

# @@ Placement: which GPUs of this machine each role sees.
DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
_MOST_PER_CORE = 4
"""Generators; a bound for typing errors, not a good number."""


def visible_gpus(variables: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them: by number or UUID.

    Where it is not set: all NVIDIA GPUs of this machine, none without a driver. Does not load torch.
    """
    if DEVICES_VARIABLE not in variables:
        return [str(number) for number in range(_count_gpus())]
    names = (name.strip() for name in variables[DEVICES_VARIABLE].split(","))
    # As CUDA reads it: what follows a number below zero is hidden.
    return list(takewhile(lambda name: name and not name.startswith("-"), names))


def _count_gpus() -> int:
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines()) if done.returncode == 0 else 0


def place(run: RunConfig, *, gpus: Sequence[str]) -> dict[str, list[str]]:
    """Role -> GPUs: the learner's ranks first, then each generator's. On one GPU all share it; without any, nothing.

    Raises ConfigError when there are several GPUs, but too few.
    """
    if not gpus or run.learner.device == "cpu":
        return {}
    names = [f"generator-{number}" for number in range(run.generators.count)]
    if len(gpus) == 1:
        return {name: list(gpus) for name in ("learner", *names)}
    wanted = {"learner": run.learner.num_ranks} | dict.fromkeys(names, _gpus_of_a_generator(run))
    if sum(wanted.values()) > len(gpus):
        raise ConfigError(
            f"learner.num_ranks + generators.count x tensor_parallel_size must be <= the GPUs here ({len(gpus)}), got "
            f"{sum(wanted.values())}: ask for less, or start generators on other machines by hand."
        )
    free = iter(gpus)
    return {name: [next(free) for _ in range(count)] for name, count in wanted.items()}


def check_number(run: RunConfig, *, wanted: int, num_cores: int) -> None:
    """More generators than settings and cores make likely are a typing error. Raises ConfigError."""
    scale = run.generators.autoscale
    most = max(run.generators.count, scale.max if scale else 0, _MOST_PER_CORE * num_cores)
    if wanted > most:
        raise ConfigError(
            f"generators must be <= {most} on this machine of {num_cores} cores, got {wanted}: ask for less, start "
            "some on other machines by hand, or begin the run with that generators.count."
        )


def _gpus_of_a_generator(run: RunConfig) -> int:
    engine = run.generators.engine
    return engine.tensor_parallel_size if isinstance(engine, VllmEngineConfig) else 1


_LEAVE_TIMEOUT_S = 30.0
"""For a generator that was told to go: it hands back what it holds, and says goodbye."""

Happening = tuple[str, str]
"""A role's name, and a sentence about it."""


class GeneratorPool:
    """Life: set_wanted -> (attend | set_wanted)* -> the launcher stops `roles`."""

    def __init__(
        self, make: Callable[[str], RoleProcess], *, lives_another: Callable[[], bool] = lambda: False
    ) -> None:
        """`make` builds the process of a name, not started; `lives_another` tells whether the run has a generator that
        is not kept here."""
        self._make = make
        self._lives_another = lives_another
        self._kept: dict[str, RoleProcess] = {}
        self._leaving: dict[str, tuple[RoleProcess, float]] = {}
        self.wanted = 0
        """How many are kept."""

    @property
    def kept(self) -> set[str]:
        """Names of those that are not leaving."""
        return set(self._kept)

    @property
    def names(self) -> set[str]:
        """Names of all that may be running."""
        return {*self._kept, *self._leaving}

    @property
    def roles(self) -> list[RoleProcess]:
        """All that may be running."""
        return [*self._kept.values(), *(role for role, _ in self._leaving.values())]

    def set_wanted(self, wanted: int) -> list[Happening]:
        """From now on keep that many; surplus ones, of the highest numbers, are told to go."""
        self.wanted = wanted
        surplus = sorted(self._kept, key=_number)[wanted:]
        for name in surplus:
            role = self._kept.pop(name)
            role.terminate()
            self._leaving[name] = (role, time.monotonic() + _LEAVE_TIMEOUT_S)
        return [*((name, f"{name} is told to leave: {wanted} are wanted") for name in surplus), *self._fill_up()]

    def poll(self) -> list[Happening]:
        """Look after all of them. Raises RoleDiedError when the last one of the run cannot go on."""
        happened = [happening for name in list(self._kept) for happening in self._attend(name)]
        happened += [happening for name in list(self._leaving) for happening in self._see_off(name)]
        return happened + self._fill_up()

    def _attend(self, name: str) -> list[Happening]:
        role = self._kept[name]
        if role.has_finished:
            self._let_go(name)
            return [(name, f"{name} has left; {self.wanted} are kept now")]
        try:
            return [(name, sentence) for sentence in role.poll()]
        except RoleDiedError as death:
            if len(self._kept) == 1 and not self._lives_another():
                raise
            self._let_go(name)
            return [(name, f"{name} is given up, {self.wanted} are kept now: {str(death).splitlines()[0]}")]

    def _let_go(self, name: str) -> None:
        del self._kept[name]
        self.wanted -= 1

    def _see_off(self, name: str) -> list[Happening]:
        role, ends_at = self._leaving[name]
        if role.is_running and time.monotonic() < ends_at:
            return []
        sentence = f"{name} was killed: it did not leave within {_LEAVE_TIMEOUT_S:g} s"
        if not role.is_running:
            sentence = f"{name} has left"
        role.stop(ends_at=0.0)
        del self._leaving[name]
        return [(name, sentence)]

    def _fill_up(self) -> list[Happening]:
        """A name is free when the process that had it is gone, and so its GPUs are."""
        names = [f"generator-{number}" for number in range(self.wanted)]
        free = [name for name in names if name not in self._kept and name not in self._leaving]
        started = free[: max(0, self.wanted - len(self._kept))]
        for name in started:
            self._kept[name] = self._make(name)
            self._kept[name].start()
        return [(name, f"{name} started (pid {self._kept[name].pid})") for name in started]


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
