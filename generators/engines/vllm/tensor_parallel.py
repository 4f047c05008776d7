"""TensorParallelReceiver: an engine that spans several workers takes part in the weight group as one.

The first worker receives and verifies; the others get the tensors from it over vLLM's own group, and learn from it when
there is nothing to get.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import OpenEpoch
from slipstream.broker.weights.records import TensorSlot
from slipstream.broker.weights.transport import WeightReceiver


class TensorParallelReceiver:
    """Fulfils WeightReceiver. Every worker of the engine makes the same calls."""

    def __init__(self, receiver: WeightReceiver, *, device: torch.device) -> None:
        self._receiver = receiver
        self._device = device

    def open_epoch(self, opening: OpenEpoch, *, rank: int) -> None:
        """Join the weight group, all or none. Raises WeightTransferError."""
        self._lead(lambda: self._receiver.open_epoch(opening, rank=rank))

    def receive(
        self, slots: list[TensorSlot], *, bucket_bytes: list[int], checksums: list[int], timeout_s: float
    ) -> list[tuple[str, Tensor]]:
        """Receive, verify, share. Raises WeightTransferError on every worker when the first one failed."""
        tensors: list[tuple[str, Tensor]] = []

        def receive() -> None:
            tensors.extend(
                self._receiver.receive(slots, bucket_bytes=bucket_bytes, checksums=checksums, timeout_s=timeout_s)
            )

        self._lead(receive)
        group = get_tp_group()
        if group.is_first_rank:
            tensors = [(name, tensor.to(self._device)) for name, tensor in tensors]
        else:
            tensors = [(slot.name, self._empty(slot)) for slot in slots]
        for _, tensor in tensors:
            dist.broadcast(tensor, src=group.first_rank, group=group.device_group)
        return tensors

    def close(self) -> None:
        """Leave the weight group."""
        self._receiver.close()

    def _empty(self, slot: TensorSlot) -> Tensor:
        return torch.empty(slot.shape, dtype=getattr(torch, slot.dtype), device=self._device)

    def _lead(self, action: Callable[[], None]) -> None:
        """Run on the first worker alone; every worker learns whether it went well."""
        group = get_tp_group()
        fault: WeightTransferError | None = None
        if group.is_first_rank:
            try:
                action()
            except WeightTransferError as error:
                fault = error
        is_well = torch.tensor([fault is None], dtype=torch.uint8)
        dist.broadcast(is_well, src=group.first_rank, group=group.cpu_group)
        if fault is not None:
            raise fault
        if not is_well.item():
            raise WeightTransferError("the first worker of this engine could not receive: see its message")
