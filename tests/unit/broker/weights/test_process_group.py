"""Deadlines and aborts of a backend that blocks like NCCL, on a device other than the CPU."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from threading import Event

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.weights import process_group
from slipstream.broker.weights.collective import CollectiveSender
from slipstream.broker.weights.process_group import DoubleBuffer, EpochRank, ProcessGroup, connect
from tests.cases import cases
from tests.cuda_fake import FakeCuda, FakeNccl

NOT_A_CPU = torch.device("meta")
CPU = torch.device("cpu")
SIZES = (8, 3, 1, 8, 5)
TIMEOUT = timedelta(seconds=1)


class BlockingBackend:
    """The first `num_sound` broadcasts succeed; the next one runs until `abort`, then ends like a successful one."""

    def __init__(self, *, num_sound: int = 0, hangs_in_abort: bool = False) -> None:
        self.num_sound = num_sound
        self.hangs_in_abort = hangs_in_abort
        self.is_blocked, self.is_aborted, self.is_over = Event(), Event(), Event()
        self.timeouts: list[timedelta] = []

    def broadcast(self, tensor: Tensor, root: int, *, timeout: timedelta) -> "BlockingBackend":
        self.num_sound -= 1
        self.timeouts.append(timeout)
        if len(self.timeouts) == 1 and self.num_sound < 0:
            # NCCL connects in the first call.
            self.is_blocked.set()
            assert self.is_aborted.wait(10), "nobody aborted it"
        return self

    def is_completed(self) -> bool:
        if self.num_sound < 0:
            self.is_blocked.set()
        return self.num_sound >= 0 or self.is_aborted.is_set()

    def wait(self) -> None:
        assert self.is_completed(), "it would block the thread"

    def abort(self) -> None:
        self.is_aborted.set()
        if self.hangs_in_abort:
            self.is_over.wait(20)


class NoBuffer:
    def __init__(self, device: torch.device) -> None: ...

    def send(self, buckets, start) -> None:
        for index, bucket in enumerate(buckets):
            start(index, bucket)()


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[BlockingBackend]:
    opened = BlockingBackend()
    monkeypatch.setattr(process_group, "build_backend", lambda *_, **__: opened)
    monkeypatch.setattr(process_group, "DoubleBuffer", NoBuffer)
    yield opened
    opened.is_over.set()


def test_connecting_ends_at_its_deadline(backend: BlockingBackend, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process_group, "_NCCL_CONNECT_S", 0.3)
    started_at = time.monotonic()
    with pytest.raises(WeightTransferError, match="probe failed: it was aborted"):
        ProcessGroup(EpochRank(1, 0, 1), device=NOT_A_CPU).open(dist.HashStore(), own_host="", timeout_s=60)
    assert time.monotonic() - started_at < 30


@cases(
    "num_sound, words",
    (0, "probe failed: it was aborted"),
    (1, r"broadcast of bucket 0 of 1 .* it was aborted"),
)
def test_an_abort_from_another_thread_ends_connecting_or_a_broadcast_which_is_not_sent(backend, num_sound, words):
    backend.num_sound = num_sound
    sender = CollectiveSender(device=NOT_A_CPU)
    # A member has registered for the first epoch.
    dist.PrefixStore("weights/epoch-1", connect(*sender.address, timeout_s=5)).set("ready/1", b"1")

    def send() -> None:
        sender.open_epoch(1, num_members=1, timeout_s=10)
        sender.broadcast([torch.ones(8, dtype=torch.uint8)], timeout_s=10)

    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(send)
        assert backend.is_blocked.wait(5)
        sender.abort()
        with pytest.raises(WeightTransferError, match=words):
            sending.result(5)
    if not num_sound:
        with pytest.raises(WeightTransferError, match="must be open"):
            sender.broadcast([], timeout_s=1)


def test_a_broadcast_ends_at_its_deadline_before_any_timeout_of_the_backend(backend: BlockingBackend):
    backend.num_sound = 2
    group = ProcessGroup(EpochRank(1, 0, 1), device=NOT_A_CPU).open(dist.HashStore(), own_host="", timeout_s=10)
    bucket = torch.ones(8, dtype=torch.uint8)
    group.send([bucket], timeout_s=5)
    with pytest.raises(WeightTransferError, match=r"broadcast of bucket 0 of 1 .* timed out after 0.2 s"):
        group.send([bucket], timeout_s=0.2)
    assert not backend.is_aborted.is_set()
    group.close()
    assert backend.is_aborted.is_set()
    assert min(backend.timeouts) > timedelta(hours=1), "NCCL's watchdog saw the timeout"


def test_an_abort_that_hangs_is_left_behind(backend: BlockingBackend, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process_group, "_ABORT_S", 0.2)
    backend.num_sound, backend.hangs_in_abort = 1, True
    group = ProcessGroup(EpochRank(1, 0, 1), device=NOT_A_CPU).open(dist.HashStore(), own_host="", timeout_s=10)
    started_at = time.monotonic()
    group.close()
    assert time.monotonic() - started_at < 15, "the abort takes 20 s"


def make_buckets(*sizes: int) -> list[Tensor]:
    return [torch.full((size,), index + 1, dtype=torch.uint8) for index, size in enumerate(sizes)]


def start(nccl: FakeNccl, index: int, buffer: Tensor):
    return partial(nccl.broadcast(buffer, 0, timeout=TIMEOUT).wait, TIMEOUT)


def send(cuda: FakeCuda, *, is_stalled: bool = False) -> FakeNccl:
    nccl = FakeNccl(cuda, is_stalled=is_stalled)
    with cuda:
        DoubleBuffer(CPU, cuda=cuda).send(make_buckets(*SIZES), partial(start, nccl))
    return nccl


def receive(cuda: FakeCuda) -> list[Tensor]:
    buckets, nccl = [torch.zeros(size, dtype=torch.uint8) for size in SIZES], FakeNccl(cuda, make_buckets(*SIZES))
    with cuda:
        DoubleBuffer(CPU, cuda=cuda).receive(buckets, partial(start, nccl))
    return buckets


@pytest.mark.parametrize("seed", range(20))
def test_every_bucket_is_sent_and_received_whole_under_any_schedule(seed: int):
    for got in (send(FakeCuda(seed)).sent, receive(FakeCuda(seed))):
        assert all(one.equal(other) for one, other in zip(got, make_buckets(*SIZES), strict=True))


def test_the_next_bucket_is_copied_during_a_broadcast_beside_which_training_goes_on_and_buffers_are_kept():
    cuda = FakeCuda()
    send(cuda)
    called = [event for event in cuda.events if "broadcast" in event or "enqueue copy" in event]
    order = ["enqueue copy", "broadcast 0", "enqueue copy", "broadcast 1"]
    assert [event.split(": ")[1] for event in called[:4]] == order
    cuda = FakeCuda()
    with pytest.raises(RuntimeError, match="timed out"):
        send(cuda, is_stalled=True)
    trained: list[int] = []
    for step in range(3):
        cuda.default.enqueue("step", lambda step=step: trained.append(step) is None)
    cuda.default.synchronize()
    assert trained == [0, 1, 2]
    cuda = FakeCuda()
    double_buffer = DoubleBuffer(CPU, cuda=cuda)
    for sizes in ((8, 3), (5,), ()):
        with cuda:
            double_buffer.send(make_buckets(*sizes), partial(start, FakeNccl(cuda)))
    assert [buffer.numel() for buffer in double_buffer._buffers] == [8, 8]


@pytest.mark.parametrize("run", [send, receive])
def test_the_gpu_holds_two_buckets_and_nothing_touches_the_stream_on_which_the_learner_trains(run):
    cuda = FakeCuda()
    # Training has queued work that never ends.
    cuda.default.queue.append(("training", lambda: False))
    run(cuda)
    assert not [event for event in cuda.events if event.startswith("default")]
    assert len(cuda.default.queue) == 1
    streams = [stream for stream, size in cuda.allocated if size == max(SIZES)]
    assert len(streams) == 2
    assert set(streams) <= {"stream-2", "stream-1"}
