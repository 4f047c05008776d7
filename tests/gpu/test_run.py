"""A whole run with the learner and a transformers engine on one device."""

from pathlib import Path

from tests import runs
from tests.gpu.device import DEVICE, IS_SMALL


def test_a_run_trains_with_verified_weights(tmp_path: Path) -> None:
    folder = runs.make_task(tmp_path, warm=False)
    steps = 3 if IS_SMALL else 12
    # Both roles have the same GPU.
    device = ("generators/engine=hf", f"learner.device={DEVICE.type}", "weights.backend=gloo")
    own = ("name=run", f"learner.max_steps={steps}", "evaluation.stop=null", "evaluation.num_final_prompts=16")
    output = runs.train(folder, "experiment=digits_cpu", *runs.RANDOM, *runs.FEW, *device, *own)
    rows = [row for row in runs.metrics(folder, "run") if "learner/grad_norm" in row]
    assert len(rows) == steps, output
    # Every version was compared: the learner's log-probabilities are those that were sampled with.
    assert runs.summary(folder, "run")["logprob_diff_max"] < 0.05
