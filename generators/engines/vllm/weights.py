"""Weight updates inside vLLM's worker processes.

`register` is the entry point `vllm.general_plugins`, which vLLM calls in each of its processes.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import OpenEpoch, Update
from slipstream.broker.weights import buckets
from slipstream.broker.weights.collective import CollectiveReceiver
from slipstream.broker.weights.process_group import device_name
from slipstream.broker.weights.shared_buckets import map_buckets
from slipstream.generators.engines.vllm.adapter import first_adapter_mismatch, load_adapter, serve_adapters_of_gpt2
from slipstream.generators.engines.vllm.health import report_fatal_errors
from slipstream.generators.engines.vllm.patches import record_routed_experts, serve_images_without_torchvision
from slipstream.generators.engines.vllm.verify import RecordedLoad

BACKEND = "slipstream"
"""Name in vLLM's registry of weight transfer engines."""
_ANSWER_BYTES = 16384
"""Size of the first worker's message to the others."""
_MAX_ERROR_LENGTH = 2000
VLLM_PROCESSES = ("EngineCore", "VllmWorker")
"""Name prefixes of vLLM's processes."""


def register() -> None:
    """Register `BACKEND`. Make vLLM's processes exit with their parent and report fatal errors."""
    # vLLM may call the entry point twice per process, and raises ValueError for a registered name.
    with suppress(ValueError):
        WeightTransferEngineFactory.register_engine(BACKEND, BroadcastWeights)
    serve_images_without_torchvision()
    if multiprocessing.current_process().name.startswith(VLLM_PROCESSES):
        die_with_parent()
        report_fatal_errors()
        serve_adapters_of_gpt2()
        if current_platform.is_cpu():
            record_routed_experts()


# --- parent watch ----------------------------------------------------------------------------------------------------
def die_with_parent() -> None:
    """Kill this process when its multiprocessing parent ends."""
    # vLLM's engine process would not notice that its parent was killed. PR_SET_PDEATHSIG would fire when the *thread*
    # that started the process ends, which may be much earlier.
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_kill_at_parent_exit, args=(parent.sentinel,), name="parent-watch", daemon=True).start()


def _kill_at_parent_exit(sentinel: int) -> None:
    # The sentinel pipe becomes ready when the parent ends. No deadline, because this thread has no other purpose.
    connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


# --- weight updates --------------------------------------------------------------------------------------------------
@dataclass
class EpochInfo(WeightTransferInitInfo):
    """Argument of `init_transfer_engine`."""

    opening: dict[str, Any]
    """An OpenEpoch as builtins, which vLLM can serialize."""
    rank: int
    """Rank in the weight group. The learner has rank 0."""


@dataclass
class BroadcastInfo(WeightTransferUpdateInfo):
    """Argument of `receive_weights`."""

    update: dict[str, Any]
    """An Update as builtins."""
    fetched_path: str = ""
    """Shared memory with fetched buckets; empty = broadcast."""
    tied: list[list[str]] = field(default_factory=list)
    """CheckpointNames.tied; a tensor is sent under its first name."""
    lora: dict[str, Any] = field(default_factory=dict)
    """Adapter settings; empty = the model's weights."""
    rejection: str = ""
    """Reason not to load an intact update; empty = load it."""


class BroadcastWeights(WeightTransferEngine[EpochInfo, BroadcastInfo]):
    """Receives and verifies all bytes of an update before it changes the model.

    Reports errors through `pop_outcome`: if several workers raised, vLLM would read only the first error, and mistake
    the second for the answer to the next call.
    Invariant: only `finish_weight_update` and `update_adapter` write to the model, after an error-free transfer.
    """

    init_info_cls = EpochInfo
    update_info_cls = BroadcastInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        receiver = CollectiveReceiver(device=self.device)
        self._is_split = self.parallel_config.world_size > 1
        self._receiver = SharedReceiver(receiver, device=self.device) if self._is_split else receiver
        self._received: list[tuple[str, Tensor]] = []
        self._error = ""
        self._is_model_changed = False
        self._uncompared: list[str] = []

    def pop_outcome(self) -> tuple[str, bool, list[str]]:
        """Return and reset the last error (empty = none), whether the model changed, and the names of tensors that
        could not be compared."""
        outcome = self._error, self._is_model_changed, self._uncompared
        self._error, self._is_model_changed, self._uncompared = "", False, []
        return outcome

    def init_transfer_engine(self, init_info: EpochInfo) -> None:
        with self._recording_errors():
            self._receiver.open_epoch(msgspec.convert(init_info.opening, OpenEpoch), rank=init_info.rank)

    def start_weight_update(self) -> None:
        self._received = []

    def receive_weights(self, update_info: BroadcastInfo) -> None:
        """Receives even a rejected update, because the broadcast needs every member."""
        with self._recording_errors():
            tensors = self._receive(update_info)
            if update_info.rejection:
                raise WeightTransferError(update_info.rejection)
            self._received = [*tensors, *self._tied(dict(tensors), update_info.tied)]

    def finish_weight_update(self) -> None:
        received, self._received = self._received, []
        if not received:
            return
        self._is_model_changed = True
        with self._recording_errors():
            load = self._load(received)
            if name := load.first_mismatch(received):
                raise WeightTransferError(f"the engine must hold {name} as sent, but it holds different values")
            held = dict(self.model.named_parameters())
            # With pipeline parallelism, other workers hold some of the layers.
            is_whole = self.parallel_config.pipeline_parallel_size == 1
            self._uncompared = [name for name in load.uncompared if is_whole or name in held]

    def update_adapter(self, update_info: BroadcastInfo) -> None:
        """Receive, verify, and load an adapter. vLLM's update calls would empty the slot."""
        self.start_weight_update()
        self.receive_weights(update_info)
        received, self._received = self._received, []
        if not received:
            return
        self._is_model_changed = True
        with self._recording_errors():
            load_adapter(self.model, received, settings=update_info.lora)
            mismatch = first_adapter_mismatch(self.model, received, settings=update_info.lora)
            # A split model holds slices of the tensors, which only the probe checks.
            if mismatch and not self._is_split:
                raise WeightTransferError(
                    f"vLLM must hold {mismatch} as sent, but it holds different values or nothing"
                )

    def shutdown(self) -> None:
        self._receiver.close()

    def _receive(self, info: BroadcastInfo) -> list[tuple[str, Tensor]]:
        update = msgspec.convert(info.update, Update)
        if info.fetched_path:
            # Fetched once per generator, mapped by all its workers.
            return buckets.unpack_verified(map_buckets(info.fetched_path, sizes=update.bucket_bytes), update)
        return self._receiver.receive(update)

    def _tied(self, sent: dict[str, Tensor], tied: list[list[str]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tied tensors for layers with a separate copy, such as the packed head of vLLM's CPU build."""
        # `named_modules` lists a shared layer once, so it omits a head that is the embedding itself.
        own = {f"{path}.{name}" for path, layer in self.model.named_modules() for name in layer._parameters}
        for first, *others in tied:
            yield from ((name, sent[first]) for name in others if name in own)

    def _load(self, tensors: list[tuple[str, Tensor]]) -> RecordedLoad:
        """Raises WeightTransferError if the model reports that it did not load all parameters."""
        if self.device.type == "cpu":
            # vLLM 0.32 repacks experts for the CPU only when it builds their kernel.
            for layer in self.model.modules():
                method: Any = getattr(layer, "quant_method", None)
                if hasattr(method, "moe_kernel"):
                    method.moe_kernel = None
        initialize_layerwise_reload(self.model)
        # The load adds parameters that vLLM derives from others.
        loadable = {name for name, _ in self.model.named_parameters()}
        load = RecordedLoad(self.model)
        try:
            with load:
                loaded = self.model.load_weights(tensors)
        except Exception as error:
            # A loader may raise anything. The engine stays alive but unverified until an update succeeds.
            raise WeightTransferError(f"the engine could not load it: {type(error).__name__}: {error}") from error
        finally:
            finalize_layerwise_reload(self.model, self.model_config)
        # Quantized models have parameters that are never sent. Some models report nothing.
        is_reported = loaded is not None and self.model_config.quantization is None
        if stale := sorted(loadable - loaded) if is_reported else []:
            raise WeightTransferError(
                f"every parameter of the engine must be loaded, {stale[0]} and {len(stale) - 1} more kept their old "
                "values"
            )
        return load

    @contextmanager
    def _recording_errors(self) -> Iterator[None]:
        try:
            yield
        except WeightTransferError as error:
            self._error = str(error)


class OutcomeReport:
    """Mixin of vLLM's worker class, so that `collective_rpc` can call BroadcastWeights."""

    def weight_device(self) -> str:
        return device_name(self.weight_transfer_engine.device)  # type: ignore[attr-defined]

    def pop_weight_outcome(self) -> tuple[str, bool, list[str]]:
        return self.weight_transfer_engine.pop_outcome()  # type: ignore[attr-defined]

    def update_adapter(self, update_info: dict[str, Any]) -> None:
        self.weight_transfer_engine.update_adapter(BroadcastInfo(**update_info))  # type: ignore[attr-defined]


class SharedReceiver:
    """Represents all workers of an engine as one member of the weight group. Implements WeightReceiver.

    The first worker receives and verifies in host memory, which the others map, so that an update needs GPU memory only
    for the layer being loaded. Every worker must make the same calls, and gets the first worker's errors.
    """

    def __init__(self, receiver: CollectiveReceiver, *, device: torch.device) -> None:
        self._receiver = receiver
        self._is_pinned = device.type == "cuda"
        self._mapped: list[Tensor] = []
        self._mapping: tuple[int, list[int]] | None = None

    def open_epoch(self, opening: OpenEpoch, *, rank: int) -> None:
        self._run_on_first(lambda: self._receiver.open_epoch(opening, rank=rank))

    def receive(self, update: Update) -> list[tuple[str, Tensor]]:
        path = self._run_on_first(lambda: self._receiver.receive(update))
        if held := self._receiver.staging:
            return buckets.unpack(held.tensors, update.slots)
        mapping = Path(path).stat().st_ino, update.bucket_bytes
        if mapping != self._mapping:
            mapped = map_buckets(path, sizes=update.bucket_bytes, is_pinned=self._is_pinned)
            self._mapped, self._mapping = mapped, mapping
        return buckets.unpack(self._mapped, update.slots)

    def close(self) -> None:
        self._receiver.close()
        self._mapped, self._mapping = [], None

    def _run_on_first(self, action: Callable[[], object]) -> str:
        """Run on the first worker. Returns its memory's path, or raises WeightTransferError, on every worker."""
        group = get_world_group()
        path, error = "", ""
        if group.is_first_rank:
            try:
                action()
                path = self._receiver.staging.path if self._receiver.staging else ""
            except WeightTransferError as caught:
                error = str(caught)[:_MAX_ERROR_LENGTH]
        answer = torch.zeros(_ANSWER_BYTES, dtype=torch.uint8)
        encoded = msgspec.json.encode((path, error)).ljust(_ANSWER_BYTES)
        answer.copy_(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))
        dist.broadcast(answer, src=group.first_rank, group=group.cpu_group)
        path, error = msgspec.json.decode(answer.numpy().tobytes(), type=tuple[str, str])
        if error:
            raise WeightTransferError(error)
        return path
