"""Whole runs with the learner on one GPU and vLLM on others."""

from pathlib import Path

import pytest

from tests import runs
from tests.e2e.test_engine_dies import check_replacement
from tests.gpu.device import IS_SMALL, take_gpus
from tests.runs import FEW, RANDOM

pytestmark = pytest.mark.own_process

ENGINE = () if IS_SMALL else ("generators/engine=vllm_gpu",)


@pytest.mark.timeout(400)
def test_digits_rotary_is_learned(tmp_path: Path) -> None:
    take_gpus(1)
    few = (*RANDOM, *FEW, "learner.max_steps=3", "evaluation.stop=null", "evaluation.goals=[]") if IS_SMALL else ()
    runs.make_task(tmp_path, warm=False)
    output = runs.train(tmp_path, "experiment=digits_rotary_cpu", "name=rotary", *ENGINE, *few, timeout_s=380)
    print(output)
    summary = runs.summary(tmp_path, "rotary")
    assert summary["logprob_diff_max"] < 0.05
    assert IS_SMALL or summary["accuracy_sampled"] >= 0.9


@pytest.mark.timeout(240)
def test_an_engine_that_is_killed_or_stopped_is_replaced_on_its_gpu(tmp_path: Path) -> None:
    take_gpus(1)
    check_replacement(tmp_path, *ENGINE)
