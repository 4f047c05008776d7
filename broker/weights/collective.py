"""Collective transport: broadcasts over NCCL or Gloo, in one process group per membership epoch.

torch's default group belongs to DeepSpeed or vLLM. Separate groups can be rebuilt as members come and go.
"""

import time
from collections.abc import Iterable
from threading import Event

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import DeviceName, GroupBackend, OpenEpoch, Update
from slipstream.broker.weights import buckets as flat
from slipstream.broker.weights.process_group import (
    SENDER_RANK,
    EpochRank,
    ProcessGroup,
    connect,
    device_name,
    listen,
    naming_phase,
    own_address,
    seconds_left,
)
from slipstream.broker.weights.shared_buckets import SharedBuckets
from slipstream.broker.weights.transport import HostBuckets

_LOOPBACK = "127.0.0.1"


class _CollectiveEnd:
    _group: ProcessGroup | None = None

    def _open_group(self) -> ProcessGroup:
        if self._group is None:
            raise WeightTransferError("a weight epoch must be open before a broadcast: call open_epoch first")
        return self._group

    def _close_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


class CollectiveSender(_CollectiveEnd):
    """The learner's end: rank 0 and owner of the rendezvous store. Implements WeightSender; belongs to one thread."""

    def __init__(self, host: str = _LOOPBACK, *, device: str | torch.device, ports: Iterable[int] = (0,)) -> None:
        """`host`: this machine's address. `ports`: for the rendezvous, the first free one; 0 for any. Raises
        WeightTransferError."""
        self._device = torch.device(device)
        self.device: DeviceName = device_name(self._device)
        self._store: dist.TCPStore | None = listen(host, ports=ports)
        self.address: tuple[str, int] = host, self._store.port
        """As in WeightSender; constant for the whole run."""
        self._num_members: int | None = None
        self._is_aborted = Event()

    def open_epoch(
        self, epoch: int, *, num_members: int, timeout_s: float, backend: GroupBackend | None = None
    ) -> None:
        """Replace the group. `backend`: None selects the device's. An error names the missing ranks.

        Without members, it builds none, and `broadcast` is a no-op.
        """
        self._is_aborted.clear()
        self._close_group()
        if self._store is None:
            raise WeightTransferError(f"weight epoch {epoch} must be opened before close(): this sender is closed")
        if num_members > 0:
            own = EpochRank(epoch, SENDER_RANK, num_members + 1)
            # Set before it opens, so that `abort` can end a blocked `open`.
            wire_device = torch.device("cpu") if backend == "gloo" else self._device
            self._group = ProcessGroup(own, device=wire_device, is_aborted=self._is_aborted)
            try:
                self._group.open(self._store, own_host=self.address[0], timeout_s=timeout_s)
            except WeightTransferError:
                self._close_group()
                raise
        self._num_members = num_members

    def broadcast(self, buckets: list[Tensor], *, timeout_s: float) -> None:
        if self._num_members == 0:
            return  # no receivers; the version is still committed
        group = self._open_group()
        self._is_aborted.clear()
        try:
            group.send(buckets, timeout_s=timeout_s)
        except WeightTransferError:
            # Only a new epoch can synchronize the ranks again.
            self._close_group()
            raise

    def abort(self) -> None:
        self._is_aborted.set()
        if group := self._group:
            group.abort()

    def close(self) -> None:
        self._close_group()
        self._store = None

    def _close_group(self) -> None:
        self._num_members = None
        super()._close_group()


class CollectiveReceiver(_CollectiveEnd):
    """A generator's end. Implements WeightReceiver; belongs to one thread. `receive` overwrites earlier buckets."""

    def __init__(self, *, device: str | torch.device) -> None:
        self._device = torch.device(device)
        self._staging: SharedBuckets | None = None

    @property
    def device(self) -> DeviceName:
        return device_name(self._device)

    def open_epoch(self, opening: OpenEpoch, *, rank: int) -> None:
        self._close_group()
        # Gloo sends host memory, so a generator can share the learner's GPU.
        wire_device = torch.device("cpu") if opening.backend == "gloo" else self._device
        own = EpochRank(opening.epoch, rank, len(opening.members) + 1)
        deadline = time.monotonic() + opening.timeout_s
        with naming_phase(own, f"reach the learner's rendezvous store at {opening.host}:{opening.port}"):
            own_host = own_address(opening.host, opening.port, timeout_s=opening.timeout_s)
            store = connect(opening.host, opening.port, timeout_s=seconds_left(deadline))
        group = ProcessGroup(own, device=wire_device)
        self._group = group.open(store, own_host=own_host, timeout_s=seconds_left(deadline))

    def receive(self, update: Update, *, cancelled: Event) -> HostBuckets:
        """`update.timeout_s` bounds each bucket. An error closes the group, except a wrong checksum."""
        group = self._open_group()
        try:
            if self._staging is None or self._staging.sizes != update.bucket_bytes:
                self._free()
                self._staging = SharedBuckets(update.bucket_bytes, is_pinned=self._device.type == "cuda")
            staging = self._staging
            group.receive(staging.tensors, timeout_s=update.timeout_s, cancelled=cancelled)
        except WeightTransferError:
            self._close_group()
            raise
        flat.verify(staging.tensors, expected=update.checksums)
        return HostBuckets(staging.tensors, staging.path)

    def close(self) -> None:
        self._close_group()
        self._free()

    def _free(self) -> None:
        if self._staging:
            self._staging.close()
            self._staging = None
