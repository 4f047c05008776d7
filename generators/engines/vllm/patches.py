"""Patches of vLLM: images in prompts, the folder of temporary files, and recording of routed experts on CPUs."""

import importlib
import os
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
from vllm.inputs import MultiModalInput, mm_input
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange
from vllm.multimodal.processing.context import InputProcessingContext
from vllm.outputs import RequestOutput
from vllm.v1.executor import multiproc_executor, uniproc_executor

from slipstream.generators.errors import EngineError
from slipstream.runtime.images import PromptImage, VisionModel
from slipstream.runtime.model_files import VISION_FAMILIES

_PACKAGE = "transformers.models.qwen2_vl"
SOCKETS, SOCKETS_PREFIX = "VLLM_RPC_BASE_PATH", "slipstream-vllm-"
"""Folder for Unix sockets, which vLLM does not remove."""


def image_input(
    token_ids: list[int], images: Sequence[PromptImage], *, vision: VisionModel, salt: str
) -> MultiModalInput:
    """Build what vLLM's processor would build, from token ids with expanded image tokens.

    `salt`: separates cache entries of different weights.
    """
    patches = [torch.from_numpy(vision.patches(image.data)) for image in images]
    inputs: Any = {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor([image.grid for image in images])}
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
    """vLLM arguments for a vision model that receives normalized patches."""
    return {
        "limit_mm_per_prompt": {"video": 0},
        "mm_device_do_normalize": False,
        # vLLM's encoder cache suffices.
        "mm_processor_cache_gb": 0,
        # On a CPU, vLLM does not measure memory at startup.
        "skip_mm_profiling": is_cpu,
    }


def serve_images_without_torchvision() -> None:
    """Make vLLM use transformers' PIL image processor if torchvision is missing."""
    name = f"{_PACKAGE}.image_processing_qwen2_vl"
    if find_spec("torchvision") or name in sys.modules:
        return
    # vLLM imports this module, which imports torchvision.
    sys.modules[name] = _PilModule(name)
    original = InputProcessingContext.get_hf_processor

    def get_hf_processor(self: Any, *arguments: Any, **settings: Any) -> Any:
        if self.model_config.hf_config.model_type not in VISION_FAMILIES:
            return original(self, *arguments, **settings)
        pil = importlib.import_module(f"{_PACKAGE}.image_processing_pil_qwen2_vl")
        made = pil.Qwen2VLImageProcessorPil.from_pretrained(self.model_config.model)
        # vLLM needs only these attributes, because requests contain finished patches.
        kwargs = importlib.import_module(f"{_PACKAGE}.processing_qwen2_vl").Qwen2VLProcessorKwargs
        return SimpleNamespace(image_processor=made, video_processor=made, valid_processor_kwargs=kwargs)

    InputProcessingContext.get_hf_processor = get_hf_processor


class _PilModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        pil = importlib.import_module(f"{_PACKAGE}.image_processing_pil_qwen2_vl")
        return getattr(pil, name) if hasattr(pil, name) else getattr(pil, f"{name}Pil")


def select_experts(output: RequestOutput, *, layers: Sequence[int]) -> np.ndarray | None:
    """`Completion.experts` of these layers. None without layers.

    Raises EngineError unless vLLM returned a row for each token except the last.
    """
    if not layers:
        return None
    rows = output.outputs[0].routed_experts
    num_tokens = len(output.prompt_token_ids or ()) + len(output.outputs[0].token_ids) - 1
    if rows is None or len(rows) != num_tokens:
        got = "none" if rows is None else len(rows)
        raise EngineError(f"vLLM must return the experts of {num_tokens} tokens, got {got}")
    return rows[:, list(layers)].astype(np.uint8 if rows.dtype == np.uint8 else np.int16)


def meet_in_own_folder() -> None:
    """Make ranks meet through a file in the folder of their sockets, which is removed after a killed engine."""
    for executor in (uniproc_executor, multiproc_executor):
        executor.get_file_store_init_method = lambda: f"file://{envs.VLLM_RPC_BASE_PATH}/vllm_dist_{uuid4().hex}"


def remove_sockets() -> None:
    """Remove the folder of this engine's sockets. Idempotent."""
    folder = Path(os.environ.get(SOCKETS, ""))
    if folder.name.startswith(SOCKETS_PREFIX):
        del os.environ[SOCKETS]
        shutil.rmtree(folder, ignore_errors=True)


def record_routed_experts() -> None:
    """Make CPU workers record routed experts, as GPU workers do."""
    # Local import, because it needs libraries of the CPU build.
    from vllm.v1.worker import cpu_worker

    # This rejects all but the GPU model runner.
    VllmConfig._verify_aux_output_compatibility = lambda self: None

    class Runner(cpu_worker.CPUModelRunner):
        _connector: Any = None
        _pending: Any = None

        def initialize_kv_cache(self, kv_cache_config: Any, is_profiling: bool = False, **options: Any) -> None:
            super().initialize_kv_cache(kv_cache_config, is_profiling, **options)
            if self.vllm_config.aux_output_config.enabled and not is_profiling:
                self._connector = get_aux_output_connector(self.model, self.vllm_config, kv_cache_config)

        def execute_model(self, scheduler_output: Any, *arguments: Any) -> Any:
            if self._connector:
                self._connector.begin_step(scheduler_output.aux_output_connector_metadata)
            output = super().execute_model(scheduler_output, *arguments)
            if self._connector and scheduler_output.total_num_scheduled_tokens:
                request_ids = list(self.input_batch.req_ids)
                # Copies, because the runner reuses its arrays for the next step.
                batch = SimpleNamespace(
                    req_ids=request_ids,
                    query_start_loc_np=self.query_start_loc.np[: len(request_ids) + 1].copy(),
                    num_computed_tokens_np=self.input_batch.num_computed_tokens_cpu[: len(request_ids)].copy(),
                )
                self._pending = self._connector.prepare_output(batch)
            return output

        def sample_tokens(self, *arguments: Any) -> Any:
            output = super().sample_tokens(*arguments)
            pending, self._pending = self._pending, None
            if pending:
                sampled = np.array([len(token_ids) for token_ids in output.sampled_token_ids])
                pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
                output.aux_output_connector_output = pending.process_output()
            return output

    cpu_worker.CPUModelRunner = Runner
