"""TorchEngine: plain torch in one process, the reference for DeepSpeedEngine."""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Generic

import torch
from torch import Tensor

from slipstream.configs.learner import OptimizerConfig
from slipstream.learner.batching.microbatch import Microbatch
from slipstream.learner.engines.engine import M, check_grad_norm
from slipstream.learner.engines.optimizer import (
    copy_moments,
    make_optimizer,
    restore_moments,
    set_learning_rate,
    trained_names,
    whole_shards,
)


class WholeModel(Generic[M]):
    """ModelEngine with an unsharded model."""

    def __init__(self, model: M) -> None:
        self.model = model

    def forward(self, microbatch: Microbatch, **options: Any) -> dict[str, Tensor]:
        return self.model(microbatch, **options)

    def gather_parameters(self, *, is_whole: bool = False) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.weights(is_whole=is_whole):
            yield name, parameter.detach()

    def held_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.weights()

    @torch.no_grad()
    def load_parameters(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        held = dict(self.model.weights())
        for name, tensor in tensors:
            held[name].copy_(tensor)


class TorchEngine(WholeModel[M]):
    """TrainEngine in one process."""

    def __init__(
        self, model: M, *, optimizer: OptimizerConfig, device: torch.device, setting: str = "learner.optimizer"
    ) -> None:
        """`setting`: config section of `optimizer`, for errors."""
        # With accelerate installed (for peft), transformers imports DeepSpeed to save a model.
        logging.getLogger("DeepSpeed").disabled = True
        super().__init__(model)
        self.device = device
        self.optimizer = make_optimizer(model, optimizer)
        self._setting = setting
        self._max_grad_norm = optimizer.max_grad_norm

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self, *, learning_rate: float) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm).item()
        check_grad_norm(norm, setting=self._setting)
        set_learning_rate(self.optimizer, learning_rate)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def copy_state(self) -> dict[str, Tensor]:
        return copy_moments(whole_shards(self.model), self.optimizer)

    def restore_state(self, folder: Path, *, weights: dict[str, Tensor]) -> None:
        self.load_parameters(weights.items())
        names = trained_names(self.model).values()
        restore_moments(folder, whole_shards(self.model), self.optimizer, names=names)
