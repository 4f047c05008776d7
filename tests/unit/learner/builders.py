"""Builders of runs, groups, and trainers for the learner's tests, with a tiny Qwen2 built in code."""

import json
import os
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from msgspec.inspect import LiteralType, type_info

from slipstream.buffer.trajectory import Reward, Sampling, Trajectory, VersionSpan
from slipstream.configs.base import Formula
from slipstream.configs.data import DataConfig, ModelConfig
from slipstream.configs.generators import GeneratorsConfig, SamplingConfig
from slipstream.configs.learner import DeepSpeedEngineConfig, LearnerConfig, OptimizerConfig, TorchEngineConfig
from slipstream.configs.run import RunConfig
from slipstream.learner.batching.build_batch import BuiltBatch, build_batch
from slipstream.learner.batching.collate import Layout, collate
from slipstream.learner.batching.microbatch import Sample
from slipstream.learner.build import build_trainer
from slipstream.learner.checkpoint import Checkpoints
from slipstream.learner.engines.deepspeed_engine import deepspeed_environment
from slipstream.learner.ranks import Ranks, join_ranks
from slipstream.learner.training.layout import indexed
from slipstream.learner.training.model import Policy, load_policy
from slipstream.learner.training.step_metrics import LAG_BUCKETS
from slipstream.learner.training.trainer import Trainer
from tests.builders import make_trajectory
from tests.metric_docs import TOKENS, keys_under
from tests.tiny_model import CHARACTERS, make_tiny_model, make_tiny_module

CPU = torch.device("cpu")
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=4, seed=0)
VOCABULARY = 2 + len(CHARACTERS)
SMOOTH = OptimizerConfig(learning_rate=1.0, epsilon=1.0)
"""With this epsilon, updates differ no more than gradients do. With Adam's usual epsilon, a gradient as small as its
rounding error moves an element by the learning rate in a direction that depends on the processor."""


def make_run(model_path: Path | str, *, learner: dict[str, Any] | None = None, **overrides: Any) -> RunConfig:
    """A run with two groups of four, the torch engine, three steps, and the optimizer `SMOOTH`."""
    settings: dict[str, Any] = {"prompts_per_step": 2, "max_steps": 3, "engine": TorchEngineConfig(), "device": "cpu"}
    config = LearnerConfig(**(settings | {"optimizer": SMOOTH} | (learner or {})))
    base = {
        "model": model_config(model_path),
        "data": DataConfig(train="a", eval="b", max_prompt_tokens=32),
        "generators": GeneratorsConfig(sampling=SamplingConfig(max_tokens=16)),
        "learner": config,
    }
    return RunConfig(**({"name": "test"} | base | overrides))


def make_response(
    group: int = 0,
    index: int = 0,
    *,
    prompt: tuple[int, ...] = (4, 8, 2, 9),
    response: tuple[int, ...] = (5, 6, 7, 1),
    reward: float = 0.5,
    version: int = 0,
    **overrides: Any,
) -> Trajectory:
    """One answer to one prompt. Right if its reward exceeds 0.5; sampled log-probabilities are -2."""
    num_tokens = len(prompt) + len(response)
    mask = np.arange(num_tokens) >= len(prompt)
    fields: dict[str, Any] = {
        "token_ids": np.array([*prompt, *response], dtype=np.int32),
        "model_mask": mask,
        "generator_logprobs": np.where(mask, -2.0, 0.0).astype(np.float32),
        "version_spans": [VersionSpan(len(prompt), version)],
        "reward": Reward(total=reward, parts={"a": reward, "b": 1 - reward**2}, is_correct=reward > 0.5),
    }
    return make_trajectory(str(group), index, **(fields | overrides))


def make_groups(*, num_groups=2, group_size=4, seed=0, longest=9, **overrides: Any) -> list[list[Trajectory]]:
    """Groups with random prompts, response lengths, and rewards."""
    random = np.random.default_rng(seed)
    groups = []
    for group in range(num_groups):
        prompt = tuple(random.integers(2, VOCABULARY, size=int(random.integers(2, longest))).tolist())
        members = []
        for index in range(group_size):
            response = tuple(random.integers(2, VOCABULARY, size=int(random.integers(1, longest))).tolist())
            reward = float(random.random())
            members.append(make_response(group, index, prompt=prompt, response=response, reward=reward, **overrides))
        groups.append(members)
    return groups


def make_batch(groups: list[list[Trajectory]], **overrides: Any) -> BuiltBatch:
    """One update at version 0 without a bound of lags, unless overridden."""
    settings: dict[str, Any] = {"learner_version": 0, "num_updates": 1, "vocab_size": VOCABULARY}
    settings |= {"max_lags": [None] * len(groups), "weights": [1.0] * len(groups)}
    return build_batch(groups, **(settings | overrides))


NEEDED: dict[str, dict[str, Any]] = {
    "clip_cov": {"fraction": 0.2, "covariance_low": 0.0},
    "kl_cov": {"fraction": 0.2},
    "sppo": {"eta": 1.0},
    "opsm": {"delta": 0.01},
    "m2po": {"threshold": 0.01},
}
"""Kind -> settings that have an effect on a few tokens."""


def examples(union: Any, **own: Any) -> dict[str, Formula]:
    """A record for every kind of a union and every combination of its Literal fields, named `kind` or `kind-option`.

    `own`: fields of the kind `custom`.
    """
    found: dict[str, Formula] = {}
    for record in get_args(union):
        kind = str(record.__struct_config__.tag)
        fields: Any = type_info(record).fields  # type: ignore[attr-defined]
        literals = {field.name: field.type.values for field in fields if isinstance(field.type, LiteralType)}
        settings = own if kind == "custom" else NEEDED.get(kind, {})
        for values in product(*literals.values()):
            found["-".join([kind, *values])] = record(**settings, **dict(zip(literals, values, strict=True)))
    return found


def model_config(path: Path | str, **settings: Any) -> ModelConfig:
    return ModelConfig(**({"path": str(path), "max_length": 64, "dtype": "float32"} | settings))


def load(path: Path | str, *, is_reward_model: bool = False, **settings: Any) -> Policy:
    """A policy from a checkpoint, on the CPU."""
    return load_policy(model_config(path, **settings), device=CPU, is_reward_model=is_reward_model)


def make_model(folder: Path, *, seed: int = 0, is_tied: bool = False) -> Path:
    path = folder / f"model-{seed}-{is_tied}"
    return path if path.exists() else make_tiny_model(path, seed=seed, is_tied=is_tied)


def configure(path: Path, **settings: Any) -> None:
    """Change settings in a model's configuration."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def make_policy(**settings: Any) -> Policy:
    return Policy(make_tiny_module(**settings).train())


def make_sample(trajectory: Trajectory, *, first_index: int = 0) -> Sample:
    """A sample that trains every model-written token."""
    trained = np.flatnonzero(trajectory.model_mask)
    group_id, temperature = trajectory.group_id, trajectory.sampling.temperature
    return Sample(trajectory.token_ids, trained[trained > 0], first_index, group_id=group_id, temperature=temperature)


def make_samples(trajectories: list[Trajectory]) -> list[Sample]:
    return indexed([make_sample(trajectory) for trajectory in trajectories])


def measure(model: torch.nn.Module, samples: list[Sample], layout: Layout, *, name: str = "logprobs") -> torch.Tensor:
    """A measurement of all trained tokens, packed in the layout, in the order of the samples."""
    column = torch.zeros(sum(len(sample.trained) for sample in samples))
    for microbatch in collate(samples, layout=layout):
        column = column.index_put((microbatch.indices,), model(microbatch)[name])
    return column


@torch.no_grad()
def measure_alone(policy: Policy, samples: list[Sample]) -> torch.Tensor:
    """Log-probabilities from transformers, one sample at a time."""
    found = []
    for sample in samples:
        token_ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
        logits = policy.causal_lm(input_ids=token_ids, use_cache=False).logits[0].log_softmax(-1)
        trained = torch.from_numpy(sample.trained)
        found.append(logits[trained - 1].gather(-1, token_ids[0, trained][:, None])[:, 0])
    return torch.cat(found)


def make_alone(device: torch.device = CPU) -> Ranks:
    return join_ranks(rank=0, size=1, device=device, timeout_s=60)


def members_of(groups: list[list[Trajectory]]) -> list[Trajectory]:
    return [member for group in groups for member in group]


def train_steps(trainer: Trainer, numbers: Iterable[int]) -> list[dict[str, float]]:
    """Metrics of these steps, counted from 0, on the answers of the current version."""
    return [trainer.step(make_groups(seed=i), learner_version=i, step=i + 1) for i in numbers]


def make_trainer(run: RunConfig, *, device: torch.device = CPU) -> Trainer:
    """A trainer in this process, with one torch thread."""
    torch.set_num_threads(1)
    os.environ.update(deepspeed_environment(device))
    return build_trainer(run, ranks=make_alone(device))


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Copies of all parameters; those of a second model are named `critic.*` or `process_reward.*`."""
    policy = {name: tensor.clone() for name, tensor in trainer.engine.gather_parameters()}
    second = trainer.second_model
    return policy | {f"{second and second.name}.{name}": tensor for name, tensor in second_weights(trainer).items()}


def second_weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    second = trainer.second_model
    return {name: tensor.clone() for name, tensor in second.engine.gather_parameters()} if second else {}


def make_checkpoints(run: RunConfig, folder: Path) -> tuple[Trainer, Checkpoints]:
    trainer = make_trainer(run)
    return trainer, Checkpoints(folder / "checkpoints", run=run, trainer=trainer, ranks=make_alone())


def plant_nan(trainer: Trainer, *, update: int) -> None:
    """Make `update` leave NaN in a weight, after a finite loss and gradient norm."""
    step = trainer.engine.step

    def step_to_nan(*, learning_rate: float) -> float:
        norm = step(learning_rate=learning_rate)
        if trainer.num_updates + 1 == update:
            dict(trainer.engine.held_weights())["model.norm.weight"].detach().fill_(float("nan"))
        return norm

    trainer.engine.step = step_to_nan  # type: ignore[method-assign]


def save(checkpoints: Checkpoints, *, step: int, version: int | None = None) -> str:
    """Save a checkpoint, wait until it is durable, and return its name. `version` defaults to `step`."""
    pointer = checkpoints.save(step=step, version=step if version is None else version)
    checkpoints.saver.flush()
    return pointer.name


def zero(stage: int) -> DeepSpeedEngineConfig:
    return DeepSpeedEngineConfig(zero_stage=stage)


def documented(metrics: dict[str, float]) -> set[str]:
    """Return the rows of docs/metrics.md for these metrics. Fails for an undocumented metric."""
    rows = set(metrics)
    for key in metrics:
        if key.startswith("learner/by_source/"):
            rows = rows - {key} | {"learner/by_source/<source>/<name>"}
        elif key.startswith("learner/by_lag/"):
            _, _, bucket, name = key.split("/")
            assert bucket in LAG_BUCKETS
            assert f"learner/{name}" in keys_under(TOKENS)
            rows = rows - {key} | {"learner/by_lag/<lag>/<name>"}
    return rows
