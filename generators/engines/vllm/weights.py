"""Weight updates in vLLM's workers: a version is loaded into a second copy of the model while requests are decoded, and
replaces the current one between two steps. A LoRA adapter is replaced in vLLM's slot.

`register` is the entry point `vllm.general_plugins`, which vLLM calls in each of its processes.
"""

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from multiprocessing import connection
from queue import Empty, Full, Queue
from typing import Any, get_args

import msgspec
import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.config.lora import MaxLoRARanks
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
from vllm.platforms import current_platform

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import TensorSlot
from slipstream.broker.weights import buckets
from slipstream.broker.weights.shared_buckets import BucketMaps
from slipstream.configs.base import Record
from slipstream.configs.data import LoraConfig
from slipstream.generators.engines.vllm.health import report_fatal_errors
from slipstream.generators.engines.vllm.patches import (
    meet_in_own_folder,
    record_routed_experts,
    remove_sockets,
    serve_images_without_torchvision,
)
from slipstream.generators.engines.vllm.verify import (
    CHECK_TIMEOUT_S,
    Check,
    RecordedLoad,
    kernels_not_compared,
    resolve,
    run_now,
)
from slipstream.generators.errors import EngineError
from slipstream.runtime.routers import find_routers

VLLM_PROCESSES = ("EngineCore", "VllmWorker")
"""Name prefixes of vLLM's processes."""
_CHECKS_AHEAD = 4
_CHECK_S = 0.002
_PARTS = 8
"""Updates after the first over which all kernels are compared."""


def register() -> None:
    """Make vLLM's processes exit with their parent and report fatal errors."""
    serve_images_without_torchvision()
    if multiprocessing.current_process().name.startswith(VLLM_PROCESSES):
        die_with_parent()
        report_fatal_errors()
        serve_adapters_of_gpt2()
        meet_in_own_folder()
        if current_platform.is_cpu():
            record_routed_experts()


# --- parent watch ----------------------------------------------------------------------------------------------------
def die_with_parent() -> None:
    """Kill this process when its multiprocessing parent ends."""
    # PR_SET_PDEATHSIG would fire when the *thread* that started the process ends, which may be much earlier.
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_kill_at_parent_exit, args=(parent.sentinel,), name="parent-watch", daemon=True).start()


def _kill_at_parent_exit(sentinel: int) -> None:
    connection.wait([sentinel])  # ready when the parent ends
    remove_sockets()
    os.kill(os.getpid(), signal.SIGKILL)


# --- weight updates --------------------------------------------------------------------------------------------------
class LoadOrder(Record):
    """A version in shared memory. Example: LoadOrder("/proc/17/fd/9", [4096], slots=[...])."""

    path: str
    bucket_bytes: list[int]
    slots: list[TensorSlot]
    tied: list[list[str]] = []
    """CheckpointNames.tied; a tensor is sent under its first name."""
    lora: dict[str, Any] = {}
    """Adapter settings; empty = the model's weights."""


class Outcome(Record):
    """Result of a phase in one worker."""

    error: str = ""
    uncompared: list[str] = []
    """Tensors that could not be compared."""
    seconds: dict[str, float] = {}
    """Durations of the parts."""


class ModelVersions:
    """The model that decodes and, where possible, a second copy for the next version.

    Life cycle: (prepare -> switch)*. An error of `prepare` leaves the model unchanged. Without a second copy, `switch`
    loads.
    """

    def __init__(self, worker: Any) -> None:
        self.model: nn.Module = worker.model_runner.get_model()
        self._config = worker.vllm_config
        self._device: torch.device = worker.device
        self._maps = BucketMaps(is_pinned=self._device.type == "cuda")
        self.checks = KernelChecks()
        self._second: nn.Module | None = None
        self._received: list[tuple[str, Tensor]] = []
        self._lora: dict[str, Any] = {}
        self._is_loaded = False
        self._num_loaded = 0

    def prepare(self, order: LoadOrder) -> Outcome:
        """Load and compare a version in the second copy. Runs in a thread while the model decodes."""
        trim_heap()
        started_at, seconds, uncompared = time.perf_counter(), dict[str, float](), list[str]()
        self._received, self._is_loaded, self._lora = [], False, order.lora
        self.checks = KernelChecks()
        try:
            tensors = buckets.unpack(self._maps.get(order.path, sizes=order.bucket_bytes), order.slots)
            sent = dict(tensors)
            # Tied tensors for layers with a separate copy, such as a packed head. `named_modules` lists a shared layer
            # once: not a head that is the embedding itself.
            own = {f"{path}.{name}" for path, layer in self.model.named_modules() for name in layer._parameters}
            copied = [(name, sent[first]) for first, *others in order.tied for name in others if name in own]
            received = [*tensors, *copied]
            seconds["map"] = time.perf_counter() - started_at
            if not order.lora and self._has_room_for_two():
                self._second = self._second or second_copy(self.model)
                uncompared = self._load(self._second, received, seconds)
                self._is_loaded = True
        except WeightTransferError as error:
            return Outcome(str(error), seconds=seconds)
        finally:
            trim_heap()
        self._received = received
        return Outcome("", uncompared, seconds)

    def switch(self) -> Outcome:
        """Exchange the models, or load the prepared version. Must run between two steps."""
        started_at, seconds, uncompared = time.perf_counter(), dict[str, float](), list[str]()
        received, self._received = self._received, []
        try:
            if self._is_loaded and self._second:
                exchange(self.model, self._second)
            elif self._lora:
                load_adapter(self.model, received, settings=self._lora)
                mismatch = first_adapter_mismatch(self.model, received, settings=self._lora)
                # Only the probe checks slices of a split model.
                if mismatch and self._config.parallel_config.world_size == 1:
                    must = f"vLLM must hold {mismatch} as sent"
                    raise WeightTransferError(f"{must}, but it holds different values or nothing")
            else:
                uncompared = self._load(self.model, received, seconds)
        except WeightTransferError as error:
            return Outcome(str(error), seconds=seconds)
        return Outcome("", uncompared, seconds | {"switch": time.perf_counter() - started_at})

    def _has_room_for_two(self) -> bool:
        """Whether a second copy is possible: compiled graphs refer to the first one's memory, a GPU has no room, and
        some layers share state derived from their weights."""
        is_possible = self._device.type == "cpu" and self._config.model_config.enforce_eager
        layers = self.model.modules()
        return is_possible and not any(isinstance(one, MLAAttention) or _has_kernel_of_experts(one) for one in layers)

    def _load(self, model: nn.Module, received: list[tuple[str, Tensor]], seconds: dict[str, float]) -> list[str]:
        """Returns the tensors that could not be compared. Raises WeightTransferError."""
        started_at = time.perf_counter()
        with set_current_vllm_config(self._config):
            load = self._load_recorded(model, received)
            seconds["load"] = time.perf_counter() - started_at
            # The first version is compared fully, and later ones in parts.
            is_paused, part = model is self.model, (self._num_loaded, _PARTS if self._num_loaded else 1)
            run = run_now if is_paused else self.checks.run
            mismatch = load.first_mismatch(received, run=run, part=part, is_sampled=is_paused)
            self._num_loaded += 1
        seconds["compare"] = time.perf_counter() - started_at - seconds["load"]
        if mismatch:
            raise WeightTransferError(f"the engine must hold {mismatch} as sent, but it holds different values")
        if self._config.parallel_config.pipeline_parallel_size == 1:
            return load.uncompared
        # Other workers hold some of the layers.
        held = dict(model.named_parameters())
        return [name for name in load.uncompared if name in held]

    def _load_recorded(self, model: nn.Module, tensors: list[tuple[str, Tensor]]) -> RecordedLoad:
        """Raises WeightTransferError if parameters are not loaded."""
        if self._device.type == "cpu":
            # vLLM 0.32 repacks experts for the CPU only when it builds their kernel.
            for layer in filter(_has_kernel_of_experts, model.modules()):
                layer.quant_method.moe_kernel = None
        initialize_layerwise_reload(model)
        # The load adds parameters that vLLM derives from others.
        loadable = {name for name, _ in model.named_parameters()}
        load = RecordedLoad(model)
        try:
            with load:
                loaded: Any = model.load_weights(tensors)
        except Exception as error:
            # A loader may raise anything.
            raise WeightTransferError(f"the engine could not load it: {type(error).__name__}: {error}") from error
        finally:
            finalize_layerwise_reload(model, self._config.model_config)
        # Quantized models have parameters that are never sent. Some models report nothing.
        is_reported = loaded is not None and self._config.model_config.quantization is None
        if stale := sorted(loadable - loaded) if is_reported else []:
            missed = f"{stale[0]} and {len(stale) - 1} more kept their old values"
            raise WeightTransferError(f"every parameter of the engine must be loaded, {missed}")
        return load


class KernelChecks:
    """Queue from the loading to the decoding thread, because only one thread may run vLLM's CPU kernels: they share
    memory between calls."""

    def __init__(self) -> None:
        # Bounded, because each check holds a packed layer.
        self._waiting: Queue[tuple[Check, Future[bool]]] = Queue(maxsize=_CHECKS_AHEAD)

    def run(self, check: Check) -> "Future[bool]":
        """Queue a check. Raises WeightTransferError if the decoding thread runs none."""
        checked: Future[bool] = Future()
        try:
            self._waiting.put((check, checked), timeout=CHECK_TIMEOUT_S)
        except Full:
            raise kernels_not_compared() from None
        return checked

    def run_waiting(self) -> None:
        """Run queued checks for a few milliseconds, between two steps."""
        ends_at = time.perf_counter() + _CHECK_S
        while time.perf_counter() < ends_at:
            try:
                check, checked = self._waiting.get_nowait()
            except Empty:
                return
            resolve(checked, check)


def trim_heap() -> None:
    """Return freed memory to the system. glibc would keep it in the arenas of threads: starting vLLM and preparing a
    version leave as much as two models of 135M parameters."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def second_copy(model: nn.Module) -> nn.Module:
    """Copy the modules and tensors of a model; everything else, such as KV caches, is shared."""
    tensors: dict[int, Tensor | None] = {}

    def copied(tensor: Tensor | None) -> Tensor | None:
        if tensor is not None and id(tensor) not in tensors:
            made = tensor.data.clone()
            made.__class__, made.__dict__ = tensor.__class__, tensor.__dict__.copy()
            tensors[id(tensor)] = made
        return tensors.get(id(tensor))

    copies = {module: object.__new__(type(module)) for module in model.modules()}
    for module, made in copies.items():
        state = vars(module) | {"_modules": {name: child and copies[child] for name, child in module._modules.items()}}
        for kind in ("_parameters", "_buffers"):
            state[kind] = {name: copied(tensor) for name, tensor in state[kind].items()}
        state["_non_persistent_buffers_set"] = set(module._non_persistent_buffers_set)
        made.__dict__.update(state)
        known, own = get_layerwise_info(module), get_layerwise_info(made)
        parameters, held = known.restore_metadata
        own.restore_device = known.restore_device
        own.restore_metadata = (
            {name: to_meta_tensor(each) for name, each in parameters.items()},
            {name: to_meta_tensor(each) for name, each in held.items()},
        )
    return copies[model]


def exchange(model: nn.Module, second: nn.Module) -> None:
    """Exchange the tensors and kernels of two copies of a model."""
    for one, other in zip(list(model.modules()), list(second.modules()), strict=True):
        ours, theirs = vars(one), vars(other)
        # vLLM refers to the layers of the first model by identity.
        ours["_modules"], theirs["_modules"] = theirs["_modules"], ours["_modules"]
        object.__setattr__(one, "__dict__", theirs)
        object.__setattr__(other, "__dict__", ours)


def _has_kernel_of_experts(layer: nn.Module) -> bool:
    return hasattr(getattr(layer, "quant_method", None), "moe_kernel")


class WeightWorker:
    """Mixin of vLLM's worker class, for `collective_rpc`."""

    _versions: ModelVersions | None = None
    _preparing: "Future[Outcome] | None" = None

    def prepare_weights(self, order: bytes) -> None:
        """Start to prepare the version in a thread."""
        if self._preparing and not self._preparing.done():
            raise RuntimeError("the engine must have loaded the previous version before the next, it has not")
        self._versions = self._versions or ModelVersions(self)
        decoded, prepared = msgspec.msgpack.decode(order, type=LoadOrder), Future[Outcome]()
        self._preparing = prepared
        arguments = prepared, self._versions.prepare, decoded
        threading.Thread(target=resolve, args=arguments, name="prepare-weights", daemon=True).start()

    def pop_prepared(self) -> dict[str, Any] | None:
        """Return the Outcome of `prepare_weights` as builtins; None until it ends."""
        assert self._versions is not None, "prepare_weights comes first"
        assert self._preparing is not None, "prepare_weights comes first"
        self._versions.checks.run_waiting()
        return msgspec.to_builtins(self._preparing.result()) if self._preparing.done() else None

    def switch_weights(self) -> dict[str, Any]:
        assert self._versions is not None, "prepare_weights comes first"
        return msgspec.to_builtins(self._versions.switch())


ADAPTER = LoRARequest("policy", 1, lora_path="updated in memory")
"""The run's adapter. Its path is never read."""


def lora_arguments(lora: LoraConfig | None, *, targets: Sequence[str]) -> dict[str, Any]:
    """vLLM arguments for an adapter slot, if any, in the layers `targets`."""
    if lora is None:
        return {}
    rank = next(rank for rank in get_args(MaxLoRARanks) if rank >= lora.rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank, "lora_target_modules": list(targets)}


def check_adapter_fits(module: Any) -> None:
    """Raise EngineError for a mixture-of-experts model on a CPU."""
    if current_platform.is_cpu() and find_routers(module):
        raise EngineError(
            f"model.lora must be null for a mixture of experts on a CPU, got {type(module).__name__}: vLLM does not "
            "combine experts with adapters on CPUs"
        )


def adapter_settings(lora: LoraConfig | None) -> dict[str, Any]:
    """Settings in peft's format; empty without an adapter."""
    return {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": []} if lora else {}


def load_adapter(model: Any, tensors: Sequence[tuple[str, Tensor]], *, settings: dict[str, Any]) -> None:
    """Replace the adapter in the slot. Raises WeightTransferError for any error in vLLM."""
    # Local imports, because vLLM's LoRA layers take most of a second.
    from vllm.lora.lora_model import LoRAModel

    if current_platform.is_cpu():
        multiply_by_one_adapter()
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


def multiply_by_one_adapter() -> None:
    """Replace vLLM's CPU kernels, which copy the adapter's matrices for every token: all tokens use the only slot."""
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    def shrink(_: Any, out: Tensor, inputs: Tensor, first: Tensor, scale: float) -> None:
        out[:, : first.shape[-2]] = scale * nn.functional.linear(inputs.to(out), first[0, 0].to(out))

    def expand(_: Any, out: Tensor, inputs: Tensor, second: Tensor, start: int, size: int, add_inputs: bool) -> None:
        part, product = out[:, start : start + size], nn.functional.linear(inputs.to(out), second[0, 0].to(out))
        part.add_(product) if add_inputs else part.copy_(product)

    PunicaWrapperCPU._apply_shrink, PunicaWrapperCPU._apply_expand = shrink, expand


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
