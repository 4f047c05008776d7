"""Optimizers of the training engines: construction, learning-rate schedule, and saved state."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from slipstream.configs.learner import OptimizerConfig
from slipstream.learner.batching.microbatch import Microbatch
from slipstream.learner.errors import CheckpointError


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


def learning_rate(update: int, *, config: OptimizerConfig, num_steps: int, updates_per_step: int = 1) -> float:
    """Learning rate of an update, counted from 0: linear warm-up, then the configured schedule.

    `linear` and `cosine` reach zero after `num_steps`.
    """
    warmup = config.warmup_steps * updates_per_step
    if update < warmup:
        return config.learning_rate * (update + 1) / warmup
    span = max(1, num_steps * updates_per_step - warmup)
    progress = min(1.0, (update - warmup) / span)
    return config.learning_rate * _SHAPES[config.schedule](progress)


_SHAPES = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: (1.0 + math.cos(math.pi * progress)) / 2,
}


def named_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and persistent buffer by name, tied ones under each name."""
    yield from module.state_dict(keep_vars=True).items()


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for some parameters and AdamW for the others, as one optimizer with their groups and state."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        # The groups are the parts' own dicts, so that a new learning rate reaches them.
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._parts = parts
        for part in parts:
            part.state = self.state

    def step(self, closure: Any = None) -> None:
        for part in self._parts:
            part.step()


def make_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Optimizer over trainable parameters. One-dimensional ones (norms and biases) do not decay.

    Muon: M = 0.95 M + 0.05 G, W -= lr (0.2 sqrt(max(rows, columns)) NewtonSchulz5(0.95 M + 0.05 G) + weight_decay W)

    Source: Jordan, https://kellerjordan.github.io/posts/muon; the scale, at which AdamW's learning rates fit:
    Moonlight, arXiv:2502.16982, eq. 4.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    hidden = hidden_matrices(module) if config.name == "muon" else set()
    # `ds_shape` is the unsharded shape of a ZeRO-3 parameter.
    vectors = [each for each in trained if config.weight_decay and len(getattr(each, "ds_shape", each.shape)) < 2]
    matrices = [each for each in trained if id(each) not in hidden | {id(vector) for vector in vectors}]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    rates: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    moments = rates | {"betas": config.betas, "eps": config.epsilon}
    if config.name == "adamw_8bit":
        config.check_installed("the optimizer")
        import bitsandbytes

        eight_bits: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(groups, **moments)
        return eight_bits
    parts: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, **moments, fused=True)] if groups else []
    if hidden:
        moved = [each for each in trained if id(each) in hidden]
        parts.append(torch.optim.Muon(moved, **rates, adjust_lr_fn="match_rms_adamw"))
    return parts[0] if len(parts) == 1 else MuonWithAdamW(*parts)


def hidden_matrices(module: nn.Module) -> set[int]:
    """`id` of each matrix outside embeddings and heads. A value head has one row."""
    parts = [*module.modules()]
    outer = [each for each in parts if isinstance(each, nn.Embedding)]
    outer += [each.get_output_embeddings() for each in parts if hasattr(each, "get_output_embeddings")]
    excluded = {id(getattr(each, "weight", None)) for each in outer}
    return {id(each) for each in module.parameters() if each.ndim == 2 and min(each.shape) > 1} - excluded


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Apply it to all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


# --- state on disk ---------------------------------------------------------------------------------------------------
STATE_FILE = "optimizer-rank-{}.safetensors"
"""Moments of a rank's elements, [elements], and `step`, the number of updates, float32[1]; 0 for Muon.

Keys are `<field>/<first element>/<parameter>`. Float32; with `adamw_8bit` uint8, and float32 `absmax` of blocks. The
model is saved separately.
"""
_STEP = "step"
_ADAMW, _MUON = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)
_EIGHT_BITS = ("state1", "state2", "absmax1", "absmax2")
_FIELDS = (*_ADAMW, *_MUON, *_EIGHT_BITS)


def _zero_state(optimizer: torch.optim.Optimizer, master: Tensor) -> dict[str, Any]:
    """State of a tensor before the first update."""
    if init := getattr(optimizer, "init_state", None):  # of bitsandbytes
        optimizer.state.pop(master, None)
        init(optimizer.param_groups[0], master, -1, -1)
        return optimizer.state[master]
    is_muon = any(
        "momentum" in group and any(each is master for each in group["params"]) for group in optimizer.param_groups
    )
    fields = {field: torch.zeros_like(master.detach()) for field in (_MUON if is_muon else _ADAMW)}
    return fields | {_STEP: torch.zeros((), device=master.device)}


class Shard(NamedTuple):
    """Consecutive elements of a flattened parameter, in a tensor that the optimizer updates.

    Example: Shard("model.norm.weight", begin=64, size=64, master=<float32[4096]>, offset=128)
    """

    name: str
    begin: int
    """First element in the flattened parameter."""
    size: int
    master: Tensor
    """The parameter, or a flat tensor with slices of many parameters and padding."""
    offset: int
    """First element in the flattened `master`."""


def trained_names(model: Trainable) -> dict[int, str]:
    """`id` of each trained parameter -> its name, or the first name of a tied one."""
    names = dict[int, str]()
    for name, parameter in model.weights():
        names.setdefault(id(parameter), name)
    return {id(each): names[id(each)] for each in model.parameters() if each.requires_grad}


def whole_shards(model: Trainable) -> list[Shard]:
    """One shard per trained parameter of an unsharded model."""
    names = trained_names(model)
    return [Shard(names[id(each)], 0, each.numel(), each, 0) for each in model.parameters() if each.requires_grad]


def copy_moments(shards: Sequence[Shard], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copy the shards' state to host memory under the keys of `STATE_FILE`."""
    copies = {}
    for shard in shards:
        # A parameter without gradients so far has no state. Save zeros.
        state = optimizer.state.get(shard.master) or _zero_state(optimizer, shard.master)
        for field in filter(state.__contains__, _FIELDS):
            part = state[field].detach().flatten()[shard.offset : shard.offset + shard.size]
            copies[f"{field}/{shard.begin}/{shard.name}"] = part.to("cpu", copy=True)
        step = torch.as_tensor(state.get(_STEP, 0.0), dtype=torch.float32).detach()
        copies[f"{_STEP}/{shard.begin}/{shard.name}"] = step.reshape(1).to("cpu", copy=True)
    return copies


def restore_moments(
    folder: Path, shards: Sequence[Shard], optimizer: torch.optim.Optimizer, *, names: Collection[str]
) -> None:
    """Read the shards' state from the files of all ranks, however it was sharded when saved.

    `names`: trained parameters of all ranks. Raises CheckpointError.
    """
    with ExitStack() as files:
        pieces = _find_pieces(folder, files)
        if differing := sorted(pieces[_STEP].keys() ^ set(names)):
            raise CheckpointError(
                f"{folder} must hold the optimizer state of this model, got the state of another model: "
                f"{differing[0]} is trained in only one of them (1 of {len(differing)} differences); resume with the "
                "model of the checkpoint, or start a new run."
            )
        for master in {id(shard.master): shard.master for shard in shards}.values():
            optimizer.state[master] = _zero_state(optimizer, master)
        for shard in shards:
            state = optimizer.state[shard.master]
            for field in filter(state.__contains__, _FIELDS):
                flat = state[field].view(-1)[shard.offset : shard.offset + shard.size]
                num_read = sum(_read_overlap(piece, shard, into=flat) for piece in pieces[field][shard.name])
                if num_read != len(flat):
                    raise CheckpointError(
                        f"{folder} must hold each element of {shard.name} once, got {num_read} of {len(flat)} from "
                        f"element {shard.begin} in {field}: restore the files of all ranks, or start a new run."
                    )
            # A flat tensor has one count. Parameters without gradients may lag.
            counts = [float(piece.file.get_tensor(piece.key)) for piece in pieces[_STEP][shard.name]]
            newest = max([float(state[_STEP]), *counts])
            state[_STEP] = int(newest) if isinstance(state[_STEP], int) else torch.full_like(state[_STEP], newest)


class _Piece(NamedTuple):
    file: Any
    key: str
    begin: int
    size: int


def _find_pieces(folder: Path, files: ExitStack) -> dict[str, dict[str, list[_Piece]]]:
    """Stored pieces by field and parameter. `files` closes them."""
    pieces: dict[str, dict[str, list[_Piece]]] = {field: defaultdict(list) for field in (*_FIELDS, _STEP)}
    for path in sorted(folder.glob(STATE_FILE.format("*"))):
        try:
            file = files.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} must be a readable part of a checkpoint, got {error}") from error
        for key in file.keys():  # noqa: SIM118
            field, _, rest = key.partition("/")
            begin, _, name = rest.partition("/")
            if field not in pieces or not name:
                raise CheckpointError(
                    f"{path} must hold moments by parameter, got {key}: the checkpoint predates resuming with a "
                    f"different number of ranks or engine; start a new run with model.path={folder / 'model'}."
                )
            (size,) = file.get_slice(key).get_shape()
            pieces[field][name].append(_Piece(file, key, int(begin), size))
    return pieces


def _read_overlap(piece: _Piece, shard: Shard, *, into: Tensor) -> int:
    """Copy the shared elements and return their number."""
    first, end = max(piece.begin, shard.begin), min(piece.begin + piece.size, shard.begin + shard.size)
    if first >= end:
        return 0
    stored = piece.file.get_slice(piece.key)[first - piece.begin : end - piece.begin]
    into[first - shard.begin : end - shard.begin].copy_(stored)
    return end - first


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file. Raises CheckpointError."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} must be a readable part of a checkpoint, got {error}") from error
