"""TrainEngine: the protocol DeepSpeed and plain torch fulfil."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from slipstream.learner.batching.microbatch import Microbatch
from slipstream.learner.errors import DivergenceError
from slipstream.learner.ranks import Ranks


# @@ Divergence: a loss or a gradient that is no longer a finite number ends the run before it moves a weight.
def check_loss(loss: Tensor, *, what: str, step: int, setting: str, ranks: Ranks) -> None:
    """All ranks learn of it together, so that none waits for another in `TrainEngine.step`. Collective.

    `what` it is called, and where the settings of its optimizer stand in the config. Raises DivergenceError.
    """
    is_bad = ranks.max((~loss.isfinite()).float().reshape(1))
    if is_bad.item():
        raise DivergenceError(
            f"{what} of step {step} must be finite, got {loss.item()} on rank {ranks.rank}: lower "
            f"{setting}.learning_rate or resume from the newest checkpoint."
        )


def check_grad_norm(norm: float, *, setting: str) -> float:
    """The same norm. `setting`: where the settings of the optimizer stand in the config. Raises DivergenceError."""
    if not math.isfinite(norm):
        raise DivergenceError(
            f"the gradient norm must be finite, got {norm}: lower {setting}.learning_rate, or look at "
            "learner/nonfinite_fraction for bad log-probabilities; the weights are those of the update before."
        )
    return norm


class Trainable(Protocol):
    """What an engine trains, a torch module: the policy, or the critic's value model."""

    def __call__(self, microbatch: Microbatch, **asked: Any) -> dict[str, Tensor]:
        """What it says of the predicted tokens."""
        ...

    def weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter by its name in a checkpoint; a tied one under each of its names."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Every parameter once."""
        ...


M = TypeVar("M", bound=Trainable, covariant=True)


class TrainEngine(Protocol[M]):
    """Holds the parameters and the optimizer.

    Life: (forward -> backward)* -> step, again and again. With several ranks every method is collective: all ranks call
    it, in the same order; `forward` as often on each.
    """

    @property
    def model(self) -> M:
        """What is trained; with ZeRO-3 its parameters are in pieces."""
        ...

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What moves the parameters. Within `step` it gets each gradient once, whole, or this rank's pieces of it."""
        ...

    @property
    def device(self) -> torch.device:
        """Where microbatches must be."""
        ...

    def forward(self, microbatch: Microbatch, **asked: Any) -> dict[str, Tensor]:
        """What `model` says of the predicted tokens, `asked` as there; with a graph unless under no_grad."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss` to what is accumulated. Losses of all microbatches and all ranks add up."""
        ...

    def step(self, *, learning_rate: float) -> float:
        """Clip, move the parameters, forget the gradients; returns the gradient norm before clipping.

        Raises DivergenceError, with the parameters unmoved, when the norm is not finite; the engine is then of no further use.
        """
        ...

    def gather_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Full parameters by the names that `model` gives them.

        Float32, on `device`. What is not sharded is the live parameter: copy it before the next step.
        """
        ...

    def save_state(self, folder: Path) -> None:
        """Write this rank's part of the optimizer state into an existing folder."""
        ...

    def restore_state(self, folder: Path, *, weights: dict[str, Tensor]) -> None:
        """Take back full parameters and this rank's part of the optimizer state. Raises CheckpointError."""
        ...
