"""LoRA adapter in vLLM's slot: replaced by every update and compared with the tensors sent."""

from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor
from vllm.config.lora import MaxLoRARanks
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

from slipstream.broker.errors import WeightTransferError
from slipstream.configs.data import LoraConfig
from slipstream.generators.errors import EngineError
from slipstream.runtime.routers import find_routers

ADAPTER = LoRARequest("policy", 1, lora_path="updated in memory")
"""The run's adapter. Its path is never read."""


def lora_arguments(lora: LoraConfig | None, *, targets: Sequence[str]) -> dict[str, Any]:
    """vLLM arguments for an adapter slot, if any, in the layers `targets`."""
    if lora is None:
        return {}
    rank = next(rank for rank in get_args(MaxLoRARanks) if rank >= lora.rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank, "lora_target_modules": list(targets)}


def check_experts(module: Any) -> None:
    """Raise EngineError for a mixture-of-experts model on a CPU."""
    if current_platform.is_cpu() and find_routers(module):
        raise EngineError(
            f"model.lora must be null for a mixture of experts on a CPU, got {type(module).__name__}: vLLM does not "
            "combine experts with adapters on CPUs"
        )


def describe(lora: LoraConfig | None) -> dict[str, Any]:
    """Settings in peft's format; empty without an adapter."""
    return {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": []} if lora else {}


def load_adapter(model: Any, tensors: Sequence[tuple[str, Tensor]], *, settings: dict[str, Any]) -> None:
    """Replace the adapter in the slot. Raises WeightTransferError for any error in vLLM."""
    # Local imports, because vLLM's LoRA layers take most of a second.
    from vllm.lora.lora_model import LoRAModel

    manager = model.lora_manager
    try:
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER.lora_int_id,
            # vLLM scales the second matrix in place, and later deltas need the original.
            {name: tensor.clone() for name, tensor in tensors},
            PEFTHelper.from_dict(settings),
            device=manager.device,
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=_mapper(model),
        )
        manager.remove_adapter(adapter.id)
        manager.add_adapter(adapter)
        manager.activate_adapter(adapter.id)
    except Exception as error:
        raise WeightTransferError(f"vLLM could not load the adapter: {type(error).__name__}: {error}") from error


def first_adapter_mismatch(model: Any, sent: Sequence[tuple[str, Tensor]], *, settings: dict[str, Any]) -> str:
    """Name of the first tensor that differs from the slot's, or empty."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    manager = model.lora_manager
    scaling = PEFTHelper.from_dict(settings).vllm_lora_scaling_factor
    index = manager.lora_index_to_id.index(ADAPTER.lora_int_id)
    packed = {part: (whole, i) for whole, parts in manager.packed_modules.items() for i, part in enumerate(parts)}
    for name, tensor in sent:
        module, is_first = parse_fine_tuned_lora_name(name, _mapper(model))
        whole, part = packed.get(module, (module, 0))
        if (layer := manager.modules.get(whole)) is None:
            return name
        slices = layer.lora_a_stacked if is_first else layer.lora_b_stacked
        # Only the probe checks models with more slices than packed parts.
        if len(slices) == len(manager.packed_modules.get(whole, [module])):
            held = slices[part][index, 0, : tensor.shape[0], : tensor.shape[1]]
            expected = tensor.to(held)
            if not torch.equal(held, expected if is_first or scaling == 1 else expected * scaling):
                return name
    return ""


def serve_adapters_of_gpt2() -> None:
    """Declare GPT-2, the default task's model, as LoRA-capable in vLLM."""
    from vllm.model_executor.models.gpt2 import GPT2LMHeadModel
    from vllm.model_executor.models.interfaces import SupportsLoRA

    defaults = {name: value for name, value in vars(SupportsLoRA).items() if name in SupportsLoRA.__annotations__}
    # Query, key, and value share one adapter, as in the checkpoint.
    for name, value in (defaults | {"packed_modules_mapping": {"c_attn": ["c_attn"]}, "lora_manager": None}).items():
        setattr(GPT2LMHeadModel, name, value)


def _mapper(model: Any) -> Any:
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return mapper and mapper.get_rename_mapper()
