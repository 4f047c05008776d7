"""Second model: a model trained along with the policy in its own engine, such as the critic."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from slipstream.configs.algorithm import CriticConfig, ProcessRewardConfig
from slipstream.configs.data import ModelConfig
from slipstream.configs.run import RunConfig
from slipstream.learner.batching.batch import Batch
from slipstream.learner.batching.microbatch import Microbatch
from slipstream.learner.engines.engine import TrainEngine, check_loss, take_step
from slipstream.learner.engines.optimizer import Trainable, learning_rate
from slipstream.learner.ranks import Ranks

M = TypeVar("M", bound=Trainable)
C = TypeVar("C", CriticConfig, ProcessRewardConfig)

Updates = Sequence[Sequence[Microbatch]]
"""Microbatches of each optimizer update of a step."""


class SecondModel(ABC, Generic[M, C]):
    """The model and its optimizer. Life: (fill -> learn)*, once per step. Every method is collective."""

    def __init__(self, run: RunConfig, config: C, *, engine: TrainEngine[M], ranks: Ranks) -> None:
        self._run = run
        self._config: C = config
        self._ranks = ranks
        self.engine = engine
        self.name = config.key
        """Folder in checkpoints, and start of its metrics."""
        self.noun = config.key.replace("_", " ")
        self.optimizer_setting = f"algorithm.{config.key}.optimizer"
        self.warmup_steps: int = getattr(config, "warmup_steps", 0)
        """Initial steps that don't train the policy."""
        self.num_updates = 0
        """Optimizer updates so far, restored from a checkpoint."""

    @staticmethod
    @abstractmethod
    def load(config: ModelConfig, **options: Any) -> M:
        """Load a policy, or a saved model of this kind. `options`: see `load_module`. Raises ModelError."""

    @abstractmethod
    def fill(self, batch: Batch, updates: Updates, *, step: int) -> tuple[Batch, dict[str, float]]:
        """Fill columns for the advantage. Returns metrics of any training. Raises DivergenceError."""

    def learn(self, batch: Batch, updates: Updates, *, step: int) -> dict[str, float]:
        """Train after `Objective.prepare`, in `updates` with a loss of the policy. Raises DivergenceError."""
        return {}

    def update(
        self, microbatches: Sequence[Microbatch], measure: Callable[[Microbatch], tuple[Tensor, ...]], *, step: int
    ) -> tuple[Tensor, float]:
        """Make one optimizer update. Returns sums over this rank's microbatches, float64[K], and the gradient norm.

        `measure`: a microbatch's part of the loss, and numbers to sum.
        """
        sums = []
        for microbatch in microbatches:
            found = measure(microbatch)
            self.engine.backward(found[0])
            sums.append(torch.stack([number.detach().double() for number in found]))
        total, setting = torch.stack(sums).sum(0), self.optimizer_setting
        check_loss(total[0], what=f"the {self.noun}'s loss", step=step, setting=setting, ranks=self._ranks)
        norm = take_step(self.engine, learning_rate=self._learning_rate(), step=step)
        self.num_updates += 1
        return total.cpu(), norm

    def _learning_rate(self) -> float:
        config, num_steps = self._config.optimizer, self._run.learner.max_steps
        per_step = self._run.algorithm.updates_per_step
        return learning_rate(self.num_updates, config=config, num_steps=num_steps, updates_per_step=per_step)
