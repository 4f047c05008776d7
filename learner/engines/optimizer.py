"""Optimizers of the training engines: construction, learning-rate schedule, and saved state."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from slipstream.broker.weights.checkpoint_names import CheckpointNames, NamedTensors
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
        """Parameters, tied ones once."""

    @property
    def saved_names(self) -> CheckpointNames:
        """Tensor names in saved models, with any adapter merged in."""

    @property
    def saved_dtype(self) -> torch.dtype:
        """Dtype of most tensors in saved models."""

    def to_saved(self, tensors: NamedTensors, rest: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Convert all unsharded weights to saved ones, and add what `save_rest` writes to `rest`."""

    def save_rest(self, folder: Path, rest: dict[str, Tensor]) -> None:
        """Write weights with their own file into the folder of a saved model."""


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
    """Yield parameters and persistent buffers by name, tied ones under each."""
    yield from module.state_dict(keep_vars=True).items()


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for some parameters and AdamW for others, as one optimizer."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        # The parts' own dicts, so that a new learning rate reaches them.
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._parts = parts
        for part in parts:
            part.state = self.state

    def step(self, closure: Any = None) -> None:
        for part in self._parts:
            part.step()


def make_masters(module: nn.Module) -> dict[int, nn.Parameter]:
    """`id` of each trained parameter below float32 -> its master, a float32 copy that the optimizer updates.

    A bfloat16 weight, with 8 significant bits, would lose updates smaller than 1/512 of it.
    """
    trained = [each for each in module.parameters() if each.requires_grad and each.dtype != torch.float32]
    return {id(each): nn.Parameter(each.detach().float()) for each in trained}


def update_masters(optimizer: torch.optim.Optimizer, module: nn.Module, masters: Mapping[int, nn.Parameter]) -> None:
    """Make each step move gradients to masters, and round updated masters into the parameters."""
    pairs = [(each, masters[id(each)]) for each in module.parameters() if id(each) in masters]

    def widen(*_: Any) -> None:
        for parameter, master in pairs:
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None

    @torch.no_grad()
    def narrow(*_: Any) -> None:
        for parameter, master in pairs:
            parameter.copy_(master)
            master.grad = None

    optimizer.register_step_pre_hook(widen)
    optimizer.register_step_post_hook(narrow)


def make_optimizer(
    module: nn.Module, config: OptimizerConfig, *, masters: Mapping[int, nn.Parameter] = MappingProxyType({})
) -> torch.optim.Optimizer:
    """Optimizer over trainable parameters or their masters. One-dimensional ones (norms and biases) do not decay.

    Muon: M = 0.95 M + 0.05 G, W -= lr (0.2 sqrt(max(rows, columns)) NewtonSchulz5(0.95 M + 0.05 G) + weight_decay W)

    Source: Jordan, https://kellerjordan.github.io/posts/muon; the scale, at which AdamW's learning rates fit:
    Moonlight, arXiv:2502.16982, eq. 4.
    """
    trained = [masters.get(id(each), each) for each in module.parameters() if each.requires_grad]
    matrices_of_layers = hidden_matrices(module) if config.name == "muon" else set()
    hidden = {id(masters[each]) if each in masters else each for each in matrices_of_layers}
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


STATE_FILE = "optimizer-rank-{}.safetensors"
"""A rank's share of trained weights and moments, [elements], and `step`, the number of updates, float32[1]; 0 for Muon.

Keys are `<field>/<first element>/<parameter>`. Float32; with `adamw_8bit` uint8, and float32 `absmax` of blocks.
"""
WEIGHTS_FILE = "weights-rank-{}.safetensors"
"""A rank's share of weights that are not trained, in their dtype, under keys as in `STATE_FILE`."""
_STEP, _WEIGHT = "step", "weight"
_ADAMW, _MUON = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)
_EIGHT_BITS = ("state1", "state2", "absmax1", "absmax2")
_FIELDS = (*_ADAMW, *_MUON, *_EIGHT_BITS)


def _zero_state(optimizer: torch.optim.Optimizer, master: Tensor) -> dict[str, Any]:
    """State of a tensor before the first update."""
    if init := getattr(optimizer, "init_state", None):  # of bitsandbytes
        optimizer.state.pop(master, None)
        init(optimizer.param_groups[0], master, -1, -1)
        return optimizer.state[master]
    moved = [each for group in optimizer.param_groups if "momentum" in group for each in group["params"]]
    is_muon = any(each is master for each in moved)
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

    def of(self, tensor: Tensor) -> Tensor:
        """View of the shard in a tensor with the shape of `master`."""
        return tensor.detach().view(-1)[self.offset : self.offset + self.size]


def trained_names(model: Trainable) -> dict[int, str]:
    """`id` of each trained parameter -> its name, or the first name of a tied one."""
    names = dict[int, str]()
    for name, parameter in model.weights():
        names.setdefault(id(parameter), name)
    return {id(each): names[id(each)] for each in model.parameters() if each.requires_grad}


def copy_weights(shards: Sequence[Shard]) -> dict[str, Tensor]:
    """Copy the shards' weights to host memory under the keys of `STATE_FILE`."""
    return {f"{_WEIGHT}/{shard.begin}/{shard.name}": shard.of(shard.master).to("cpu", copy=True) for shard in shards}


def copy_shards(shards: Sequence[Shard], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Like `copy_weights`, with moments."""
    copies = copy_weights(shards)
    for shard in shards:
        # Without gradients so far, a parameter has no state.
        state = optimizer.state.get(shard.master) or _zero_state(optimizer, shard.master)
        for field in filter(state.__contains__, _FIELDS):
            copies[f"{field}/{shard.begin}/{shard.name}"] = shard.of(state[field]).to("cpu", copy=True)
        step = torch.as_tensor(state.get(_STEP, 0.0), dtype=torch.float32).detach()
        copies[f"{_STEP}/{shard.begin}/{shard.name}"] = step.reshape(1).to("cpu", copy=True)
    return copies


def restore_weights(folder: Path, shards: Sequence[Shard], *, pattern: str = WEIGHTS_FILE) -> None:
    """Read the shards' weights from the files of all ranks, sharded in any way. Raises CheckpointError."""
    with ExitStack() as files:
        pieces = _find_pieces(folder, files, pattern=pattern)[_WEIGHT]
        for shard in shards:
            _read_shard(pieces[shard.name], shard, into=shard.of(shard.master), what=f"{folder}: {_WEIGHT}")


def restore_shards(
    folder: Path, shards: Sequence[Shard], optimizer: torch.optim.Optimizer, *, names: Collection[str]
) -> None:
    """Like `restore_weights`, with moments. `names`: trained parameters of all ranks. Raises CheckpointError."""
    with ExitStack() as files:
        pieces = _find_pieces(folder, files, pattern=STATE_FILE)
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
            fields = {_WEIGHT: shard.master} | {field: state[field] for field in _FIELDS if field in state}
            for field, tensor in fields.items():
                _read_shard(pieces[field][shard.name], shard, into=shard.of(tensor), what=f"{folder}: {field}")
            # One count per flat tensor. Parameters without gradients may lag.
            counts = [float(piece.file.get_tensor(piece.key)) for piece in pieces[_STEP][shard.name]]
            newest = max([float(state[_STEP]), *counts])
            state[_STEP] = int(newest) if isinstance(state[_STEP], int) else torch.full_like(state[_STEP], newest)


class _Piece(NamedTuple):
    file: Any
    key: str
    begin: int
    size: int


def _find_pieces(folder: Path, files: ExitStack, *, pattern: str) -> dict[str, dict[str, list[_Piece]]]:
    """Stored pieces by field and parameter. `files` closes them."""
    pieces: dict[str, dict[str, list[_Piece]]] = {field: defaultdict(list) for field in (*_FIELDS, _STEP, _WEIGHT)}
    for path in sorted(folder.glob(pattern.format("*"))):
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


def _read_shard(pieces: Sequence[_Piece], shard: Shard, *, into: Tensor, what: str) -> None:
    """Fill `into`, [size], from stored pieces. Raises CheckpointError."""
    num_read = 0
    for piece in pieces:
        first, end = max(piece.begin, shard.begin), min(piece.begin + piece.size, shard.begin + shard.size)
        if first < end:
            stored = piece.file.get_slice(piece.key)[first - piece.begin : end - piece.begin]
            into[first - shard.begin : end - shard.begin].copy_(stored)
            num_read += end - first
    if num_read != shard.size:
        raise CheckpointError(
            f"{what} must hold each element of {shard.name} once, got {num_read} of {shard.size} from element "
            f"{shard.begin}: restore the files of all ranks, or start a new run with model.path set to the "
            "checkpoint's model."
        )


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file. Raises CheckpointError."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} must be a readable part of a checkpoint, got {error}") from error
