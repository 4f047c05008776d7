"""DeepSpeedEngine: DeepSpeed with ZeRO 0 to 3, on CPUs (Gloo) or GPUs (NCCL). The door to `deepspeed`."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Generic

import torch
from torch import Tensor, nn

from slipstream.configs.learner import DeepSpeedEngineConfig, OptimizerConfig
from slipstream.learner.batching.microbatch import Microbatch
from slipstream.learner.engines.engine import M, check_grad_norm
from slipstream.learner.engines.optimizer import make_optimizer, restore_optimizer, save_optimizer, set_learning_rate
from slipstream.learner.errors import TrainEngineError
from slipstream.learner.ranks import Ranks


# @@ DeepSpeed's own configuration, made from ours, and the environment it reads when it is imported.
def deepspeed_environment(device: torch.device) -> dict[str, str]:
    """Variables that must be set before `deepspeed` is imported for the first time.

    They choose the accelerator and this rank's place on the machine; nothing is compiled at start.
    """
    return {"DS_ACCELERATOR": device.type, "LOCAL_RANK": str(device.index or 0)}


def deepspeed_config(config: DeepSpeedEngineConfig, *, optimizer: OptimizerConfig, num_ranks: int) -> dict[str, Any]:
    """What `deepspeed.initialize` is given.

    Accumulation is ours: `step` is the boundary whatever the number of microbatches, and DeepSpeed averages over ranks.
    """
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": num_ranks,
        "managed_gradient_accumulation": False,
        # At stage 0 DeepSpeed clips without telling the norm; there a hook of the optimizer clips.
        "gradient_clipping": optimizer.max_grad_norm if config.zero_stage else 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": _zero(config),
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }


def _zero(config: DeepSpeedEngineConfig) -> dict[str, Any]:
    section: dict[str, Any] = {"stage": config.zero_stage, "overlap_comm": False, "contiguous_gradients": True}
    if config.offload_optimizer:
        section["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return section


_GATHER_BYTES = 256 * 1024 * 1024


class DeepSpeedEngine(Generic[M]):
    """See TrainEngine. The default process group of torch.distributed must exist (see `slipstream.learner.ranks`)."""

    def __init__(
        self,
        model: M,
        *,
        config: DeepSpeedEngineConfig,
        optimizer: OptimizerConfig,
        device: torch.device,
        ranks: Ranks,
        setting: str = "learner.optimizer",
    ) -> None:
        """`setting`: where `optimizer` stands in the config."""
        self._deepspeed = _import_deepspeed(device)
        self._model = model
        self._device = device
        self._ranks = ranks
        self._stage = config.zero_stage
        self._setting = setting
        self._max_grad_norm = optimizer.max_grad_norm
        self._grad_norm = 0.0
        self._adamw = make_optimizer(model, optimizer)
        self._engine = self._initialize(deepspeed_config(config, optimizer=optimizer, num_ranks=ranks.size))

    def _initialize(self, settings: dict[str, Any]) -> Any:
        if not self._stage:
            self._adamw.register_step_pre_hook(self._clip)
        with contextlib.redirect_stdout(sys.stderr):
            engine, *_ = self._deepspeed.initialize(
                model=self._model, optimizer=self._adamw, config=settings, dist_init_required=False
            )
        return engine

    @property
    def model(self) -> M:
        """What is trained."""
        return self._model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """See TrainEngine."""
        return self._adamw

    @property
    def device(self) -> torch.device:
        """Where microbatches must be."""
        return self._device

    def forward(self, microbatch: Microbatch, **asked: Any) -> dict[str, Tensor]:
        """See TrainEngine."""
        return self._engine(microbatch, **asked)

    def backward(self, loss: Tensor) -> None:
        """See TrainEngine."""
        # DeepSpeed averages gradients over ranks; ours are parts of one sum.
        self._engine.backward(loss * self._ranks.size)

    def step(self, *, learning_rate: float) -> float:
        """See TrainEngine."""
        set_learning_rate(self._adamw, learning_rate)
        self._engine.step()
        norm = self._engine.get_global_grad_norm() if self._stage else self._grad_norm
        return check_grad_norm(float(norm), setting=self._setting)

    def gather_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """See TrainEngine."""
        for bucket in _buckets(self._model.weights()):
            with self._whole([parameter for _, parameter in bucket]):
                yield from [(name, self._read(parameter)) for name, parameter in bucket]

    def save_state(self, folder: Path) -> None:
        """See TrainEngine."""
        save_optimizer(folder / self._state_file, self._masters(), self._adamw)

    def restore_state(self, folder: Path, *, weights: dict[str, Tensor]) -> None:
        """See TrainEngine."""
        for bucket in _buckets(self._model.weights()):
            with self._whole([parameter for _, parameter in bucket], modifier_rank=0), torch.no_grad():
                for name, parameter in bucket:
                    parameter.copy_(weights[name])
        restore_optimizer(folder / self._state_file, self._masters(), self._adamw)

    @property
    def _state_file(self) -> str:
        return f"optimizer-rank-{self._ranks.rank}.safetensors"

    def _masters(self) -> list[Tensor]:
        """The tensors AdamW moves on this rank: whole parameters, or this rank's flat pieces of them."""
        if not self._stage:
            return [parameter for group in self._adamw.param_groups for parameter in group["params"]]
        zero = self._engine.optimizer
        return zero.fp32_partitioned_groups_flat if self._stage == 3 else zero.single_partition_of_fp32_groups

    def _clip(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Runs before AdamW moves anything, after gradients were averaged over ranks."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self._max_grad_norm)
        self._grad_norm = check_grad_norm(norm.item(), setting=self._setting)

    def _whole(self, parameters: list[nn.Parameter], *, modifier_rank: int | None = None) -> Any:
        """Within it the parameters are complete on this rank."""
        if self._stage < 3:
            return contextlib.nullcontext()
        unique = list({id(parameter): parameter for parameter in parameters}.values())
        return self._deepspeed.zero.GatheredParameters(unique, modifier_rank=modifier_rank)

    def _read(self, parameter: nn.Parameter) -> Tensor:
        whole = parameter.detach()
        return whole.clone() if self._stage == 3 else whole


def _buckets(
    parameters: Iterator[tuple[str, nn.Parameter]], *, max_bytes: int = _GATHER_BYTES
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    bucket: list[tuple[str, nn.Parameter]] = []
    size = 0
    for name, parameter in parameters:
        num_bytes = getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()
        if bucket and size + num_bytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, parameter))
        size += num_bytes
    if bucket:
        yield bucket


def _import_deepspeed(device: torch.device) -> ModuleType:
    wanted = deepspeed_environment(device)
    chosen = {name: os.environ.get(name, "unset") for name in wanted}
    if chosen != wanted:
        raise TrainEngineError(
            f"the environment must hold {wanted} before DeepSpeed starts on {device}, got {chosen}: "
            "start the learner with `python -m learner` or set it."
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
    _send_logs_to_stderr()
    _skip_shared_memory_op(deepspeed.ops)
    return deepspeed


def _send_logs_to_stderr() -> None:
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.WARNING)
    for handler in logger.handlers:
        if type(handler) is logging.StreamHandler:  # not a subclass that writes to a stream of its own
            handler.setStream(sys.stderr)


def _skip_shared_memory_op(ops: ModuleType) -> None:
    """On CPUs DeepSpeed compiles a C++ op at its first start (45 s, needs g++), which only its inference uses.

    It asks this table whether the op can be built; an empty table says no and Gloo is used, as in training anyway.
    """
    vars(ops)["__compatible_ops__"] = {}
