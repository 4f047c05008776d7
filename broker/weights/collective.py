"""Weights by broadcast: NCCL between GPUs, Gloo between CPUs, one process group per membership epoch.

The groups are built directly over a TCPStore that the learner keeps for the whole run, under a prefix per epoch.
torch's default group, which DeepSpeed and vLLM each make for themselves, is neither needed nor touched, and a group can
be torn down and built anew as members come and go.

Building goes in three phases, each under the epoch's deadline:
    gather   every member says that it is here; rank 0 then gives the word, or names who is missing
    connect  the process group is built
    probe    one byte is broadcast: the group works (NCCL connects only now)
Whatever fails afterwards takes the group down on every rank: a rank that gives up closes its connections, and the ranks
that wait for it see that.
"""

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from broker.errors import WeightTransferFault
from broker.messages import OpenEpoch, TensorSlot
from broker.weights import buckets as flat

SENDER_RANK = 0
STORE_TIMEOUT_S = 10.0
"""Longest single answer of the rendezvous store when no wait of ours is meant, seconds."""
GO = b"go"
FAILURES = (RuntimeError, ValueError, OSError)
"""What torch raises from stores and groups: DistError and Gloo's errors are RuntimeErrors."""


class Seat(NamedTuple):
    """A rank's place in an epoch. Example: Seat(epoch=3, rank=1, num_ranks=4)."""

    epoch: int
    rank: int
    num_ranks: int


class _Backend(Protocol):
    """What is used of ProcessGroupGloo and ProcessGroupNCCL; the latter exists only in CUDA builds of torch."""

    def broadcast(self, tensor: Tensor, root: int, *, timeout: timedelta) -> dist.Work: ...

    def abort(self) -> None: ...

    def shutdown(self) -> None: ...


class CollectiveSender:
    """The learner's end: rank 0, and owner of the rendezvous store. Fulfils WeightSender; belongs to one thread."""

    def __init__(self, host: str, *, device: str | torch.device, port: int = 0) -> None:
        """Listen on `host` (IPv4 address or name of this machine) at `port`, 0 for any. Raises WeightTransferFault."""
        self._device = torch.device(device)
        self._host = host
        self._store: dist.TCPStore | None = _listen(host, port)
        self._port = self._store.port
        self._group: _Group | None = None
        self._num_members: int | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the rendezvous store; the same for the whole run."""
        return self._host, self._port

    def open_epoch(self, epoch: int, *, num_members: int, timeout_s: float) -> None:
        """Tear the previous group down, build this one. Blocks until all are in, at most `timeout_s`.

        Without members there is no group and `broadcast` does nothing. Raises WeightTransferFault, naming the missing.
        """
        self._leave()
        if self._store is None:
            raise WeightTransferFault(f"weight epoch {epoch} must be opened before close(): this sender is closed")
        if num_members > 0:
            seat = Seat(epoch, SENDER_RANK, num_members + 1)
            self._group = _Group(self._store, seat, own_host=self._host, device=self._device, timeout_s=timeout_s)
        self._num_members = num_members

    def broadcast(self, buckets: list[Tensor], *, timeout_s: float) -> None:
        """Send uint8 buckets in order, each within `timeout_s`. Raises WeightTransferFault; the group is then gone."""
        if self._num_members == 0:
            return
        group = _opened(self._group)
        try:
            group.broadcast([bucket.to(self._device) for bucket in buckets], timeout_s=timeout_s)
        except WeightTransferFault:
            self._leave()
            raise

    def close(self) -> None:
        """Tear the group down and stop the store. May be called again."""
        self._leave()
        self._store = None

    def _leave(self) -> None:
        self._num_members = None
        if self._group is not None:
            self._group.abort()
            self._group = None


class CollectiveReceiver:
    """A generator's end: rank 1 or more. Fulfils WeightReceiver; belongs to one thread.

    Received tensors are views into staging buckets that the next `receive` writes over: load them before that.
    """

    def __init__(self, *, device: str | torch.device) -> None:
        self._device = torch.device(device)
        self._group: _Group | None = None
        self._staging: list[Tensor] = []

    def open_epoch(self, opening: OpenEpoch, *, rank: int) -> None:
        """Leave the previous group, join this one. Blocks until all are in, or time is up and WeightTransferFault."""
        self._leave()
        seat = Seat(opening.epoch, rank, len(opening.members) + 1)
        deadline = time.monotonic() + opening.timeout_s
        with _phase(seat, "reach the learner's rendezvous store"):
            own_host = _own_address(opening.host, opening.port, timeout_s=opening.timeout_s)
            store = _connect(opening.host, opening.port, timeout_s=_left(deadline))
        self._group = _Group(store, seat, own_host=own_host, device=self._device, timeout_s=_left(deadline))

    def receive(
        self, slots: list[TensorSlot], *, bucket_bytes: list[int], checksums: list[int], timeout_s: float
    ) -> list[tuple[str, Tensor]]:
        """Receive all buckets, verify, return named views; `timeout_s` bounds each bucket.

        Raises WeightTransferFault. When only the checksums were wrong the group stays; else it is gone.
        """
        group = _opened(self._group)
        self._staging = flat.allocate(bucket_bytes, device=self._device, reuse=self._staging)
        try:
            group.broadcast(self._staging, timeout_s=timeout_s)
        except WeightTransferFault:
            self._leave()
            raise
        flat.verify(self._staging, expected=checksums)
        return flat.unpack(self._staging, slots)

    def close(self) -> None:
        """Tear the group down and let the staging memory go. May be called again."""
        self._leave()
        self._staging = []

    def _leave(self) -> None:
        if self._group is not None:
            self._group.abort()
            self._group = None


class _Group:
    """One epoch's process group as one rank sees it. Building it blocks until all ranks are in."""

    def __init__(self, store: dist.Store, seat: Seat, *, own_host: str, device: torch.device, timeout_s: float) -> None:
        self._seat = seat
        self._device = device
        deadline = time.monotonic() + timeout_s
        rendezvous = dist.PrefixStore(f"weights/epoch-{seat.epoch}", store)
        with _phase(seat, "gather"):
            _gather(rendezvous, seat, deadline=deadline)
        with _phase(seat, "connect"):
            store.set_timeout(timedelta(seconds=_left(deadline)))
            self._backend = _build(rendezvous, seat, own_host=own_host, device=device, timeout_s=_left(deadline))
            store.set_timeout(timedelta(seconds=STORE_TIMEOUT_S))
        try:
            with _phase(seat, "probe"):
                self._send_one(torch.zeros(1, dtype=torch.uint8, device=device), timeout_s=_left(deadline))
        except WeightTransferFault:
            self.abort()
            raise

    def broadcast(self, buckets: Sequence[Tensor], *, timeout_s: float) -> None:
        """All buckets from rank 0 to the others, in order, each within `timeout_s`. Raises WeightTransferFault."""
        for index, bucket in enumerate(buckets):
            with _phase(self._seat, f"broadcast of bucket {index} of {len(buckets)} ({bucket.numel()} bytes)"):
                self._send_one(bucket, timeout_s=timeout_s)

    def abort(self) -> None:
        """Close all connections at once; operations under way end with an error on every rank."""
        try:
            self._backend.abort()
            self._backend.shutdown()
        except FAILURES:
            return

    def _send_one(self, bucket: Tensor, *, timeout_s: float) -> None:
        if bucket.numel() == 0:
            return
        work = self._backend.broadcast(bucket, SENDER_RANK, timeout=timedelta(seconds=timeout_s))
        if self._device.type == "cuda":
            _await_cuda(work, timeout_s=timeout_s)
        else:
            work.wait(timedelta(seconds=timeout_s))


def _listen(host: str, port: int) -> dist.TCPStore:
    """A store on this address alone: given only a port, torch would listen on every interface."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise WeightTransferFault(
            f"weights.host must be an address of this machine with a free port, got {host}:{port}: {error}"
        ) from error
    bound_port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        bound_port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_TIMEOUT_S),
        master_listen_fd=listener.detach(),
    )


def _connect(host: str, port: int, *, timeout_s: float) -> dist.TCPStore:
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def _own_address(host: str, port: int, *, timeout_s: float) -> str:
    """The local address that reaches the learner; found without this machine's name, which may not resolve.

    A store that does not answer ends here in one sentence, where torch's client would retry and dump its stack.
    """
    with socket.create_connection((host, port), timeout=timeout_s) as probe:
        return probe.getsockname()[0]


def _gather(store: dist.PrefixStore, seat: Seat, *, deadline: float) -> None:
    if seat.rank != SENDER_RANK:
        store.set(f"here/{seat.rank}", b"1")
        _await_word(store, deadline=deadline)
        return
    missing = list(_missing_ranks(store, seat, deadline=deadline))
    verdict = f"rank {', '.join(map(str, missing))} of {seat.num_ranks} did not arrive in time" if missing else ""
    store.set("word", verdict.encode() or GO)
    if missing:
        raise RuntimeError(verdict)


def _missing_ranks(store: dist.PrefixStore, seat: Seat, *, deadline: float) -> Iterator[int]:
    for rank in range(SENDER_RANK + 1, seat.num_ranks):
        try:
            store.wait([f"here/{rank}"], timedelta(seconds=_left(deadline)))
        except dist.DistStoreError:
            yield rank


def _await_word(store: dist.PrefixStore, *, deadline: float) -> None:
    try:
        store.wait(["word"], timedelta(seconds=_left(deadline)))
    except dist.DistStoreError as error:
        raise RuntimeError("rank 0 (the learner) did not give the word in time") from error
    word = store.get("word")
    if word != GO:
        raise RuntimeError(word.decode())


def _build(store: dist.Store, seat: Seat, *, own_host: str, device: torch.device, timeout_s: float) -> _Backend:
    if device.type == "cuda":
        return _build_nccl(store, seat, device=device)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_host)]
    return dist.ProcessGroupGloo(store, seat.rank, seat.num_ranks, options)


def _build_nccl(store: dist.Store, seat: Seat, *, device: torch.device) -> _Backend:
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    # Above every deadline of ours, because NCCL's watchdog answers its own timeout by ending the process.
    options._timeout = timedelta(days=1)
    options.group_name = f"weights-epoch-{seat.epoch}"
    return dist.ProcessGroupNCCL(store, seat.rank, seat.num_ranks, options)


def _await_cuda(work: dist.Work, *, timeout_s: float) -> None:
    """Wait on the CPU, because only then can a group with a dead peer be given up.

    Polls: NCCL's own `wait` merely orders streams unless an environment variable, read for all groups, says otherwise.
    """
    deadline = time.monotonic() + timeout_s
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not completed within {timeout_s:g} s")
        time.sleep(0.0005)
    work.wait()


def _opened(group: _Group | None) -> _Group:
    if group is None:
        raise WeightTransferFault("a weight epoch must be open before weights travel: call open_epoch first")
    return group


def _left(deadline: float) -> float:
    """Seconds until the deadline; never zero, which torch takes for no timeout at all."""
    return max(deadline - time.monotonic(), 0.001)


@contextmanager
def _phase(seat: Seat, phase: str) -> Iterator[None]:
    try:
        yield
    except FAILURES as error:
        raise WeightTransferFault(
            f"weight epoch {seat.epoch}, rank {seat.rank} of {seat.num_ranks}: {phase} failed: {error}"
        ) from error
