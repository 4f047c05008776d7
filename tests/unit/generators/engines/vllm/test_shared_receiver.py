"""All workers of an engine are one member: the first receives, the others map its memory and hold no copy."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import Update
from slipstream.broker.weights import buckets
from slipstream.broker.weights.shared_buckets import SharedBuckets
from slipstream.generators.engines.vllm import weights
from slipstream.generators.engines.vllm.weights import SharedReceiver
from tests.unit.broker.weight_versions import announce

BUCKET_BYTES = 1 << 16
SENT = [(f"layer.{i}", torch.randn(64, 128, generator=torch.Generator().manual_seed(i))) for i in range(40)]
SLOTS, SIZES = buckets.plan([(name, t.shape, t.dtype) for name, t in SENT], bucket_bytes=BUCKET_BYTES)
PACKED = buckets.pack(SENT, SLOTS, sizes=SIZES)


class Receiver:
    """The first worker's; `error` is what it fails with."""

    def __init__(self, error: str = "") -> None:
        self.error = error
        self.staging: SharedBuckets | None = None

    def receive(self, update: Update) -> list[tuple[str, Tensor]]:
        if self.error:
            raise WeightTransferError(self.error)
        self.staging = self.staging or SharedBuckets(update.bucket_bytes)
        for into, bucket in zip(self.staging.tensors, PACKED, strict=True):
            into.copy_(bucket)
        return buckets.unpack(self.staging.tensors, update.slots)


class Allocated(TorchDispatchMode):
    """Bytes of the tensors that a worker makes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        held = {each.untyped_storage().data_ptr() for each in args if isinstance(each, Tensor)}
        if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in held:
            self.num_bytes += made.nbytes
        return made


@pytest.fixture
def run_workers(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[bool], Any]], list[Any]]:
    """Run a function as two workers, a thread each, with a group of theirs."""
    own, store = threading.local(), dist.HashStore()
    monkeypatch.setattr(weights, "get_world_group", lambda: own.group)
    monkeypatch.setattr(
        weights, "dist", SimpleNamespace(broadcast=lambda tensor, src, group: group.broadcast(tensor, src).wait())
    )

    def run(work: Callable[[bool], Any]) -> list[Any]:
        def as_worker(rank: int) -> Any:
            group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=10))
            own.group = SimpleNamespace(is_first_rank=rank == 0, first_rank=0, cpu_group=group)
            return work(rank == 0)

        with ThreadPoolExecutor(2) as threads:
            workers = [threads.submit(as_worker, rank) for rank in range(2)]
            return [worker.result(20) for worker in workers]

    return run


def receive(shared: SharedReceiver) -> list[tuple[str, Tensor]]:
    return shared.receive(announce(SLOTS, SIZES, []))


def test_every_worker_gets_all_tensors_and_none_but_the_first_holds_them(run_workers):
    receiver = Receiver()

    def work(is_first: bool) -> tuple[list[tuple[str, Tensor]], int]:
        shared = SharedReceiver(receiver if is_first else Receiver(), device=torch.device("cpu"))
        with Allocated() as allocated:
            receive(shared)
            return receive(shared), allocated.num_bytes

    for tensors, _ in (results := run_workers(work)):
        assert [name for name, _ in tensors] == [name for name, _ in SENT]
        assert all(got.equal(sent) for (_, got), (_, sent) in zip(tensors, SENT, strict=True))
    # Less than two buckets, in place of the whole version (20 buckets), and again nothing for the second version.
    assert results[1][1] < 2 * BUCKET_BYTES
    assert sum(SIZES) == 20 * BUCKET_BYTES


def test_a_failure_of_the_first_worker_fails_all_with_its_words(run_workers):
    def work(is_first: bool) -> str:
        shared = SharedReceiver(Receiver("bucket 3 was damaged" if is_first else ""), device=torch.device("cpu"))
        with pytest.raises(WeightTransferError) as raised:
            receive(shared)
        return str(raised.value)

    assert run_workers(work) == ["bucket 3 was damaged"] * 2
