"""Weight updates inside vLLM's worker process: the far end of `VllmEngine.update`.

`register` is the entry point `vllm.general_plugins`: vLLM calls it in each of its processes.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

import msgspec
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import OpenEpoch
from slipstream.broker.weights import buckets
from slipstream.broker.weights.collective import CollectiveReceiver
from slipstream.broker.weights.records import TensorSlot
from slipstream.broker.weights.shared_buckets import map_buckets
from slipstream.generators.engines.vllm.tensor_parallel import TensorParallelReceiver
from slipstream.generators.engines.vllm.verify import first_stale, first_unlike, kernels
from slipstream.generators.engines.weight_layout import check_tied


# @@ parent_watch: a process that multiprocessing started ends with the process that started it.
#
# vLLM's engine process does not notice that its parent was killed. The kernel's own signal for that (PR_SET_PDEATHSIG) is
# tied to the thread that started the process, which may end long before; so a thread of ours waits instead.
def die_with_parent() -> None:
    """Start the watch; does nothing in a process that multiprocessing did not start."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        thread = threading.Thread(target=_wait_and_die, args=(parent.sentinel,), name="parent-watch", daemon=True)
        thread.start()


def _wait_and_die(sentinel: int) -> None:
    # The sentinel is a pipe whose other end lives in the parent alone: it is ready when the parent is gone. There is no
    # deadline, because waiting for that moment is all this thread is for.
    connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


BACKEND = "slipstream"
"""Name in vLLM's registry of weight transfer engines."""
VLLM_PROCESSES = ("EngineCore", "VllmWorker")
"""How the names of vLLM's processes begin."""


def register() -> None:
    """Make `BACKEND` known to this process; a process that vLLM started is also made to die with its parent."""
    with suppress(ValueError):
        WeightTransferEngineFactory.register_engine(BACKEND, BroadcastWeights)
    if multiprocessing.current_process().name.startswith(VLLM_PROCESSES):
        die_with_parent()


@dataclass
class EpochInfo(WeightTransferInitInfo):
    """What `init_transfer_engine` gets."""

    opening: dict[str, Any]
    """An OpenEpoch, as builtins."""
    rank: int
    """This generator's rank."""


@dataclass
class BroadcastInfo(WeightTransferUpdateInfo):
    """What `receive_weights` gets: the fields of Update that describe the bytes."""

    slots: list[Any]
    """TensorSlots, as builtins."""
    bucket_bytes: list[int]
    """Sizes of the buckets."""
    checksums: list[int]
    """xxh3-64 of each."""
    timeout_s: float
    """For each bucket."""
    fetched_paths: list[str] = field(default_factory=list)
    """Of the buckets, where this generator has fetched them; none: they are broadcast."""
    tied: list[list[str]] = field(default_factory=list)
    """See WeightLayout.tied."""
    fault: str = ""
    """Why this update must not be loaded, whatever arrives; empty: it may be."""


class BroadcastWeights(WeightTransferEngine[EpochInfo, BroadcastInfo]):
    """Receives all bytes and verifies them before the model is touched.

    What fails is told through `take_outcome`, not raised: when several workers answer a call with an error, vLLM
    reads the first answer alone and takes the second one for the answer to the next call.
    Invariant: only `finish_weight_update` writes to the model, and only after a transfer without a fault.
    """

    init_info_cls = EpochInfo
    update_info_cls = BroadcastInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        receiver = CollectiveReceiver(device=self.device)
        self._is_split = self.parallel_config.tensor_parallel_size > 1
        self._receiver = TensorParallelReceiver(receiver, device=self.device) if self._is_split else receiver
        self._received: list[tuple[str, torch.Tensor]] = []
        self._fault = ""
        self._is_touched = False

    def take_outcome(self) -> tuple[str, bool]:
        """What went wrong since it was last asked (empty: nothing), and whether the model was written to."""
        outcome = self._fault, self._is_touched
        self._fault, self._is_touched = "", False
        return outcome

    def init_transfer_engine(self, init_info: EpochInfo) -> None:
        """Leave the previous weight group, join this one."""
        with self._noting_faults():
            self._receiver.open_epoch(msgspec.convert(init_info.opening, OpenEpoch), rank=init_info.rank)

    def start_weight_update(self) -> None:
        """Nothing yet: the model keeps its weights until all bytes are here."""
        self._received = []

    def receive_weights(self, update_info: BroadcastInfo) -> None:
        """Receive and verify. What must not be loaded is received too: the weight group goes on without a gap."""
        with self._noting_faults():
            tensors = self._receive(update_info, msgspec.convert(update_info.slots, list[TensorSlot]))
            if update_info.fault:
                raise WeightTransferError(update_info.fault)
            check_tied(tensors, update_info.tied)
            self._received = tensors

    def finish_weight_update(self) -> None:
        """Load what was received, if it was. vLLM rebuilds each layer as at the start, packed copies included."""
        received, self._received = self._received, []
        if not received:
            return
        self._is_touched = True
        with self._noting_faults():
            kernels_before = kernels(self.model)
            self._check_loaded(self._load(received))
            if layer := first_stale(self.model, kernels_before):
                raise WeightTransferError(f"every layer must get its kernel anew, {layer} kept the old one")
            self._read_back(received)

    def shutdown(self) -> None:
        """Leave the weight group."""
        self._receiver.close()

    def _receive(self, info: BroadcastInfo, slots: list[TensorSlot]) -> list[tuple[str, torch.Tensor]]:
        if info.fetched_paths:
            return _take_fetched(info, slots)
        return self._receiver.receive(
            slots, bucket_bytes=info.bucket_bytes, checksums=info.checksums, timeout_s=info.timeout_s
        )

    def _load(self, tensors: list[tuple[str, torch.Tensor]]) -> set[str] | None:
        """Returns the parameters that were loaded, where the model tells."""
        initialize_layerwise_reload(self.model)
        try:
            return self.model.load_weights(tensors)
        except Exception as error:
            # Whatever a model's own loader may raise; the engine lives on, unverified, until an update heals it.
            raise WeightTransferError(f"the engine could not load them: {type(error).__name__}: {error}") from error
        finally:
            finalize_layerwise_reload(self.model, self.model_config)

    def _check_loaded(self, loaded: set[str] | None) -> None:
        """vLLM asks the same of a checkpoint. Quantised models keep parameters that never come from outside."""
        if loaded is None or self.model_config.quantization is not None:
            return
        if old := sorted({name for name, _ in self.model.named_parameters()} - loaded):
            raise WeightTransferError(
                f"every parameter of the engine must be loaded, {old[0]} and {len(old) - 1} more kept their old values"
            )

    def _read_back(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        if self._is_split:
            return
        if name := first_unlike(self.model, tensors, packing=getattr(self.model, "packed_modules_mapping", {})):
            raise WeightTransferError(f"the engine must hold {name} as it was sent, it holds something else")

    @contextmanager
    def _noting_faults(self) -> Iterator[None]:
        try:
            yield
        except WeightTransferError as fault:
            self._fault = str(fault)


def _take_fetched(info: BroadcastInfo, slots: list[TensorSlot]) -> list[tuple[str, torch.Tensor]]:
    """Every worker of the engine maps the same memory. Raises WeightTransferError."""
    mapped = map_buckets(info.fetched_paths, sizes=info.bucket_bytes)
    buckets.verify(mapped, expected=info.checksums)
    return buckets.unpack(mapped, slots)


class OutcomeReport:
    """Mixed into vLLM's worker class: one more call that `collective_rpc` may make."""

    def take_weight_outcome(self) -> tuple[str, bool]:
        """See BroadcastWeights.take_outcome."""
        return self.weight_transfer_engine.take_outcome()  # type: ignore[attr-defined]
