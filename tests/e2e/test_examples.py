"""The examples, in a short form: every command of theirs, with fewer steps."""

from pathlib import Path

import pytest

from tests import runs

pytestmark = pytest.mark.slow

SERIAL = (
    "mode=serial",
    "weights.transport=memory",
    "buffer/store=memory",
    "generators/engine=hf",
    "learner/engine=torch",
    "learner.stop=null",
    "buffer.staleness.max_lag=0",
    "learner.groups_per_step=4",
    "evaluation.monitor_prompts=4",
    "evaluation.final_prompts=8",
    "evaluation.every_steps=0",
)
"""All roles in one process, and small steps."""
PRODUCTS = "learner/by_source/multiplication/"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    # The modules and settings of the examples are found from the checkout's root.
    (tmp_path / "examples").symlink_to(runs.ROOT / "examples")
    return tmp_path


def test_calculator(folder: Path):
    steps = ("sft.epochs=null", "learner.max_steps=60", "learner/engine=torch")
    runs.run_script(folder, "slipstream", "sft", "experiment=examples/calculator/sft.yaml", *steps)
    runs.train(folder, "experiment=examples/calculator/run.yaml", *SERIAL, "learner.max_steps=2")
    for row in runs.metrics(folder, "calculator"):
        # A quarter of the demonstrations call it.
        assert 0.05 < row[PRODUCTS + "agent_tool_calls"] < 0.6
        assert row[PRODUCTS + "turns_mean"] > 1
        assert row["learner/mismatch_max"] < 1e-4
