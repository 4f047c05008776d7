"""GPUs of these tests: the first is the learner's, the others belong to generators."""

import pytest

from slipstream.launch.generator_pool import DEVICES_VARIABLE, visible_gpus
from tests.gpu.device import IS_SMALL


def take_gpus(*sizes: int) -> list[dict[str, str]]:
    """The variables of a process for each number of GPUs, beside the learner's. Skips the test without enough."""
    if IS_SMALL:
        return [{} for _ in sizes]
    gpus = visible_gpus()
    if len(gpus) < (needed := 1 + sum(sizes)):
        pytest.skip(f"needs {needed} GPUs, got {len(gpus)}")
    free = iter(gpus[1:])
    return [{DEVICES_VARIABLE: ",".join(next(free) for _ in range(size))} for size in sizes]


def num_generators() -> int:
    """Number of generators that can have their own GPU, at most two."""
    return 2 if IS_SMALL else min(2, len(visible_gpus()) - 1)
