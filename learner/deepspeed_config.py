"""DeepSpeed's own configuration, made from ours, and the environment it reads when it is imported."""

from typing import Any

import torch

from configs.learner import DeepSpeedEngineConfig, OptimizerConfig


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
