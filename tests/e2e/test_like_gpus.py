"""Setups of GPUs on a CPU: engines with two workers, sharded ranks that publish, bfloat16 throughout."""

from pathlib import Path

import pytest

from tests import runs
from tests.e2e.broadcast_updates import Case, check_updates
from tests.runs import FEW, RANDOM

pytestmark = [pytest.mark.timeout(280), pytest.mark.long]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_workers_of_an_engine_load_what_is_broadcast(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_updates(Case("qwen2", workers=2, dtype=dtype), tmp_path, monkeypatch)


def test_two_sharded_ranks_publish_bfloat16_weights_to_an_engine_of_two_workers(tmp_path: Path) -> None:
    runs.make_task(tmp_path, warm=False)
    # The second worker holds only padding of the small vocabulary.
    sharded = ("learner/engine=deepspeed_zero3", "learner.num_ranks=2", "generators.engine.tensor_parallel_size=2")
    own = ("name=run", "model.dtype=bfloat16", "learner.max_steps=3", "evaluation.stop=null", "evaluation.goals=[]")
    output = runs.train(tmp_path, "experiment=digits_rotary_cpu", *RANDOM, *FEW, *sharded, *own, timeout_s=260)
    rows = [row for row in runs.metrics(tmp_path, "run") if "learner/grad_norm" in row]
    assert len(rows) == 3, output
    # Each version was compared before its use.
    assert runs.summary(tmp_path, "run")["logprob_diff_max"] < 0.05
    log = (tmp_path / "runs/run/logs/learner.log").read_text()
    assert "version=2" in log, log[-2000:]
    assert "evicted" not in log
