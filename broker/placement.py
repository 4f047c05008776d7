"""Placement: which GPUs of this machine each role sees."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from itertools import takewhile

from configs.base import ConfigError
from configs.generators import VllmEngineConfig
from configs.run import RunConfig

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
