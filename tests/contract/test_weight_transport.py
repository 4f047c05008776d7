"""What every weight transport promises, in memory and over Gloo; then what only a process group can get wrong."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import Member, OpenEpoch
from slipstream.broker.weights import buckets
from slipstream.broker.weights.collective import CollectiveReceiver, CollectiveSender
from slipstream.broker.weights.memory import MemoryReceiver, MemorySender, MemoryWeights
from slipstream.broker.weights.transport import WeightReceiver, WeightSender

PATIENCE_S = 10.0
HOST = "127.0.0.1"
Named = list[tuple[str, Tensor]]


class GeneratorPool:
    """A sender and receivers, each of which lives on a thread of its own."""

    def __init__(self, sender: WeightSender, receivers: list[WeightReceiver]) -> None:
        self.sender = sender
        self.receivers = receivers
        self._threads = ThreadPoolExecutor(max_workers=len(receivers) + 1)

    def opening(self, epoch: int, *, num_members: int, timeout_s: float = PATIENCE_S) -> OpenEpoch:
        host, port = self.sender.address
        members = [Member(peer_id=f"generator-{i}", incarnation="0") for i in range(num_members)]
        return OpenEpoch(epoch=epoch, members=members, host=host, port=port, timeout_s=timeout_s)

    def open_epoch(self, epoch: int, *, members: list[int]) -> None:
        """The sender and these receivers, in this order of ranks, open an epoch."""
        opening = self.opening(epoch, num_members=len(members))
        joins = [
            self._threads.submit(self.receivers[member].open_epoch, opening, rank=place + 1)
            for place, member in enumerate(members)
        ]
        self.sender.open_epoch(epoch, num_members=len(members), timeout_s=PATIENCE_S)
        for join in joins:
            join.result(PATIENCE_S)

    def update(self, tensors: Named, *, members: list[int], bucket_bytes: int = 256, **changes: Any) -> list[Named]:
        """Broadcast, and what each receiver returned. Raises what a receiver raised."""
        slots, sizes = buckets.plan([(name, t.shape, t.dtype) for name, t in tensors], bucket_bytes=bucket_bytes)
        packed = buckets.pack(tensors, slots, sizes=sizes)
        layout: dict[str, Any] = {
            "bucket_bytes": sizes,
            "checksums": buckets.checksums(packed),
            "timeout_s": PATIENCE_S,
        } | changes
        receipts = [self._threads.submit(self.receivers[member].receive, slots, **layout) for member in members]
        self.sender.broadcast(packed, timeout_s=PATIENCE_S)
        for bucket in packed:
            bucket.zero_()
        return [receipt.result(PATIENCE_S) for receipt in receipts]

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()
        self.sender.close()
        self._threads.shutdown()


NUM_RECEIVERS = 3


def make_fleet(kind: str) -> GeneratorPool:
    if kind == "gloo":
        sender = CollectiveSender(HOST, device="cpu")
        return GeneratorPool(sender, [CollectiveReceiver(device="cpu") for _ in range(NUM_RECEIVERS)])
    weights = MemoryWeights()
    return GeneratorPool(MemorySender(weights), [MemoryReceiver(weights) for _ in range(NUM_RECEIVERS)])


@pytest.fixture(params=["memory", "gloo"])
def fleet(request: pytest.FixtureRequest) -> Iterator[GeneratorPool]:
    opened = make_fleet(request.param)
    yield opened
    opened.close()


@pytest.fixture
def gloo() -> Iterator[GeneratorPool]:
    opened = make_fleet("gloo")
    yield opened
    opened.close()


def make_weights(seed: int = 0) -> Named:
    """About 3 kB of each kind of number."""
    generator = torch.Generator().manual_seed(seed)
    return [
        ("embed.weight", torch.randn(32, 16, generator=generator)),
        ("norm.weight", torch.randn(16, generator=generator).to(torch.bfloat16)),
        ("table", torch.randint(-(2**60), 2**60, (7, 3), generator=generator)),
        ("quantised", torch.randint(-128, 128, (5,), generator=generator, dtype=torch.int8)),
        ("scale", torch.tensor(0.5 + seed)),
    ]


def assert_same(received: Named, sent: Named) -> None:
    assert [name for name, _ in received] == [name for name, _ in sent]
    for (name, got), (_, wanted) in zip(received, sent, strict=True):
        assert got.dtype == wanted.dtype, name
        assert torch.equal(got, wanted), name


# --- all transports --------------------------------------------------------------------------------------------------
def test_weights_arrive_bit_for_bit(fleet: GeneratorPool) -> None:
    fleet.open_epoch(1, members=[0, 1, 2])
    for received in fleet.update(make_weights(), members=[0, 1, 2]):
        assert_same(received, make_weights())


def test_an_epoch_carries_many_updates(fleet: GeneratorPool) -> None:
    fleet.open_epoch(1, members=[0, 1])
    for seed in range(5):
        for received in fleet.update(make_weights(seed), members=[0, 1]):
            assert_same(received, make_weights(seed))


def test_membership_changes_from_epoch_to_epoch(fleet: GeneratorPool) -> None:
    for epoch, members in enumerate([[0], [0, 1, 2], [2, 1], [1], [0, 2]]):
        fleet.open_epoch(epoch, members=members)
        for received in fleet.update(make_weights(epoch), members=members):
            assert_same(received, make_weights(epoch))


def test_without_members_nothing_is_sent_and_nobody_is_waited_for(fleet: GeneratorPool) -> None:
    fleet.sender.open_epoch(1, num_members=0, timeout_s=PATIENCE_S)
    assert fleet.update(make_weights(), members=[]) == []
    fleet.open_epoch(2, members=[0])
    assert_same(fleet.update(make_weights(), members=[0])[0], make_weights())


def test_a_wrong_checksum_is_refused_and_the_epoch_goes_on(fleet: GeneratorPool) -> None:
    fleet.open_epoch(1, members=[0])
    slots, sizes = buckets.plan([(name, t.shape, t.dtype) for name, t in make_weights()], bucket_bytes=256)
    sums = buckets.checksums(buckets.pack(make_weights(), slots, sizes=sizes))
    sums[1] ^= 1
    with pytest.raises(WeightTransferError, match=f"bucket 1 of {len(sums)} must have checksum .* nothing was loaded"):
        fleet.update(make_weights(), members=[0], checksums=sums, timeout_s=2.0)
    assert_same(fleet.update(make_weights(), members=[0])[0], make_weights())


def test_weights_do_not_travel_without_an_epoch(fleet: GeneratorPool) -> None:
    with pytest.raises(WeightTransferError, match="must be open"):
        fleet.sender.broadcast([], timeout_s=1.0)
    with pytest.raises(WeightTransferError, match="must be open"):
        fleet.receivers[0].receive([], bucket_bytes=[], checksums=[], timeout_s=1.0)


def test_after_close_no_weights_travel(fleet: GeneratorPool) -> None:
    fleet.open_epoch(1, members=[0])
    fleet.close()
    fleet.close()
    with pytest.raises(WeightTransferError, match="must be open"):
        fleet.sender.broadcast([], timeout_s=1.0)
    with pytest.raises(WeightTransferError, match="must be open"):
        fleet.receivers[0].receive([], bucket_bytes=[], checksums=[], timeout_s=1.0)


def test_a_receiver_does_not_wait_for_ever_for_an_epoch(fleet: GeneratorPool) -> None:
    started = time.monotonic()
    with pytest.raises(WeightTransferError, match="weight epoch 7"):
        fleet.receivers[0].open_epoch(fleet.opening(7, num_members=1, timeout_s=0.3), rank=1)
    assert time.monotonic() - started < 3.0


def test_a_receiver_does_not_wait_for_ever_for_a_broadcast(fleet: GeneratorPool) -> None:
    fleet.open_epoch(1, members=[0])
    started = time.monotonic()
    with pytest.raises(WeightTransferError, match="weight epoch 1"):
        fleet.receivers[0].receive([], bucket_bytes=[64], checksums=[0], timeout_s=0.3)
    assert time.monotonic() - started < 3.0


# --- process groups --------------------------------------------------------------------------------------------------
def test_a_missing_member_is_named_to_all_who_came(gloo: GeneratorPool) -> None:
    opening = gloo.opening(1, num_members=3, timeout_s=PATIENCE_S)
    with ThreadPoolExecutor() as threads:
        joins = [threads.submit(gloo.receivers[i].open_epoch, opening, rank=rank) for i, rank in enumerate([1, 3])]
        started = time.monotonic()
        with pytest.raises(WeightTransferError, match="epoch 1, rank 0 of 4: gather failed: rank 2 did not arrive"):
            gloo.sender.open_epoch(1, num_members=3, timeout_s=0.5)
        for join in joins:
            with pytest.raises(WeightTransferError, match="rank 2 did not arrive"):
                join.result(PATIENCE_S)
    assert time.monotonic() - started < 3.0
    gloo.open_epoch(2, members=[0, 2])
    assert_same(gloo.update(make_weights(), members=[0, 2])[1], make_weights())


def test_a_member_that_comes_too_late_learns_it_at_once(gloo: GeneratorPool) -> None:
    with pytest.raises(WeightTransferError):
        gloo.sender.open_epoch(1, num_members=1, timeout_s=0.1)
    started = time.monotonic()
    with pytest.raises(WeightTransferError, match="rank 1 did not arrive in time"):
        gloo.receivers[0].open_epoch(gloo.opening(1, num_members=1), rank=1)
    assert time.monotonic() - started < 3.0


def test_a_learner_that_is_gone_is_told_at_once(gloo: GeneratorPool) -> None:
    opening = gloo.opening(1, num_members=1)
    gloo.sender.close()
    started = time.monotonic()
    with pytest.raises(WeightTransferError, match=r"reach the learner's rendezvous store at 127\.0\.0\.1"):
        gloo.receivers[0].open_epoch(opening, rank=1)
    assert time.monotonic() - started < 3.0


def test_a_member_that_leaves_fails_the_broadcast_for_all(gloo: GeneratorPool) -> None:
    gloo.open_epoch(1, members=[0, 1])
    gloo.receivers[1].close()
    started = time.monotonic()
    with pytest.raises(WeightTransferError, match=r"epoch 1, rank 0 of 3: broadcast of bucket \d+ of 64"):
        gloo.sender.broadcast([torch.zeros(1 << 20, dtype=torch.uint8)] * 64, timeout_s=PATIENCE_S)
    with pytest.raises(WeightTransferError, match="epoch 1, rank 1 of 3: broadcast of bucket"):
        gloo.receivers[0].receive([], bucket_bytes=[1 << 20] * 64, checksums=[0] * 64, timeout_s=PATIENCE_S)
    assert time.monotonic() - started < PATIENCE_S / 2
    with pytest.raises(WeightTransferError, match="must be open"):
        gloo.sender.broadcast([], timeout_s=1.0)
    gloo.open_epoch(2, members=[0])
    assert_same(gloo.update(make_weights(), members=[0])[0], make_weights())


def test_the_rendezvous_listens_on_its_host_alone(gloo: GeneratorPool) -> None:
    address = gloo.sender.address
    listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert (HOST, address[1]) in listening
    gloo.open_epoch(1, members=[0])
    assert gloo.sender.address == address


def test_a_port_in_use_is_named() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(WeightTransferError, match=f"must be an address of this machine .*{port}"):
            CollectiveSender(HOST, device="cpu", port=port)


def test_staging_memory_is_used_again(gloo: GeneratorPool) -> None:
    gloo.open_epoch(1, members=[0])
    first = gloo.update(make_weights(1), members=[0])[0]
    second = gloo.update(make_weights(2), members=[0])[0]
    assert [t.data_ptr() for _, t in first] == [t.data_ptr() for _, t in second]


def test_torchs_default_group_is_left_alone(gloo: GeneratorPool, tmp_path: Path) -> None:
    # Tests of the training engines in the same process may have made one already, and keep it.
    is_ours = not dist.is_initialized()
    if is_ours:
        store = dist.FileStore(str(tmp_path / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    default = dist.group.WORLD
    try:
        gloo.open_epoch(1, members=[0, 1])
        assert_same(gloo.update(make_weights(), members=[0, 1])[0], make_weights())
        assert dist.group.WORLD is default
        ones = torch.ones(2)
        dist.all_reduce(ones)
        assert torch.equal(ones, torch.ones(2))
    finally:
        if is_ours:
            dist.destroy_process_group()


def test_a_hundred_epochs_leave_no_threads_and_no_files_behind(gloo: GeneratorPool) -> None:
    process = psutil.Process()

    def rounds(first: int, count: int) -> tuple[int, int]:
        for epoch in range(first, first + count):
            members = [0, 1, 2][: epoch % 3 + 1]
            gloo.open_epoch(epoch, members=members)
            gloo.update(make_weights(), members=members)
        for end in gloo.receivers:
            end.close()
        gloo.sender.open_epoch(first + count, num_members=0, timeout_s=1.0)
        return process.num_fds(), process.num_threads()

    before = rounds(1, 5)
    assert rounds(10, 100) == before
