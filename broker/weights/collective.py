"""Collective transport: broadcasts over NCCL, Gloo or unix sockets, in one process group per membership epoch.

torch's default group belongs to DeepSpeed in the learner and to vLLM in a generator. Separate groups can be rebuilt as
members join and leave.
"""

import time
from collections.abc import Iterable
from pathlib import Path
from threading import Event

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import DeviceName, GroupBackend, OpenEpoch, Update
from slipstream.broker.weights import buckets as flat
from slipstream.broker.weights import process_group
from slipstream.broker.weights.process_group import (
    SENDER_RANK,
    EpochRank,
    ProcessGroup,
    device_name,
    naming_phase,
    seconds_left,
)
from slipstream.broker.weights.shared_buckets import SharedBuckets

_LOOPBACK = "127.0.0.1"


class CollectiveSender:
    """The learner's end: rank 0 and owner of the rendezvous store. Implements WeightSender; belongs to one thread."""

    def __init__(
        self,
        host: str = _LOOPBACK,
        *,
        device: str | torch.device,
        ports: Iterable[int] = (0,),
        folder: Path | None = None,
    ) -> None:
        """`host`: an IPv4 address or name of this machine. Raises WeightTransferError.

        `folder`: private folder for the rendezvous; None: use a TCPStore on `host` at the first free port of `ports` (0
        for any).
        """
        self._device = torch.device(device)
        self.device: DeviceName = device_name(self._device)
        self._own_host = folder or host
        self.address: tuple[str, int]
        """As in WeightSender; constant for the whole run."""
        self._store: dist.Store | None
        if folder:
            self.address = process_group.create_file(folder), 0
            self._store = process_group.open_file(self.address[0])
        else:
            listening = process_group.listen(host, ports=ports)
            self.address, self._store = (host, listening.port), listening
        self._group: ProcessGroup | None = None
        self._num_members: int | None = None
        self._is_aborted = Event()

    def open_epoch(
        self, epoch: int, *, num_members: int, timeout_s: float, backend: GroupBackend | None = None
    ) -> None:
        """Close the previous group and build a new one. `backend`: None selects the device's.

        Without members it builds no group, and `broadcast` is a no-op. An error names the missing ranks.
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
                self._group.open(self._store, own_host=self._own_host, timeout_s=timeout_s)
            except WeightTransferError:
                self._close_group()
                raise
        self._num_members = num_members

    def broadcast(self, buckets: list[Tensor], *, timeout_s: float) -> None:
        if self._num_members == 0:
            return  # no receivers; the version is still committed
        group = _require_open(self._group)
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
        if process_group.is_file(self.address[0]):
            process_group.delete_file(self.address[0])

    def _close_group(self) -> None:
        self._num_members = None
        if self._group is not None:
            self._group.close()
            self._group = None


class CollectiveReceiver:
    """A generator's end. Implements WeightReceiver; belongs to one thread.

    Received tensors are views into staging buckets in host memory, which the next `receive` overwrites.
    """

    def __init__(self, *, device: str | torch.device) -> None:
        self._device = torch.device(device)
        self._group: ProcessGroup | None = None
        self.staging: SharedBuckets | None = None
        """Buckets of the last `receive`, for other processes on this machine to map."""

    def open_epoch(self, opening: OpenEpoch, *, rank: int) -> None:
        self._close_group()
        # Gloo sends host memory, so a generator can share the learner's GPU.
        wire_device = torch.device("cpu") if opening.backend == "gloo" else self._device
        own = EpochRank(opening.epoch, rank, len(opening.members) + 1)
        deadline = time.monotonic() + opening.timeout_s
        with naming_phase(own, f"reach the learner's rendezvous store at {opening.host}:{opening.port}"):
            store, own_host = _open_rendezvous(opening, deadline)
        group = ProcessGroup(own, device=wire_device)
        self._group = group.open(store, own_host=own_host, timeout_s=seconds_left(deadline))

    def receive(self, update: Update) -> list[tuple[str, Tensor]]:
        """Receive and verify all buckets, return named views; `update.timeout_s` bounds each bucket.

        Raises WeightTransferError. A wrong checksum or layout leaves the group open; any other error closes it.
        """
        group = _require_open(self._group)
        try:
            if self.staging is None or self.staging.sizes != update.bucket_bytes:
                self._free()
                self.staging = SharedBuckets(update.bucket_bytes, is_pinned=self._device.type == "cuda")
            staging = self.staging.tensors
            group.receive(staging, timeout_s=update.timeout_s)
        except WeightTransferError:
            self._close_group()
            raise
        return flat.unpack_verified(staging, update)

    def close(self) -> None:
        self._close_group()
        self._free()

    def _free(self) -> None:
        if self.staging:
            self.staging.close()
            self.staging = None

    def _close_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


def _open_rendezvous(opening: OpenEpoch, deadline: float) -> tuple[dist.Store, str | Path]:
    if process_group.is_file(opening.host):
        store = process_group.open_file(opening.host)
        return store, Path(store.path).parent
    own_host = process_group.own_address(opening.host, opening.port, timeout_s=opening.timeout_s)
    return process_group.connect(opening.host, opening.port, timeout_s=seconds_left(deadline)), own_host


def _require_open(group: ProcessGroup | None) -> ProcessGroup:
    if group is None:
        raise WeightTransferError("a weight epoch must be open before a broadcast: call open_epoch first")
    return group
