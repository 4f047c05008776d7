"""Placement: which GPUs of this machine each role sees."""

import subprocess

from configs.base import ConfigError
from configs.generators import VllmEngineConfig
from configs.run import RunConfig

DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"


def count_gpus() -> int:
    """NVIDIA GPUs of this machine; 0 without a driver. Does not load torch."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return done.stdout.count("GPU ") if done.returncode == 0 else 0


def place(run: RunConfig, *, num_gpus: int) -> dict[str, list[int]]:
    """Role -> GPUs: the learner's ranks first, then each generator's. On one GPU all share it; without any, nothing.

    Raises ConfigError when there are several GPUs, but too few.
    """
    if num_gpus == 0 or run.learner.device == "cpu":
        return {}
    names = [f"generator-{number}" for number in range(run.generators.count)]
    if num_gpus == 1:
        return {name: [0] for name in ("learner", *names)}
    wanted = {"learner": run.learner.num_ranks} | dict.fromkeys(names, _gpus_of_a_generator(run))
    if sum(wanted.values()) > num_gpus:
        raise ConfigError(
            f"learner.num_ranks + generators.count x tensor_parallel_size must be <= the GPUs here ({num_gpus}), got "
            f"{sum(wanted.values())}: ask for less, or start generators on other machines by hand."
        )
    devices = iter(range(num_gpus))
    return {name: [next(devices) for _ in range(count)] for name, count in wanted.items()}


def _gpus_of_a_generator(run: RunConfig) -> int:
    engine = run.generators.engine
    return engine.tensor_parallel_size if isinstance(engine, VllmEngineConfig) else 1
