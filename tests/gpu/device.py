"""Device and sizes of these tests; SLIPSTREAM_GPU_TESTS=cpu tries all but the device, at small sizes."""

import os

import pytest
import torch

from slipstream.launch.generator_pool import DEVICES_VARIABLE, visible_gpus

DEVICE = torch.device(os.environ.get("SLIPSTREAM_GPU_TESTS", "cuda:0"))
IS_SMALL = DEVICE.type == "cpu"
IS_HERE = IS_SMALL or torch.cuda.is_available()
ON_GPU = f"needs an NVIDIA GPU that torch {torch.__version__} can use, and a process of its own: `make gpu-check`"


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
