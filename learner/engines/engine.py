"""TrainEngine, the interface of the DeepSpeed and torch engines, and divergence checks."""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from slipstream.learner.batching.microbatch import Microbatch
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
    """Return the norm. Raises DivergenceError if it is not finite. `setting`: as in `check_loss`."""
    if not math.isfinite(norm):
        raise DivergenceError(
            f"the gradient norm must be finite, got {norm}: lower {setting}.learning_rate, or look at "
            "learner/nonfinite_fraction for bad log-probabilities."
        )
    return norm


class Trainable(Protocol):
    """Module that an engine trains: the policy or the value model."""

    compute_dtype: torch.dtype

    @property
    def backbone(self) -> nn.Module:
        """The transformers model that maps tokens to hidden states."""

    def __call__(self, microbatch: Microbatch, **options: Any) -> dict[str, Tensor]:
        """Outputs for the trained tokens by name."""

    def weights(self, *, is_whole: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters and persistent buffers by name, tied ones under each name.

        With an adapter, only it and a trained head, unless `is_whole`, which also selects the module's names.
        """

    def parameters(self) -> Iterator[nn.Parameter]:
        """Each parameter once."""


M = TypeVar("M", bound=Trainable, covariant=True)


class ModelEngine(Protocol[M]):
    """Holds a model's parameters. Every method is collective (see TrainEngine)."""

    @property
    def model(self) -> M:
        """With ZeRO-3, its parameters are sharded."""

    def forward(self, microbatch: Microbatch, **options: Any) -> dict[str, Tensor]:
        """Outputs of `model` for the trained tokens, differentiable unless under no_grad."""

    def gather_parameters(self, *, is_whole: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield the unsharded `Trainable.weights`, float32, on the model's device.

        They may share memory with the model: copy them before the next step.
        """

    def held_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's `Trainable.weights`: with ZeRO-3, shards."""

    def load_parameters(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Inverse of `gather_parameters`. With ZeRO-3, ranks other than 0 may pass no tensors."""


class TrainEngine(ModelEngine[M], Protocol[M]):
    """Holds the parameters and the optimizer.

    Life: ((forward -> backward)* -> step)*. Every method is collective: all ranks make the same calls in order.
    """

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Its pre-step hooks see each gradient once per `step`: unsharded, or this rank's shards."""

    @property
    def device(self) -> torch.device:
        """Device for microbatches."""

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient. Losses are summed, not averaged, over microbatches and ranks."""

    def step(self, *, learning_rate: float) -> float:
        """Clip gradients, update parameters, and clear gradients. Returns the norm before clipping.

        Raises DivergenceError if the norm is not finite: parameters are unchanged, but the engine is unusable.
        """

    def copy_state(self) -> dict[str, Tensor]:
        """Copy this rank's share of the optimizer state to host memory (see `STATE_FILE`)."""

    def restore_state(self, folder: Path, *, weights: dict[str, Tensor]) -> None:
        """Load unsharded `weights`, and optimizer state saved by any engine and ranks. Raises CheckpointError."""


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
