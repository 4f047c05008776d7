"""DeepSpeedEngine: ZeRO stages 0 to 3 on CPUs (Gloo) or GPUs (NCCL). The only module that imports `deepspeed`."""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from slipstream.configs.learner import DeepSpeedEngineConfig, OptimizerConfig, TorchEngineConfig
from slipstream.learner.batching.microbatch import Microbatch
from slipstream.learner.engines.engine import M, ModelEngine, TrainEngine, check_grad_norm
from slipstream.learner.engines.optimizer import Shard, copy_shards, copy_weights, set_learning_rate, trained_names
from slipstream.learner.errors import TrainEngineError
from slipstream.learner.ranks import Ranks

_GATHER_BYTES = 256 * 1024 * 1024
"""Parameters that ZeRO-3 gathers at once for export and import."""
BUCKET_ELEMENTS = 50_000_000
"""Elements that ZeRO reduces or gathers at once, and of its gradient buffer."""


def deepspeed_environment(device: torch.device) -> dict[str, str]:
    """Environment variables that `deepspeed` reads on import."""
    return {"DS_ACCELERATOR": device.type, "LOCAL_RANK": str(device.index or 0)}


def deepspeed_config(
    config: DeepSpeedEngineConfig, *, num_ranks: int, dtype: torch.dtype, optimizer: OptimizerConfig | None = None
) -> dict[str, Any]:
    """Configuration for `deepspeed.initialize`. `dtype`: of the model's weights."""
    zero: dict[str, Any] = {
        "stage": config.zero_stage,
        # Doubles the gradient buffer at ZeRO-2. ZeRO-1 and 0 reduce once per step.
        "overlap_comm": config.zero_stage == 3,
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
        # At stage 0 DeepSpeed reports no norm, so an optimizer hook clips.
        "gradient_clipping": (optimizer.max_grad_norm or 0.0) if optimizer and config.zero_stage else 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        # With ZeRO: float32 masters of bfloat16 weights. Its check would skip steps silently.
        "bf16": {"enabled": bool(config.zero_stage) and dtype == torch.bfloat16, "check_grad_overflow": False},
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }


@contextlib.contextmanager
def sharded_loading(
    config: DeepSpeedEngineConfig | TorchEngineConfig, *, ranks: Ranks, dtype: torch.dtype
) -> Iterator[None]:
    """Make transformers load ZeRO-3 shards of a dtype. No-op below ZeRO-3. Collective."""
    if not isinstance(config, DeepSpeedEngineConfig) or config.zero_stage < 3:
        yield
        return
    _import_deepspeed(ranks.device).init_distributed(dist_init_required=False)
    # Imports DeepSpeed, which needs its environment variables.
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    # transformers keeps a weak reference, and loads whole models without it.
    settings = HfDeepSpeedConfig(deepspeed_config(config, num_ranks=ranks.size, dtype=dtype))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        unset_hf_deepspeed_config()
        del settings


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
        self.is_sharded = self._stage == 3
        settings = deepspeed_config(config, optimizer=optimizer, num_ranks=ranks.size, dtype=model.compute_dtype)
        with contextlib.redirect_stdout(sys.stderr):
            options = {"model": model, "optimizer": adamw, "config": settings, "dist_init_required": False}
            self._engine: Any = self._deepspeed.initialize(**options)[0]

    def forward(self, microbatch: Microbatch, **options: Any) -> dict[str, Tensor]:
        return self._engine(microbatch, **options)

    def gather_parameters(self, *, is_whole: bool = False) -> Iterator[tuple[str, Tensor]]:
        if not self.is_sharded:
            yield from super().gather_parameters(is_whole=is_whole)
            return
        for bucket in _buckets(self.model.weights(is_whole=is_whole)):
            unique = list({id(parameter): parameter for _, parameter in bucket}.values())
            with self._deepspeed.zero.GatheredParameters(unique):
                # ZeRO-3 frees gathered memory when the context ends.
                yield from [(name, parameter.detach().clone()) for name, parameter in bucket]

    def copy_weights(self, ranks: Ranks) -> dict[str, Tensor]:
        # Every rank has all buffers.
        own = [each for each in self._held_shards() if hasattr(each.master, "ds_numel") or ranks.is_first]
        return copy_weights(own) if self.is_sharded else super().copy_weights(ranks)

    def _held_shards(self) -> list[Shard]:
        """This rank's parts of ZeRO-3 parameters, without uninitialized padding at the end; other tensors whole."""
        shards = []
        for shard in super()._held_shards():
            if hasattr(parameter := shard.master, "ds_tensor"):
                length = parameter.partition_numel()
                begin = self._ranks.rank * length
                size = max(0, min(length, parameter.ds_numel - begin))
                shard = Shard(shard.name, begin, size, parameter.ds_tensor, 0)
            shards.append(shard)
        return shards

    def _refresh(self) -> None:
        # Small parameters stay gathered.
        kept = [each for each in self.model.parameters() if getattr(each, "ds_persist", False)]
        if kept:
            kept[0].partition(kept)
            kept[0].all_gather(kept)


class DeepSpeedEngine(ShardedModel[M], TrainEngine[M]):
    """TrainEngine whose model and optimizer are DeepSpeed's."""

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
        self.device, self.model = ranks.device, model
        self._set_optimizer(optimizer, setting=setting, is_zero=bool(config.zero_stage))
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
        return copy_shards(shards if self._stage else shards[self._ranks.rank :: self._ranks.size], self.optimizer)

    def _shards(self) -> list[Shard]:
        if not self._stage:
            return super()._shards()
        names, zero, shards = trained_names(self.model), self._engine.optimizer, list[Shard]()
        if self._stage < 3:
            for group, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
                for parameter in group:
                    # Ranks split the flat tensor, also within parameters. None: not on this rank.
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


def _keep_inputs_on_host(model: nn.Module) -> None:
    """Keep inputs of checkpointed layers in host memory."""

    def recompute(function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        # Only inputs move: the hooks of `checkpoint` get tensors saved inside.
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
    # Without buildable ops, DeepSpeed uses Gloo on CPUs. Otherwise its first start compiles an op for inference (45 s,
    # needs g++).
    vars(deepspeed.ops)["__compatible_ops__"] = {}
    return deepspeed
