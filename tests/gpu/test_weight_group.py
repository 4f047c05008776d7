"""NCCL and CUDA's streams where there is a GPU: one rank, so one GPU is enough. `make gpu-check` runs these."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.weights import process_group
from slipstream.broker.weights.buckets import checksums, unpack
from slipstream.broker.weights.process_group import DoubleBuffer, EpochRank, ProcessGroup
from slipstream.broker.weights.shared_buckets import SharedBuckets, map_buckets
from slipstream.configs.broker import WeightsConfig
from slipstream.learner.publishing.staging import Stager
from slipstream.runtime.process import NCCL_ENVIRONMENT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.own_process,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(120),
]

BUCKET_BYTES = 1 << 24


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    for name, value in NCCL_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def group(device: torch.device) -> Iterator[ProcessGroup]:
    opened = ProcessGroup(EpochRank(1, 0, 1), device=device).open(dist.HashStore(), own_host="", timeout_s=60)
    yield opened
    opened.close()


def queue_seconds(seconds: float, device: torch.device) -> torch.cuda.Event:
    """Queue matrix products of about so many seconds on the default stream; returns the event of their end."""
    left = torch.randn(4096, 4096, device=device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(20):
        left = left @ left / 64
    end.record()
    end.synchronize()
    per_product = begin.elapsed_time(end) / 1000 / 20
    for _ in range(int(seconds / per_product)):
        left = left @ left / 64
    ended = torch.cuda.Event()
    ended.record()
    return ended


def test_a_group_of_one_sends_with_a_timeout_and_closes(group: ProcessGroup, device: torch.device):
    group.send([torch.ones(BUCKET_BYTES, dtype=torch.uint8).pin_memory() for _ in range(4)], timeout_s=20)
    tensor = torch.ones(8, dtype=torch.uint8, device=device)
    assert group._backend is not None
    group._backend.broadcast(tensor, 0, timeout=timedelta(seconds=5)).wait(timedelta(seconds=5))


def test_sending_does_not_wait_for_queued_steps(group: ProcessGroup, device: torch.device):
    buckets = [torch.ones(BUCKET_BYTES, dtype=torch.uint8).pin_memory() for _ in range(8)]
    group.send(buckets, timeout_s=20)
    trained = queue_seconds(2.0, device)
    group.send(buckets, timeout_s=20)
    assert not trained.query(), "the broadcast waited for the steps"
    trained.synchronize()


def test_double_buffering_keeps_every_byte_beside_queued_steps(device: torch.device):
    sent, arrived = [], [torch.randint(0, 256, (BUCKET_BYTES,), dtype=torch.uint8, device=device) for _ in range(6)]
    torch.cuda.synchronize()
    double_buffer = DoubleBuffer(device)
    trained = queue_seconds(2.0, device)

    def send(index: int, buffer: torch.Tensor):
        copy = buffer.clone()
        sent.append(copy)
        return torch.cuda.current_stream().synchronize

    def receive(index: int, buffer: torch.Tensor):
        buffer.copy_(arrived[index])
        return torch.cuda.current_stream().synchronize

    host = [torch.zeros(BUCKET_BYTES, dtype=torch.uint8).pin_memory() for _ in arrived]
    double_buffer.receive(host, receive)
    double_buffer.send(host, send)
    assert not trained.query()
    trained.synchronize()
    for got, expected in zip(sent, arrived, strict=True):
        assert got.equal(expected)


def test_the_process_survives_a_broadcast_that_timed_out():
    # In a child process, because NCCL would end it.
    script = """
import time, torch, torch.distributed as dist
from slipstream.broker.errors import WeightTransferError
from slipstream.broker.weights.process_group import EpochRank, ProcessGroup
group = ProcessGroup(EpochRank(1, 0, 1), device=torch.device("cuda", 0))
group.open(dist.HashStore(), own_host="", timeout_s=60)
bucket = torch.ones(8, dtype=torch.uint8).pin_memory()
with torch.cuda.stream(group._double_buffer._broadcasts): torch.cuda._sleep(20_000_000_000)
try:
    group.send([bucket], timeout_s=0.5)
except WeightTransferError as error:
    print("timed out:", "timed out after" in str(error))
began_at = time.monotonic()
group.close()
print("closed quickly:", time.monotonic() - began_at < 8)
time.sleep(15)
print("alive")
"""
    environment = (
        os.environ | NCCL_ENVIRONMENT | {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "5", "PYTHONPATH": str(Path.cwd())}
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.split("\n") == ["timed out: True", "closed quickly: True", "alive", ""], done.stderr


def test_connecting_to_a_member_that_never_comes_ends_at_its_deadline(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(process_group, "_NCCL_CONNECT_S", 3.0)
    store = dist.HashStore()
    dist.PrefixStore("weights/epoch-1", store).set("ready/1", b"1")
    started_at = time.monotonic()
    with pytest.raises(WeightTransferError, match="probe failed"):
        ProcessGroup(EpochRank(1, 0, 2), device=device).open(store, own_host="", timeout_s=60)
    assert time.monotonic() - started_at < 20


def test_an_abort_from_a_thread_ends_connecting(device: torch.device):
    store = dist.HashStore()
    dist.PrefixStore("weights/epoch-1", store).set("ready/1", b"1")
    group = ProcessGroup(EpochRank(1, 0, 2), device=device)
    threading.Timer(2.0, group.abort).start()
    started_at = time.monotonic()
    with pytest.raises(WeightTransferError):
        group.open(store, own_host="", timeout_s=60)
    assert time.monotonic() - started_at < 20


def test_mapped_memory_is_pinned_in_both_processes_views(device: torch.device):
    held = SharedBuckets([BUCKET_BYTES, 5], is_pinned=True)
    held.tensors[0].fill_(7)
    mapped = map_buckets(held.path, sizes=held.sizes, is_pinned=True)
    assert held.tensors[0].is_pinned()
    assert mapped[0].is_pinned()
    assert mapped[0].to(device, non_blocking=True).eq(7).all()
    del mapped
    held.close()


def test_staging_within_the_gpu_waits_for_no_copy_to_the_host(device: torch.device):
    weights = [(f"layer.{index}", torch.randn(1 << 22, device=device)) for index in range(8)]
    metadata = [(name, tensor.shape, torch.bfloat16) for name, tensor in weights]
    stager = Stager(WeightsConfig(staging="device", bucket_bytes=BUCKET_BYTES), metadata=metadata, device=device)
    # Page-locked memory is allocated once; that may wait for the GPU.
    first = stager.stage(version=0, weights=weights, canary=([], [])).finish()
    trained = queue_seconds(2.0, device)
    staged = stager.stage(version=1, weights=weights, canary=([], []), reuse=first)
    assert not trained.query(), "staging waited for the steps"
    for (_, got), (_, tensor) in zip(unpack(staged.buckets, staged.update.slots), weights, strict=True):
        assert got.equal(tensor.bfloat16().cpu())
    assert staged.update.checksums == checksums(staged.buckets)
