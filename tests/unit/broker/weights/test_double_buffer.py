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


@pytest.mark.parametrize("seed", range(20))
def test_every_bucket_is_sent_and_received_whole_under_any_schedule(seed: int):
    for got in (send(FakeCuda(seed)).sent, receive(FakeCuda(seed))):
        assert all(one.equal(other) for one, other in zip(got, make_buckets(*SIZES), strict=True))


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


def test_training_goes_on_beside_a_stalled_broadcast():
    cuda = FakeCuda()
    with pytest.raises(RuntimeError, match="timed out"):
        send(cuda, is_stalled=True)
    trained: list[int] = []
    for step in range(3):
        cuda.default.enqueue("step", lambda step=step: trained.append(step) is None)
    cuda.default.synchronize()
    assert trained == [0, 1, 2]


def test_the_buffers_are_kept():
    cuda = FakeCuda()
    double_buffer = DoubleBuffer(CPU, cuda=cuda)
    for sizes in ((8, 3), (5,), ()):
        with cuda:
            double_buffer.send(make_buckets(*sizes), partial(start, FakeNccl(cuda)))
    assert [buffer.numel() for buffer in double_buffer._buffers] == [8, 8]
