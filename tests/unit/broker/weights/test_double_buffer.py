"""Order of a GPU's copies and broadcasts, under any schedule that CUDA may choose."""

from datetime import timedelta
from functools import partial

import pytest
import torch
from torch import Tensor

from slipstream.broker.weights.process_group import DoubleBuffer
from tests.cuda_fake import FakeCuda, FakeNccl

CPU = torch.device("cpu")
SIZES = (8, 3, 1, 8, 5)
TIMEOUT = timedelta(seconds=1)


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


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    assert all(one.equal(other) for one, other in zip(got, expected, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_every_bucket_is_sent_whole_under_any_schedule(seed: int):
    assert_same(send(FakeCuda(seed)).sent, make_buckets(*SIZES))


@pytest.mark.parametrize("seed", range(20))
def test_every_bucket_is_received_whole_under_any_schedule(seed: int):
    assert_same(receive(FakeCuda(seed)), make_buckets(*SIZES))


def test_the_next_bucket_is_copied_during_a_broadcast():
    cuda = FakeCuda()
    send(cuda)
    called = [event for event in cuda.events if "broadcast" in event or "enqueue copy" in event]
    assert [event.split(": ")[1] for event in called[:4]] == [
        "enqueue copy",
        "broadcast 0",
        "enqueue copy",
        "broadcast 1",
    ]


@pytest.mark.parametrize("run", [send, receive])
def test_nothing_touches_the_default_stream_on_which_the_learner_trains(run):
    cuda = FakeCuda()
    # Training has queued work that never ends.
    cuda.default.queue.append(("training", lambda: False))
    run(cuda)
    assert not [event for event in cuda.events if event.startswith("default")]
    assert len(cuda.default.queue) == 1
    assert {stream for stream, _ in cuda.allocated if _ == max(SIZES)} <= {"stream-2", "stream-1"}


def test_training_goes_on_beside_a_stalled_broadcast():
    cuda = FakeCuda()
    with pytest.raises(RuntimeError, match="timed out"):
        send(cuda, is_stalled=True)
    trained: list[int] = []
    for step in range(3):
        cuda.default.enqueue("step", lambda step=step: trained.append(step) is None)
    cuda.default.synchronize()
    assert trained == [0, 1, 2]


@pytest.mark.parametrize("run", [send, receive])
def test_the_gpu_holds_two_buckets_whatever_the_number(run):
    cuda = FakeCuda()
    run(cuda)
    buffers = [size for stream, size in cuda.allocated if size == max(SIZES)]
    assert len(buffers) == 2


def test_the_buffers_are_kept():
    cuda = FakeCuda()
    double_buffer = DoubleBuffer(CPU, cuda=cuda)
    for sizes in ((8, 3), (5,), ()):
        with cuda:
            double_buffer.send(make_buckets(*sizes), partial(start, FakeNccl(cuda)))
    assert [buffer.numel() for buffer in double_buffer._buffers] == [8, 8]
