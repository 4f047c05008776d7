"""DeepSpeedEngine: ZeRO stages 0 to 3 on CPUs (Gloo) or GPUs (NCCL). The only module that imports `deepspeed`."""

import contextlib
import logging
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from slipstream.configs.learner import DeepSpeedEngineConfig, OptimizerConfig, TorchEngineConfig
from slipstream.learner.batching.microbatch import Microbatch
from slipstream.learner.engines.engine import M, ModelEngine, TrainEngine, check_grad_norm
from slipstream.learner.engines.optimizer import (
    Shard,
    copy_moments,
    make_optimizer,
    restore_moments,
    set_learning_rate,
    trained_names,
    whole_shards,
)
from slipstream.learner.errors import TrainEngineError
from slipstream.learner.ranks import Ranks
from slipstream.runtime.routers import EXPERT_MATRICES

_GATHER_BYTES = 256 * 1024 * 1024
"""Parameters that ZeRO-3 gathers at once for export and import."""
BUCKET_ELEMENTS = 50_000_000
"""Elements that ZeRO reduces or gathers at once, and the size of its gradient buffer."""


# --- DeepSpeed's configuration ---------------------------------------------------------------------------------------
def deepspeed_environment(device: torch.device) -> dict[str, str]:
    """Environment variables that `deepspeed` reads on import."""
    return {"DS_ACCELERATOR": device.type, "LOCAL_RANK": str(device.index or 0)}


def deepspeed_config(
    config: DeepSpeedEngineConfig, *, num_ranks: int, optimizer: OptimizerConfig | None = None
) -> dict[str, Any]:
    """Configuration for `deepspeed.initialize`."""
    zero: dict[str, Any] = {
        "stage": config.zero_stage,
        "overlap_comm": False,
        "contiguous_gradients": True,
        "reduce_bucket_size": BUCKET_ELEMENTS,
        "allgather_bucket_size": BUCKET_ELEMENTS,
    }
    if config.offload_parameters:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    if config.offload_optimizer and optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": 1,
        # Microbatches vary in number, so `step` always ends the update.
        "gradient_accumulation_steps": 1,
        "train_batch_size": num_ranks,
        "managed_gradient_accumulation": False,
        # At stage 0 DeepSpeed does not report the norm, so an optimizer hook clips instead.
        "gradient_clipping": (optimizer.max_grad_norm or 0.0) if optimizer and config.zero_stage else 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }


@contextlib.contextmanager
def sharded_loading(config: DeepSpeedEngineConfig | TorchEngineConfig, *, ranks: Ranks) -> Iterator[None]:
    """Make transformers load models directly into ZeRO-3 shards. No-op below ZeRO-3. Collective."""
    if not isinstance(config, DeepSpeedEngineConfig) or config.zero_stage < 3:
        yield
        return
    _import_deepspeed(ranks.device).init_distributed(dist_init_required=False)
    # Imports DeepSpeed, which needs its environment variables.
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    # transformers keeps only a weak reference, and loads whole models if it is collected.
    settings = HfDeepSpeedConfig(deepspeed_config(config, num_ranks=ranks.size))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        unset_hf_deepspeed_config()
        del settings


# --- the engine ------------------------------------------------------------------------------------------------------
class ShardedModel(ModelEngine[M]):
    """ModelEngine on DeepSpeed. Requires the process group from `slipstream.learner.ranks`."""

    def __init__(
        self,
        model: M,
        *,
        config: DeepSpeedEngineConfig,
        ranks: Ranks,
        optimizer: OptimizerConfig | None = None,
        adamw: torch.optim.Optimizer | None = None,
    ) -> None:
        self._deepspeed = _import_deepspeed(ranks.device)
        self.model = model
        self._ranks = ranks
        self._stage = config.zero_stage
        if config.offload_activations:
            _keep_inputs_on_host(model)
        settings = deepspeed_config(config, optimizer=optimizer, num_ranks=ranks.size)
        with contextlib.redirect_stdout(sys.stderr):
            self._engine: Any = self._deepspeed.initialize(
                model=model, optimizer=adamw, config=settings, dist_init_required=False
            )[0]
        self._comm_dtypes = dict.fromkeys(self._lossless_in_compute_dtype(), model.compute_dtype)
        """Sharded parameter -> dtype that ZeRO-3 gathers for computation."""
        _set_comm_dtypes(self._comm_dtypes)

    def forward(self, microbatch: Microbatch, **options: Any) -> dict[str, Tensor]:
        return self._engine(microbatch, **options)

    def gather_parameters(self, *, is_whole: bool = False) -> Iterator[tuple[str, Tensor]]:
        for bucket in _buckets(self.model.weights(is_whole=is_whole)):
            with self._gathered([parameter for _, parameter in bucket]):
                whole = [(name, parameter.detach()) for name, parameter in bucket]
                # ZeRO-3 frees gathered memory when the context ends.
                yield from [(name, tensor.clone() if self._stage == 3 else tensor) for name, tensor in whole]

    def held_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.model.weights():
            if hasattr(tensor, "ds_tensor"):
                # The shards of the last ranks are padded with uninitialized memory.
                begin = self._ranks.rank * tensor.partition_numel()
                yield name, tensor.ds_tensor[: max(0, tensor.ds_numel - begin)]
            else:
                yield name, tensor

    @torch.no_grad()
    def load_parameters(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        # All ranks must consume the iterator, which may be collective. ZeRO-3 distributes rank 0's values.
        is_copied = self._stage < 3 or self._ranks.is_first
        given = {name: tensor if is_copied else None for name, tensor in tensors}
        for bucket in _buckets(self.model.weights()):
            with self._gathered([parameter for _, parameter in bucket], modifier_rank=0):
                for name, parameter in bucket:
                    if is_copied:
                        parameter.copy_(given[name])

    @contextlib.contextmanager
    def _gathered(self, parameters: list[Tensor], *, modifier_rank: int | None = None) -> Iterator[None]:
        """Unshard the parameters, and distribute the changes of `modifier_rank`."""
        if self._stage < 3:
            yield
            return
        unique = list({id(parameter): parameter for parameter in parameters}.values())
        # Export and import in full precision.
        _set_comm_dtypes(dict.fromkeys(self._comm_dtypes))
        try:
            with self._deepspeed.zero.GatheredParameters(unique, modifier_rank=modifier_rank):
                yield
        finally:
            _set_comm_dtypes(self._comm_dtypes)

    def _lossless_in_compute_dtype(self) -> list[nn.Parameter]:
        """Weights of linear layers and experts, which autocast rounds anyway: gathering them rounded halves traffic.

        Excludes biases, which ZeRO-3 adds in float32, and small weights, which stay gathered and would be exported
        rounded.
        """
        if self._stage < 3 or self.model.compute_dtype == torch.float32:
            return []
        parts = list(self.model.backbone.modules())
        linear = [part for part in parts if type(part) is nn.Linear and part is not getattr(parts[0], "score", None)]
        experts = [
            parameter
            for part in parts
            for name, parameter in part.named_parameters(recurse=False)
            if name in EXPERT_MATRICES and len(parameter.ds_shape) == 3
        ]
        users = Counter(each for part in parts for each in part.parameters(recurse=False))
        rounded = [*(part.weight for part in linear), *experts]
        return [weight for weight in rounded if users[weight] == 1 and not weight.ds_persist]


class DeepSpeedEngine(ShardedModel[M], TrainEngine[M]):
    """TrainEngine on DeepSpeed."""

    def __init__(
        self,
        model: M,
        *,
        config: DeepSpeedEngineConfig,
        optimizer: OptimizerConfig,
        ranks: Ranks,
        setting: str = "learner.optimizer",
    ) -> None:
        """`setting`: config section of `optimizer`, for errors."""
        self.device = ranks.device
        self.optimizer = make_optimizer(model, optimizer)
        self._setting = setting
        self._max_grad_norm = optimizer.max_grad_norm or math.inf
        self._grad_norm = 0.0
        if not config.zero_stage:
            self.optimizer.register_step_pre_hook(self._clip)
        super().__init__(model, config=config, ranks=ranks, optimizer=optimizer, adamw=self.optimizer)

    def backward(self, loss: Tensor) -> None:
        # DeepSpeed averages gradients over ranks, but losses add up.
        self._engine.backward(loss * self._ranks.size)

    def step(self, *, learning_rate: float) -> float:
        set_learning_rate(self.optimizer, learning_rate)
        self._engine.step()
        norm = self._engine.get_global_grad_norm() if self._stage else self._grad_norm
        return check_grad_norm(float(norm), setting=self._setting)

    def copy_state(self) -> dict[str, Tensor]:
        shards = self._shards()
        # At stage 0 every rank holds all shards and writes its share.
        return copy_moments(shards if self._stage else shards[self._ranks.rank :: self._ranks.size], self.optimizer)

    def restore_state(self, folder: Path, *, weights: dict[str, Tensor]) -> None:
        self.load_parameters(weights.items())
        if self._stage:
            # The optimizer updates copies of the parameters.
            self._engine.optimizer.refresh_fp32_params()
        restore_moments(folder, self._shards(), self.optimizer, names=trained_names(self.model).values())

    def _shards(self) -> list[Shard]:
        """Slices that AdamW updates on this rank."""
        if not self._stage:
            return whole_shards(self.model)
        names, zero, shards = trained_names(self.model), self._engine.optimizer, list[Shard]()
        if self._stage < 3:
            for group, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
                for parameter in group:
                    # Ranks split the flat tensor evenly, also within parameters. None: not on this rank.
                    if held := parameter._hp_mapping:
                        part, within = held.lp_fragment_address, held.hp_fragment_address
                        shards.append(Shard(names[id(parameter)], part.start, part.numel, flat, within.start))
            return shards
        for group, flat in zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True):
            offset = 0
            for parameter in group:
                # Ranks split each parameter evenly, with padding at the end.
                length = parameter.partition_numel()
                begin = self._ranks.rank * length
                if (size := min(length, parameter.ds_numel - begin)) > 0:
                    shards.append(Shard(names[id(parameter)], begin, size, flat, offset))
                offset += length
        return shards

    def _clip(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Optimizer pre-step hook of stage 0, after the reduction over ranks."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self._max_grad_norm)
        self._grad_norm = check_grad_norm(norm.item(), setting=self._setting)


def _set_comm_dtypes(dtypes: Mapping[nn.Parameter, torch.dtype | None]) -> None:
    """Set the dtype that ZeRO-3 gathers per parameter, None for its own."""
    for parameter, dtype in dtypes.items():
        if dtype is None:
            vars(parameter).pop("comm_dtype", None)
        else:
            vars(parameter)["comm_dtype"] = dtype


def _keep_inputs_on_host(model: nn.Module) -> None:
    """Keep the inputs of checkpointed layers in host memory until the backward pass."""

    def recompute(function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        # Only the inputs move: tensors saved inside the function go to the hooks of `checkpoint`.
        with save_on_cpu(pin_memory=torch.cuda.is_available()):
            return checkpoint(function, *inputs, use_reentrant=False, **options)

    for part in model.modules():
        if hasattr(part, "_gradient_checkpointing_func"):
            part._gradient_checkpointing_func = recompute


def _buckets(parameters: Iterator[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, parameter in parameters:
        num_bytes = getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()
        if bucket and size + num_bytes > _GATHER_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, parameter))
        size += num_bytes
    if bucket:
        yield bucket


def _import_deepspeed(device: torch.device) -> ModuleType:
    expected = deepspeed_environment(device)
    found = {name: os.environ.get(name, "unset") for name in expected}
    if found != expected:
        raise TrainEngineError(
            f"the environment must hold {expected} before DeepSpeed starts on {device}, got {found}: "
            "start the learner with `python -m slipstream.learner` or set it."
        )
    try:
        with contextlib.redirect_stdout(sys.stderr):
            import deepspeed
            import deepspeed.ops
    except ImportError as error:
        raise TrainEngineError(
            f"learner/engine=deepspeed needs an importable deepspeed, got {error}: install the `cpu` or `gpu` extra, "
            "or use learner/engine=torch."
        ) from error
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.WARNING)
    for handler in logger.handlers:
        if type(handler) is logging.StreamHandler:  # subclasses may write elsewhere
            handler.setStream(sys.stderr)
    # With an empty table of buildable ops, DeepSpeed uses Gloo on CPUs. Otherwise its first start compiles an op that
    # only inference uses (45 s, needs g++).
    vars(deepspeed.ops)["__compatible_ops__"] = {}
    return deepspeed
