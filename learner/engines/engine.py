"""TrainEngine: the protocol of DeepSpeed and plain torch, and the checks for divergence."""

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

    `what` names the loss, `setting` the config section of its optimizer.
    """
    # Together: a rank that raised alone would leave the others blocked in `TrainEngine.step`.
    is_bad = ranks.max((~loss.isfinite()).float().reshape(1))
    if is_bad.item():
        raise DivergenceError(
            f"{what} of step {step} must be finite, got {loss.item()} on rank {ranks.rank}: lower "
            f"{setting}.learning_rate."
        )


def check_finite(tensors: Iterable[tuple[str, Tensor]], *, what: str, step: int, remedy: str, ranks: Ranks) -> None:
    """Raise DivergenceError on all ranks if a tensor of any holds NaN or infinity. Collective.

    `what` names the tensors. `step`: last step that they include; 0 before the first.
    """
    named = list(tensors)
    # A sum is finite only if all of its terms are, and takes one pass without a copy. Finite terms may overflow it.
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
    """Return the norm; raise DivergenceError if it is not finite. `setting`: config section of the optimizer."""
    if not math.isfinite(norm):
        raise DivergenceError(
            f"the gradient norm must be finite, got {norm}: lower {setting}.learning_rate, or look at "
            "learner/nonfinite_fraction for bad log-probabilities."
        )
    return norm


class Trainable(Protocol):
    """Torch module that an engine trains: the policy, or the critic's value model."""

    compute_dtype: torch.dtype
    """Data type of matrix products."""

    @property
    def backbone(self) -> nn.Module:
        """The transformers model, which turns tokens into hidden states."""

    def __call__(self, microbatch: Microbatch, **options: Any) -> dict[str, Tensor]:
        """Compute the outputs for the predicted tokens by name."""

    def weights(self, *, is_whole: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield every trained parameter and persistent buffer by name; a tied one under each of its names.

        `is_whole`: also those that an adapter leaves as they are, all by their names in the module.
        """

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield every parameter once, as an optimizer takes them."""


M = TypeVar("M", bound=Trainable, covariant=True)


class ModelEngine(Protocol[M]):
    """Holds the parameters of a model. With several ranks every method is collective: see TrainEngine."""

    @property
    def model(self) -> M:
        """The module; with ZeRO-3 its parameters are sharded."""

    def forward(self, microbatch: Microbatch, **options: Any) -> dict[str, Tensor]:
        """Outputs of `model` for the predicted tokens, with its options; differentiable unless under no_grad."""

    def gather_parameters(self, *, is_whole: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield unsharded parameters, and buffers, under the names that `model` gives them, float32, on its device.

        `is_whole`: see Trainable.

        A parameter that is not sharded is yielded itself: copy it before the next step.
        """

    def held_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what this rank holds of the trained parameters and of the buffers: all, or its shards with ZeRO-3."""

    def load_parameters(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Inverse of `gather_parameters`; with ZeRO-3 rank 0's tensors count, and the others may give none."""


class TrainEngine(ModelEngine[M], Protocol[M]):
    """Holds the parameters and the optimizer.

    Life: ((forward -> backward)* -> step)*. With several ranks every method is collective: all ranks make the same
    calls in the same order, `forward` equally often.
    """

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Within `step` it gets each gradient once: unsharded, or this rank's shards of it."""

    @property
    def device(self) -> torch.device:
        """Device on which microbatches must be."""

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of `loss`. The losses of all microbatches and all ranks are summed, not averaged."""

    def step(self, *, learning_rate: float) -> float:
        """Clip, update the parameters, clear the gradients; returns the gradient norm before clipping.

        Raises DivergenceError when the norm is not finite: the parameters are unchanged, the engine is unusable.
        """

    def copy_state(self) -> dict[str, Tensor]:
        """Copy the optimizer state that this rank has to write to host memory: see `STATE_FILE`."""

    def restore_state(self, folder: Path, *, weights: dict[str, Tensor]) -> None:
        """Load unsharded parameters, and optimizer state that an engine of any layout wrote. Raises CheckpointError."""


def take_step(engine: TrainEngine[Any], *, learning_rate: float, step: int) -> float:
    """`TrainEngine.step`; its error names the number of the step."""
    try:
        return engine.step(learning_rate=learning_rate)
    except DivergenceError as error:
        raise DivergenceError(f"step {step}: {error}") from None


def gather_to_first(engine: ModelEngine, *, ranks: Ranks, is_whole: bool = False) -> dict[str, Tensor]:
    """Copies of all parameters in host memory on rank 0, nothing on the others; `is_whole`: see Trainable. Collective.

    A tied one is copied once.
    """
    first = dict[int, str]()
    owners = {name: first.setdefault(id(each), name) for name, each in engine.model.weights(is_whole=is_whole)}
    copies = dict[str, Tensor]()
    for name, tensor in engine.gather_parameters(is_whole=is_whole):
        if ranks.is_first:
            copies[name] = copies[owners[name]] if owners[name] in copies else tensor.to("cpu", copy=True)
    return copies
