"""Images of prompts in vLLM: requests that carry them, and vLLM's models of the Qwen-VL type without torchvision."""

import importlib
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from vllm.inputs import MultiModalInput, mm_input
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange
from vllm.multimodal.processing.context import InputProcessingContext

from slipstream.runtime.images import FAMILIES, PromptImage, VisionModel

_PACKAGE = "transformers.models.qwen2_vl"


def image_input(
    token_ids: list[int], images: Sequence[PromptImage], *, vision: VisionModel, salt: str
) -> MultiModalInput:
    """A request as vLLM's own processor would make it, from tokens that are expanded already.

    `salt` keeps apart what was cached under other weights: states of images as well as of tokens.
    """
    patches = [torch.from_numpy(vision.patches(image.data)) for image in images]
    inputs: Any = {
        "pixel_values": torch.cat(patches),
        "image_grid_thw": torch.tensor([image.grid for image in images]),
    }
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", torch.tensor([len(each) for each in patches])),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    return mm_input(
        token_ids,
        MultiModalKwargsItems.from_hf_inputs(inputs, fields),
        {"image": [f"{image.id}-{salt}" for image in images]},
        {"image": [PlaceholderRange(offset=image.first_token, length=image.num_tokens) for image in images]},
        cache_salt=salt,
    )


def image_arguments(*, is_cpu: bool) -> dict[str, Any]:
    """vLLM's arguments for a model that is given images: it gets patches that are normalised already."""
    return {
        "limit_mm_per_prompt": {"video": 0},
        "mm_device_do_normalize": False,
        # Kept by content in vLLM's encoder cache alone; a second copy of all patches would serve nobody.
        "mm_processor_cache_gb": 0,
        # On a CPU memory is not measured at the start.
        "skip_mm_profiling": is_cpu,
    }


def serve_images_without_torchvision() -> None:
    """Give vLLM transformers' PIL image processor, where torchvision is missing; videos are not served then."""
    name = f"{_PACKAGE}.image_processing_qwen2_vl"
    # vLLM may call the entry point twice in a process.
    if find_spec("torchvision") or name in sys.modules:
        return
    # vLLM imports this module, which imports torchvision.
    sys.modules[name] = _PilModule(name)
    original = InputProcessingContext.get_hf_processor

    def get_hf_processor(self: Any, *arguments: Any, **settings: Any) -> Any:
        if self.model_config.hf_config.model_type not in FAMILIES:
            return original(self, *arguments, **settings)
        pil = importlib.import_module(f"{_PACKAGE}.image_processing_pil_qwen2_vl")
        made = pil.Qwen2VLImageProcessorPil.from_pretrained(self.model_config.model)
        # What vLLM asks of a processor at its start; requests come with patches that are made already.
        kwargs = importlib.import_module(f"{_PACKAGE}.processing_qwen2_vl").Qwen2VLProcessorKwargs
        return SimpleNamespace(image_processor=made, video_processor=made, valid_processor_kwargs=kwargs)

    InputProcessingContext.get_hf_processor = get_hf_processor


class _PilModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        pil = importlib.import_module(f"{_PACKAGE}.image_processing_pil_qwen2_vl")
        return getattr(pil, name) if hasattr(pil, name) else getattr(pil, f"{name}Pil")
