"""Three versions, each broadcast to real vLLM with CUDA graphs: one worker, two, FP8, a mixture of experts."""

from pathlib import Path

import pytest

from tests.e2e.broadcast_updates import Case, check_updates
from tests.gpu.device import DEVICE, IS_SMALL, take_gpus

pytestmark = [pytest.mark.own_process, pytest.mark.timeout(280)]

CASES = {
    "one worker": Case("qwen2"),
    "two workers": Case("qwen2", workers=2),
    "fp8": Case("qwen2", quantization="fp8"),
    "experts": Case("qwen3_moe"),
    "experts on two workers": Case("qwen3_moe", workers=2, expert_parallel=True),
}


@pytest.mark.parametrize("name", CASES)
def test_an_engine_generates_with_each_of_three_broadcast_versions(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    if IS_SMALL and (case.quantization or case.expert_parallel):
        pytest.skip("vLLM's CPU build quantizes no updates, and its kernel crashes on a part of the experts")
    (place,) = take_gpus(case.workers)
    case = case._replace(device=DEVICE.type, dtype="float32" if IS_SMALL else "bfloat16")
    check_updates(case, tmp_path, monkeypatch, variables=place)
