"""Marks and environment of the tests on a GPU."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from slipstream.learner.engines.deepspeed_engine import deepspeed_environment
from tests.gpu.device import DEVICE, IS_HERE, IS_SMALL, ON_GPU


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder, and skip it without a GPU."""
    here = Path(__file__).parent
    # DeepSpeed has one accelerator for each process, and other tests take the CPU.
    is_alone = all(item.path.is_relative_to(here) for item in items)
    lacking = "" if find_spec("vllm") else "needs vLLM"
    if not IS_SMALL and torch.cuda.device_count() < 2:
        lacking = "needs two GPUs"
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.gpu)
            if not (IS_HERE and is_alone):
                item.add_marker(pytest.mark.skip(reason=ON_GPU))
            if lacking and item.path.is_relative_to(here / "several"):
                item.add_marker(pytest.mark.skip(reason=lacking))


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    # Before DeepSpeed is imported, by the first engine.
    for name, value in deepspeed_environment(DEVICE).items():
        monkeypatch.setenv(name, value)
