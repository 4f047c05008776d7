"""Compiled layers: equal weights, few graphs for any microbatches, and rejected settings."""

from pathlib import Path

import pytest
import torch

from slipstream.configs.base import ConfigError
from slipstream.configs.data import ModelConfig
from slipstream.configs.learner import DeepSpeedEngineConfig, OptimizerConfig, TorchEngineConfig
from slipstream.configs.load import load
from slipstream.learner.errors import ModelError
from slipstream.learner.training import attention as compiled
from slipstream.learner.training.attention import PACKED
from slipstream.learner.training.model import LONG
from tests.families import make_family
from tests.unit.learner.builders import make_groups, make_model, make_run, make_trainer, weights, zero

SMOOTH = OptimizerConfig(learning_rate=0.1, epsilon=1.0)
RECOMPUTED = DeepSpeedEngineConfig(gradient_checkpointing=True)


def train(folder: Path, engine, *, is_compiled: bool, max_length: int = LONG):
    learner = {"engine": engine, "compile": is_compiled, "optimizer": SMOOTH, "tokens_per_microbatch": LONG}
    model = ModelConfig(path=str(make_model(folder)), max_length=max_length)
    trainer = make_trainer(make_run(model.path, model=model, learner=learner))
    before = weights(trainer)
    for i in range(3):
        # Microbatches have different shapes in each step.
        trainer.step(make_groups(num_groups=2 + i, seed=i), learner_version=0, step=i + 1)
    return trainer, before, weights(trainer)


def largest(one, other) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def assert_trains_alike(folder: Path, engine, **settings) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    _, before, plain = train(folder, engine, is_compiled=False, **settings)
    assert not torch._dynamo.utils.counters["stats"]
    trainer, _, found = train(folder, engine, is_compiled=True, **settings)
    is_packed = trainer.engine.model.backbone.config._attn_implementation == PACKED
    assert is_packed == ("max_length" not in settings)
    assert found.keys() == plain.keys()
    assert largest(plain, found) < 1e-4 * largest(before, plain)
    # With and without gradients, before and after attention, which is not compiled.
    assert 0 < torch._dynamo.utils.counters["stats"]["unique_graphs"] <= (4 if is_packed else 2)


@pytest.mark.slow
def test_three_steps_of_compiled_layers_give_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    # Traced as for any backend, and computed by the same kernels.
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    assert_trains_alike(tmp_path, RECOMPUTED)


@pytest.mark.long
@pytest.mark.parametrize("engine", [TorchEngineConfig(), zero(0), zero(2), RECOMPUTED])
@pytest.mark.parametrize("settings", [{}, {"max_length": 64}])
def test_generated_kernels_give_the_same_weights(tmp_path: Path, engine, settings) -> None:
    assert_trains_alike(tmp_path, engine, **settings)


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        (["learner/engine=deepspeed_zero3"], "learner.engine.zero_stage=3"),
        (["learner.num_ranks=2", "learner.sequence_parallel=2"], "learner.sequence_parallel > 1"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(overrides: list[str], setting: str) -> None:
    with pytest.raises(ConfigError, match=f"learner.compile must be false with {setting}, got True"):
        load(["learner.compile=true", *overrides])


def test_a_model_that_cannot_be_compiled_is_refused_by_name(tmp_path: Path) -> None:
    path = str(make_family(tmp_path, "mixtral"))
    run = make_run(path, learner={"compile": True})
    with pytest.raises(
        ModelError, match=r"learner.compile must be false for Mixtral.* \(model.path\), got true: it is a"
    ):
        make_trainer(run)
    with pytest.raises(ModelError, match="it is not made of known layers"):
        compiled.compile_layers(torch.nn.Linear(1, 1), has_routers=False)
