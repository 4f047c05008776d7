"""TrainEngine: plain torch in one process. Divergence checks of all engines."""

import logging
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from slipstream.configs.learner import OptimizerConfig
from slipstream.learner.batching.microbatch import Microbatch
from slipstream.learner.engines import optimizer as optimizers
from slipstream.learner.engines.optimizer import STATE_FILE, Shard, Trainable
from slipstream.learner.errors import DivergenceError
from slipstream.learner.ranks import Ranks


def check_loss(loss: Tensor, *, what: str, step: int, setting: str, ranks: Ranks) -> None:
    """Raise DivergenceError on all ranks if a loss is not finite. Collective.

    `what`: name of the loss. `setting`: its optimizer's config section.
    """
    # A rank that raised alone would block the others in `TrainEngine.step`.
    if ranks.max((~loss.isfinite()).float().reshape(1)).item():
        must = f"{what} of step {step} must be finite, got {loss.item()} on rank {ranks.rank}"
        raise DivergenceError(f"{must}: lower {setting}.learning_rate.")


def check_finite(tensors: Iterable[tuple[str, Tensor]], *, what: str, step: int, remedy: str, ranks: Ranks) -> None:
    """Raise DivergenceError on all ranks if a tensor is not finite. Collective.

    `what`: name of the tensors. `step`: last finished step, 0 before the first.
    """
    named = list(tensors)
    # A sum takes no copy, but may overflow with finite terms.
    sums = [tensor.detach().sum().float().to(named[0][1].device) for _, tensor in named]
    are_finite = torch.stack(sums).isfinite().tolist() if sums else []
    checked = zip(named, are_finite, strict=True)
    broken = [name for (name, tensor), is_finite in checked if not (is_finite or tensor.isfinite().all())]
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

    is_sharded = False
    """True if this rank holds shards of parameters, as with ZeRO-3."""

    def __init__(self, model: M) -> None:
        """With ZeRO-3, the parameters of `model` are sharded."""
        self.model = model

    def forward(self, microbatch: Microbatch, **options: Any) -> dict[str, Tensor]:
        """Outputs of `model` for the trained tokens, differentiable unless under no_grad."""
        return self.model(microbatch, **options)

    def gather_parameters(self, *, is_whole: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield the unsharded `Trainable.weights`, possibly in the model's memory: copy them before the next step."""
        for name, parameter in self.model.weights(is_whole=is_whole):
            yield name, parameter.detach()

    def held_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's `Trainable.weights`, tied ones once: with ZeRO-3, shards."""
        for shard in self._held_shards():
            yield shard.name, shard.of(shard.master)

    def copy_weights(self, ranks: Ranks) -> dict[str, Tensor]:
        """Copy this rank's share of weights to host memory (see `WEIGHTS_FILE`)."""
        shards = self._held_shards()
        return optimizers.copy_weights(shards if self.is_sharded else shards[ranks.rank :: ranks.size])

    @torch.no_grad()
    def restore_weights(self, folder: Path) -> None:
        """Load weights of any engine and ranks. Raises CheckpointError."""
        optimizers.restore_weights(folder, self._held_shards())
        self._refresh()

    @torch.no_grad()
    def take_weights(self, other: "ModelEngine") -> None:
        """`other` has the same model and layout."""
        theirs = dict(other.held_weights())
        for name, weight in self.held_weights():
            weight.copy_(theirs[name])
        self._refresh()

    def _held_shards(self) -> list[Shard]:
        named = {id(tensor): (name, tensor) for name, tensor in reversed([*self.model.weights()])}
        return [Shard(name, 0, tensor.numel(), tensor, 0) for name, tensor in reversed(named.values())]

    def _refresh(self) -> None:
        """Update what depends on restored weights."""


class TrainEngine(ModelEngine[M]):
    """Parameters and optimizer in plain torch and one process, the reference for DeepSpeedEngine.

    Life: ((forward -> backward)* -> step)*. Every method is collective: all ranks make the same calls in order.
    """

    optimizer: torch.optim.Optimizer
    """Its pre-step hooks see each gradient once per `step`, float32: unsharded, or this rank's shards."""
    device: torch.device
    """Device for microbatches."""

    def __init__(
        self, model: M, *, optimizer: OptimizerConfig, device: torch.device, setting: str = "learner.optimizer"
    ) -> None:
        """`setting`: config section of `optimizer`, for errors."""
        # With accelerate (for peft), transformers imports DeepSpeed to save a model.
        logging.getLogger("DeepSpeed").disabled = True
        super().__init__(model)
        self.device = device
        self._set_optimizer(optimizer, setting=setting)

    def _set_optimizer(self, config: OptimizerConfig, *, setting: str, is_zero: bool = False) -> None:
        """`is_zero`: DeepSpeed holds the masters and clips gradients."""
        self._setting, self._grad_norm = setting, 0.0
        self._max_grad_norm = config.max_grad_norm or math.inf
        self._masters = {} if is_zero else optimizers.make_masters(self.model)
        self.optimizer = optimizers.make_optimizer(self.model, config, masters=self._masters)
        if not is_zero:
            optimizers.update_masters(self.optimizer, self.model, self._masters)
            self.optimizer.register_step_pre_hook(self._clip)

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient. Losses add up over microbatches and ranks."""
        loss.backward()

    def step(self, *, learning_rate: float) -> float:
        """Clip and apply gradients, and clear them. Returns the norm before clipping.

        Raises DivergenceError if it is not finite: parameters are unchanged, but the engine is unusable.
        """
        optimizers.set_learning_rate(self.optimizer, learning_rate)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return self._grad_norm

    def _clip(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Optimizer pre-step hook, after any reduction over ranks."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self._max_grad_norm)
        self._grad_norm = check_grad_norm(norm.item(), setting=self._setting)

    def copy_state(self) -> dict[str, Tensor]:
        """Copy this rank's share of trained weights and optimizer state to host memory (see `STATE_FILE`)."""
        return optimizers.copy_shards(self._shards(), self.optimizer)

    @torch.no_grad()
    def restore_state(self, folder: Path) -> None:
        """Load trained weights and optimizer state of any engine and ranks. Raises CheckpointError."""
        names = set(optimizers.trained_names(self.model).values())
        optimizers.restore_shards(folder, self._shards(), self.optimizer, names=names)
        held = [each for each in self._held_shards() if each.name in names]
        optimizers.restore_weights(folder, held, pattern=STATE_FILE)
        self._refresh()

    def _shards(self) -> list[Shard]:
        """Slices that the optimizer updates on this rank."""
        names = optimizers.trained_names(self.model)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        return [Shard(names[id(each)], 0, each.numel(), self._masters.get(id(each), each), 0) for each in trained]


def take_step(engine: TrainEngine[Any], *, learning_rate: float, step: int) -> float:
    """`TrainEngine.step`, with the step number in its error."""
    try:
        return engine.step(learning_rate=learning_rate)
    except DivergenceError as error:
        raise DivergenceError(f"step {step}: {error}") from None
