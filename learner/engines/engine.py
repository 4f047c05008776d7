"""TrainEngine: trains a model with plain torch in one process. Divergence checks of all engines."""

import logging
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from slipstream.configs.learner import OptimizerConfig
from slipstream.learner.batching.microbatch import Microbatch
from slipstream.learner.engines.optimizer import (
    Trainable,
    copy_moments,
    make_optimizer,
    restore_moments,
    set_learning_rate,
    trained_names,
    whole_shards,
)
from slipstream.learner.errors import DivergenceError
from slipstream.learner.ranks import Ranks


def check_loss(loss: Tensor, *, what: str, step: int, setting: str, ranks: Ranks) -> None:
    """Raise DivergenceError on all ranks if the loss of any is not finite. Collective.

    `what`: name of the loss. `setting`: its optimizer's config section.
    """
    # A rank that raised alone would block the others in `TrainEngine.step`.
    is_bad = ranks.max((~loss.isfinite()).float().reshape(1))
    if is_bad.item():
        raise DivergenceError(
            f"{what} of step {step} must be finite, got {loss.item()} on rank {ranks.rank}: lower "
            f"{setting}.learning_rate."
        )


def check_finite(tensors: Iterable[tuple[str, Tensor]], *, what: str, step: int, remedy: str, ranks: Ranks) -> None:
    """Raise DivergenceError on all ranks if a tensor of any contains NaN or infinity. Collective.

    `what`: name of the tensors. `step`: last finished step, 0 before the first.
    """
    named = list(tensors)
    # A sum takes no copy, but may overflow with finite terms, so check again.
    sums = [tensor.detach().sum().float().to(named[0][1].device) for _, tensor in named]
    are_finite = torch.stack(sums).isfinite().tolist() if sums else []
    broken = [
        name
        for (name, tensor), is_finite in zip(named, are_finite, strict=True)
        if not is_finite and not tensor.isfinite().all()
    ]
    if ranks.max(torch.tensor([float(bool(broken))])).item():
        first = next(filter(None, ranks.gather_bytes("".join(broken[:1]).encode()))).decode()
        when = f"after step {step}" if step else "before the first step, in model.path"
        raise DivergenceError(f"{what} must be finite {when}, got NaN or infinity in {first}: {remedy}.")


def check_grad_norm(norm: float, *, setting: str) -> float:
    """Norm. Raises DivergenceError if it is not finite. `setting`: as in `check_loss`."""
    if not math.isfinite(norm):
        raise DivergenceError(
            f"the gradient norm must be finite, got {norm}: lower {setting}.learning_rate, or look at "
            "learner/nonfinite_fraction for bad log-probabilities."
        )
    return norm


M = TypeVar("M", bound=Trainable, covariant=True)


class ModelEngine(Generic[M]):
    """Holds a model's parameters, here unsharded. Every method is collective (see TrainEngine)."""

    def __init__(self, model: M) -> None:
        """With ZeRO-3, the parameters of `model` are sharded."""
        self.model = model

    def forward(self, microbatch: Microbatch, **options: Any) -> dict[str, Tensor]:
        """Outputs of `model` for the trained tokens, differentiable unless under no_grad."""
        return self.model(microbatch, **options)

    def gather_parameters(self, *, is_whole: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield the unsharded `Trainable.weights`, float32, on the model's device.

        They may share memory with the model: copy them before the next step.
        """
        for name, parameter in self.model.weights(is_whole=is_whole):
            yield name, parameter.detach()

    def held_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's `Trainable.weights`: with ZeRO-3, shards."""
        yield from self.model.weights()

    @torch.no_grad()
    def load_parameters(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Set the parameters to those of `gather_parameters`. With ZeRO-3, ranks other than 0 may pass no tensors."""
        held = dict(self.model.weights())
        for name, tensor in tensors:
            held[name].copy_(tensor)


class TrainEngine(ModelEngine[M]):
    """Holds the parameters and the optimizer: plain torch in one process, the reference for DeepSpeedEngine.

    Life: ((forward -> backward)* -> step)*. Every method is collective: all ranks make the same calls in order.
    """

    optimizer: torch.optim.Optimizer
    """Its pre-step hooks see each gradient once per `step`: unsharded, or this rank's shards."""
    device: torch.device
    """Device for microbatches."""

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
        self._max_grad_norm = optimizer.max_grad_norm or math.inf

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient. Losses are summed, not averaged, over microbatches and ranks."""
        loss.backward()

    def step(self, *, learning_rate: float) -> float:
        """Clip gradients, update parameters, and clear gradients. Returns the norm before clipping.

        Raises DivergenceError if the norm is not finite: parameters are unchanged, but the engine is unusable.
        """
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm).item()
        check_grad_norm(norm, setting=self._setting)
        set_learning_rate(self.optimizer, learning_rate)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def copy_state(self) -> dict[str, Tensor]:
        """Copy this rank's share of the optimizer state to host memory (see `STATE_FILE`)."""
        return copy_moments(whole_shards(self.model), self.optimizer)

    def restore_state(self, folder: Path, *, weights: dict[str, Tensor]) -> None:
        """Load unsharded `weights`, and optimizer state saved by any engine and ranks. Raises CheckpointError."""
        self.load_parameters(weights.items())
        names = trained_names(self.model).values()
        restore_moments(folder, whole_shards(self.model), self.optimizer, names=names)


def take_step(engine: TrainEngine[Any], *, learning_rate: float, step: int) -> float:
    """`TrainEngine.step`, with the step number in its error."""
    try:
        return engine.step(learning_rate=learning_rate)
    except DivergenceError as error:
        raise DivergenceError(f"step {step}: {error}") from None


def gather_to_first(engine: ModelEngine, *, ranks: Ranks, is_whole: bool = False) -> dict[str, Tensor]:
    """Copy the `Trainable.weights` to host memory on rank 0, tied ones once; {} on other ranks. Collective."""
    first = dict[int, str]()
    owners = {name: first.setdefault(id(each), name) for name, each in engine.model.weights(is_whole=is_whole)}
    copies = dict[str, Tensor]()
    for name, tensor in engine.gather_parameters(is_whole=is_whole):
        if ranks.is_first:
            copies[name] = copies[owners[name]] if owners[name] in copies else tensor.to("cpu", copy=True)
    return copies
