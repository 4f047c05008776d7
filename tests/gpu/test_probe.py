"""The probe of `slipstream diagnose` on a GPU: libraries load, GPUs compute, NCCL sums."""

from slipstream.launch.diagnose.probe import run_probe
from tests.gpu.device import IS_SMALL


def test_every_part_of_the_probe_passes() -> None:
    found = {each.name: each for each in run_probe(timeout_s=200)}
    assert {name: each for name, each in found.items() if each.verdict == "fail"} == {}
    assert IS_SMALL or found["GPU arithmetic"].verdict == found["NCCL"].verdict == "ok"
