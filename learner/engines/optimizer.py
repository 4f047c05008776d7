"""AdamW of the training engines: construction, learning rate schedule, and state on disk."""

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from slipstream.configs.learner import OptimizerConfig
from slipstream.learner.errors import CheckpointError


def learning_rate(update: int, *, config: OptimizerConfig, total_updates: int) -> float:
    """Learning rate of an update, counted from 0: linear warm-up to the peak, then the configured shape.

    `linear` and `cosine` reach zero after `total_updates`; `constant` stays at the peak.
    """
    if update < config.warmup_steps:
        return config.learning_rate * (update + 1) / config.warmup_steps
    span = max(1, total_updates - config.warmup_steps)
    progress = min(1.0, (update - config.warmup_steps) / span)
    return config.learning_rate * _SHAPES[config.schedule](progress)


_SHAPES = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: (1.0 + math.cos(math.pi * progress)) / 2,
}


def named_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and persistent buffer by name, themselves, a tied one under each of its names."""
    yield from module.state_dict(keep_vars=True).items()


def make_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the parameters that require gradients."""
    return torch.optim.AdamW(
        [parameter for parameter in module.parameters() if parameter.requires_grad],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def save_optimizer(path: Path, masters: list[Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Write master weights and moments; `masters` are the tensors that the optimizer updates, in a fixed order."""
    tensors = {f"master.{i}": master.detach() for i, master in enumerate(masters)}
    for i, master in enumerate(masters):
        tensors |= {f"{name}.{i}": value.detach() for name, value in optimizer.state.get(master, {}).items()}
    # Cloned: shards are views into one flat tensor, and safetensors refuses tensors that share memory.
    save_file({name: tensor.contiguous().cpu().clone() for name, tensor in tensors.items()}, path)


def restore_optimizer(path: Path, masters: list[Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Inverse of `save_optimizer`. Raises CheckpointError when the tensors do not fit."""
    tensors = read_tensors(path)
    for i, master in enumerate(masters):
        saved = tensors.pop(f"master.{i}", None)
        if saved is None or saved.shape != master.shape:
            raise CheckpointError(
                f"{path} must hold an optimizer state for this model, engine and number of ranks; tensor {i} should be "
                f"{list(master.shape)}, got {saved if saved is None else list(saved.shape)}."
            )
        master.data.copy_(saved)
        names = [name for name in tensors if name.rpartition(".")[2] == str(i)]
        optimizer.state[master] = {name.rpartition(".")[0]: tensors.pop(name).to(master.device) for name in names}
    if tensors:
        raise CheckpointError(f"{path} must hold {len(masters)} optimizer tensors, got more: {sorted(tensors)[:3]} ...")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file. Raises CheckpointError."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} must be a readable part of a checkpoint, got {error}") from error
