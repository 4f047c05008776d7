"""The learner on a GPU: steps as on the CPU, checkpoints, bfloat16 beside an engine's."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from slipstream.configs.data import ModelConfig
from slipstream.configs.engines import HfEngineConfig
from slipstream.configs.learner import OptimizerConfig, TorchEngineConfig
from slipstream.generators.engines.hf_engine import HfEngine
from slipstream.learner.batching.collate import Layout
from slipstream.learner.build import build_trainer
from slipstream.learner.engines.optimizer import STATE_FILE
from slipstream.learner.publishing.staging import canary_logprobs
from slipstream.learner.ranks import Ranks
from tests.contract.test_train_engine import accumulate, copied, largest_difference, make_microbatches
from tests.gpu.device import DEVICE, IS_SMALL
from tests.tiny_model import make_tokenizer
from tests.unit.learner.builders import CPU, make_alone, make_groups, make_model, make_run, make_trainer, weights, zero

SMOOTH = OptimizerConfig(learning_rate=0.1, epsilon=1.0)
"""With a large epsilon an update is as smooth a function of the gradient as the loss: rounding stays rounding."""


@pytest.mark.parametrize("stage", [None, 0, 2, 3])
def test_steps_on_the_device_are_those_of_plain_torch_on_the_cpu(tmp_path: Path, stage: int | None) -> None:
    def train(engine, device):
        run = make_run(make_model(tmp_path), learner={"engine": engine, "optimizer": SMOOTH})
        # One process has one group, the device's, whatever a trainer in it computes on.
        make_alone(DEVICE)
        trainer = build_trainer(run, ranks=Ranks(rank=0, size=1, device=device))
        before = {name: tensor.cpu() for name, tensor in weights(trainer).items()}
        metrics = [trainer.step(make_groups(seed=i), learner_version=0, step=i + 1) for i in range(3)]
        return before, metrics, {name: tensor.cpu() for name, tensor in weights(trainer).items()}

    initial, expected, reference = train(TorchEngineConfig(), CPU)
    _, metrics, found = train(TorchEngineConfig() if stage is None else zero(stage), DEVICE)
    for one, other in zip(expected, metrics, strict=True):
        assert other == pytest.approx(one, abs=1e-3, rel=1e-2)
    assert largest_difference(reference, found) < 0.01 * largest_difference(initial, reference)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_training_continues_from_the_saved_state(tmp_path: Path, stage: int) -> None:
    run = make_run(make_model(tmp_path), learner={"engine": zero(stage)})
    first, second = (make_trainer(run, device=DEVICE).engine for _ in range(2))
    batches = [[m.to(DEVICE) for m in make_microbatches(seed=seed)] for seed in (0, 1)]
    accumulate(first, batches[0])
    first.step(learning_rate=1e-3)
    save_file(first.copy_state(), tmp_path / STATE_FILE.format(0))
    second.restore_state(tmp_path)
    for each in (first, second):
        accumulate(each, batches[1])
        each.step(learning_rate=1e-3)
    assert largest_difference(copied(first), copied(second)) < 1e-6


def test_bfloat16_of_an_engine_is_near_the_learners(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers, width = (2, 64) if IS_SMALL else (16, 1024)
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = ModelConfig(str(tmp_path), dtype="bfloat16")
    trainer = make_trainer(make_run(tmp_path, model=model, learner={"engine": zero(0)}), device=DEVICE)
    token_ids = np.random.default_rng(0).integers(0, len(tokenizer), size=(4, 16 if IS_SMALL else 256))
    own = canary_logprobs(trainer.engine, token_ids, layout=Layout("one_per_row", 4096))

    async def read() -> list[list[float]]:
        engine = HfEngine(model, HfEngineConfig())
        await engine.start()
        return [await engine.prompt_logprobs(row.tolist()) for row in token_ids]

    difference = float(np.abs(np.array(own) - np.array(asyncio.run(read()))).mean())
    with capsys.disabled():
        print(f"\nbfloat16, {layers} layers of {width}: engine and learner differ by {difference:.4f} nats")
    assert 0 < difference < 0.05
