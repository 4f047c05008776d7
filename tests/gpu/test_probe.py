"""The probe of `slipstream diagnose` on GPUs: libraries load, GPUs compute, NCCL sums over all of them."""

import pytest

from slipstream.launch.diagnose.all_reduce import check_all_reduce
from slipstream.launch.diagnose.probe import run_probe
from slipstream.launch.generator_pool import visible_gpus
from tests.gpu.device import IS_SMALL


def test_every_part_of_the_probe_passes() -> None:
    found = {each.name: each for each in run_probe(timeout_s=180)}
    assert {name: each for name, each in found.items() if each.verdict == "fail"} == {}
    assert IS_SMALL or found["GPU arithmetic"].verdict in ("ok", "warn")


@pytest.mark.timeout(120)
def test_all_gpus_sum() -> None:
    found = check_all_reduce(0 if IS_SMALL else len(visible_gpus()), timeout_s=100)
    print(found.found)
    assert found.verdict == "ok", found
