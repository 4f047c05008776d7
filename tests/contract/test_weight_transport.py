import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import Member, OpenEpoch
from slipstream.broker.weights import buckets
from slipstream.broker.weights.collective import CollectiveReceiver, CollectiveSender
from slipstream.broker.weights.transport import WeightReceiver, WeightSender
from tests.contract.test_channels import eventually
from tests.unit.broker.weight_versions import announce, pack

TIMEOUT_S = 10.0
HOST = "127.0.0.1"
Named = list[tuple[str, Tensor]]


class Group:
    """A sender and receivers, each on its own thread."""

    def __init__(self, sender: WeightSender, receivers: list[WeightReceiver]) -> None:
        self.sender = sender
        self.receivers = receivers
        self._threads = ThreadPoolExecutor(max_workers=len(receivers) + 1)

    def opening(self, epoch: int, *, num_members: int, timeout_s: float = TIMEOUT_S) -> OpenEpoch:
        host, port = self.sender.address
        members = [Member(peer_id=f"generator-{i}", incarnation="0") for i in range(num_members)]
        return OpenEpoch(epoch=epoch, members=members, host=host, port=port, timeout_s=timeout_s)

    def open_epoch(self, epoch: int, *, members: list[int]) -> None:
        opening = self.opening(epoch, num_members=len(members))
        ranked = enumerate((self.receivers[member] for member in members), start=1)
        joins = [self._threads.submit(each.open_epoch, opening, rank=rank) for rank, each in ranked]
        self.sender.open_epoch(epoch, num_members=len(members), timeout_s=TIMEOUT_S)
        for join in joins:
            join.result(TIMEOUT_S)

    def update(self, tensors: Named, *, members: list[int], bucket_bytes: int = 256, **changes: Any) -> list[Named]:
        """Broadcast; returns the result of each receiver, or raises its error."""
        slots, sizes = buckets.plan([(name, t.shape, t.dtype) for name, t in tensors], bucket_bytes=bucket_bytes)
        packed = pack(tensors, slots, sizes)
        announced = announce(slots, sizes, buckets.checksums(packed), timeout_s=TIMEOUT_S)
        update, receivers = msgspec.structs.replace(announced, **changes), [self.receivers[each] for each in members]
        receipts = [self._threads.submit(each.receive, update, cancelled=Event()) for each in receivers]
        self.sender.broadcast(packed, timeout_s=TIMEOUT_S)
        for bucket in packed:
            bucket.zero_()
        return [buckets.unpack(receipt.result(TIMEOUT_S).tensors, slots) for receipt in receipts]

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()
        self.sender.close()
        self._threads.shutdown()


@pytest.fixture
def group() -> Iterator[Group]:
    opened = Group(CollectiveSender(HOST, device="cpu"), [CollectiveReceiver(device="cpu") for _ in range(3)])
    yield opened
    opened.close()


def make_weights(seed: int = 0) -> Named:
    """About 3 kB of tensors, one of each kind of dtype."""
    generator = torch.Generator().manual_seed(seed)
    return [
        ("embed.weight", torch.randn(32, 16, generator=generator)),
        ("norm.weight", torch.randn(16, generator=generator).to(torch.bfloat16)),
        ("table", torch.randint(-(2**60), 2**60, (7, 3), generator=generator)),
        ("quantized", torch.randint(-128, 128, (5,), generator=generator, dtype=torch.int8)),
        ("scale", torch.tensor(0.5 + seed)),
    ]


def assert_same(received: Named, sent: Named) -> None:
    assert [name for name, _ in received] == [name for name, _ in sent]
    for (name, got), (_, expected) in zip(received, sent, strict=True):
        assert got.dtype == expected.dtype, name
        assert torch.equal(got, expected), name


def test_weights_arrive_bit_for_bit_and_in_the_same_memory_in_many_updates_of_an_epoch(group: Group) -> None:
    group.open_epoch(1, members=[0, 1, 2])
    places = set()
    for seed in range(5):
        for received in group.update(make_weights(seed), members=[0, 1, 2]):
            assert_same(received, make_weights(seed))
            places.add(tuple(tensor.data_ptr() for _, tensor in received))
    assert len(places) == 3


def test_membership_changes_from_epoch_to_epoch(group: Group) -> None:
    for epoch, members in enumerate([[0], [], [0, 1, 2], [2, 1], [1], [0, 2]]):
        group.open_epoch(epoch, members=members)
        for received in group.update(make_weights(epoch), members=members):
            assert_same(received, make_weights(epoch))


def test_a_wrong_checksum_is_refused_and_the_epoch_stays_open(group: Group) -> None:
    group.open_epoch(1, members=[0])
    slots, sizes = buckets.plan([(name, t.shape, t.dtype) for name, t in make_weights()], bucket_bytes=256)
    sums = buckets.checksums(pack(make_weights(), slots, sizes))
    sums[1] ^= 1
    with pytest.raises(WeightTransferError, match=f"bucket 1 of {len(sums)} must have checksum .* nothing was loaded"):
        group.update(make_weights(), members=[0], checksums=sums, timeout_s=2.0)
    assert_same(group.update(make_weights(), members=[0])[0], make_weights())


def test_a_broadcast_requires_an_open_epoch(group: Group) -> None:
    def assert_refused_at_both_ends() -> None:
        with pytest.raises(WeightTransferError, match="must be open"):
            group.sender.broadcast([], timeout_s=1.0)
        with pytest.raises(WeightTransferError, match="must be open"):
            group.receivers[0].receive(announce([], [], []), cancelled=Event())

    assert_refused_at_both_ends()
    group.open_epoch(1, members=[0])
    group.close()
    group.close()
    assert_refused_at_both_ends()


def test_the_waits_of_a_receiver_for_an_epoch_and_a_broadcast_are_bounded(group: Group) -> None:
    started = time.monotonic()
    with pytest.raises(WeightTransferError, match="weight epoch 7"):
        group.receivers[1].open_epoch(group.opening(7, num_members=1, timeout_s=0.3), rank=1)
    group.open_epoch(1, members=[0])
    with pytest.raises(WeightTransferError, match="weight epoch 1"):
        group.receivers[0].receive(announce([], [64], [0], timeout_s=0.3), cancelled=Event())
    assert time.monotonic() - started < TIMEOUT_S / 2


def test_a_missing_member_is_named_to_all_others(group: Group) -> None:
    opening = group.opening(1, num_members=3, timeout_s=TIMEOUT_S)
    with ThreadPoolExecutor() as threads:
        joins = [threads.submit(group.receivers[i].open_epoch, opening, rank=rank) for i, rank in enumerate([1, 3])]
        started = time.monotonic()
        with pytest.raises(WeightTransferError, match="epoch 1, rank 0 of 4: gather failed: rank 2 did not arrive"):
            group.sender.open_epoch(1, num_members=3, timeout_s=0.5)
        for join in joins:
            with pytest.raises(WeightTransferError, match="rank 2 did not arrive"):
                join.result(TIMEOUT_S)
    assert time.monotonic() - started < TIMEOUT_S / 2
    group.open_epoch(2, members=[0, 2])
    assert_same(group.update(make_weights(), members=[0, 2])[1], make_weights())


def test_a_late_member_fails_at_once_and_so_does_one_that_cannot_reach_the_learner(group: Group) -> None:
    with pytest.raises(WeightTransferError):
        group.sender.open_epoch(1, num_members=1, timeout_s=0.1)
    started, opening = time.monotonic(), group.opening(1, num_members=1)
    with pytest.raises(WeightTransferError, match="rank 1 did not arrive in time"):
        group.receivers[0].open_epoch(opening, rank=1)
    group.sender.close()
    with pytest.raises(WeightTransferError, match=r"reach the learner's rendezvous store at 127\.0\.0\.1"):
        group.receivers[0].open_epoch(opening, rank=1)
    assert time.monotonic() - started < TIMEOUT_S / 2


def test_a_member_that_leaves_fails_the_broadcast_for_all(group: Group) -> None:
    group.open_epoch(1, members=[0, 1])
    group.receivers[1].close()
    started = time.monotonic()
    with pytest.raises(WeightTransferError, match=r"epoch 1, rank 0 of 3: broadcast of bucket \d+ of 64"):
        group.sender.broadcast([torch.zeros(1 << 20, dtype=torch.uint8)] * 64, timeout_s=TIMEOUT_S)
    with pytest.raises(WeightTransferError, match="epoch 1, rank 1 of 3: broadcast of bucket"):
        group.receivers[0].receive(announce([], [1 << 20] * 64, [0] * 64, timeout_s=TIMEOUT_S), cancelled=Event())
    assert time.monotonic() - started < TIMEOUT_S / 2
    with pytest.raises(WeightTransferError, match="must be open"):
        group.sender.broadcast([], timeout_s=1.0)
    group.open_epoch(2, members=[0])
    assert_same(group.update(make_weights(), members=[0])[0], make_weights())


def test_the_rendezvous_listens_on_its_host_only_and_a_port_in_use_is_named(group: Group) -> None:
    address = group.sender.address
    connections = psutil.Process().net_connections("tcp")
    assert (HOST, address[1]) in {tuple(each.laddr) for each in connections if each.status == psutil.CONN_LISTEN}
    group.open_epoch(1, members=[0])
    assert group.sender.address == address
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(WeightTransferError, match=f"must be an address of this machine .*{port}"):
            CollectiveSender(HOST, device="cpu", ports=[port])


def test_the_default_group_of_torch_is_not_touched(group: Group, tmp_path: Path) -> None:
    # Tests of the training engines in the same process may have created one already.
    is_ours = not dist.is_initialized()
    if is_ours:
        store = dist.FileStore(str(tmp_path / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    default = dist.group.WORLD
    try:
        group.open_epoch(1, members=[0, 1])
        assert_same(group.update(make_weights(), members=[0, 1])[0], make_weights())
        assert dist.group.WORLD is default
        ones = torch.ones(2)
        dist.all_reduce(ones)
        assert torch.equal(ones, torch.ones(2))
    finally:
        if is_ours:
            dist.destroy_process_group()


def test_thirty_epochs_leave_no_threads_and_no_files_behind(group: Group) -> None:
    process = psutil.Process()

    def rounds(first: int, count: int) -> tuple[int, int]:
        for epoch in range(first, first + count):
            members = [0, 1, 2][: epoch % 3 + 1]
            group.open_epoch(epoch, members=members)
            group.update(make_weights(), members=members)
        for end in group.receivers:
            end.close()
        group.sender.open_epoch(first + count, num_members=0, timeout_s=1.0)
        return process.num_fds(), process.num_threads()

    before = rounds(1, 5)
    rounds(10, 30)
    # The thread that closes a connection may outlive it by a moment.
    assert eventually(lambda: process.num_fds() <= before[0] and process.num_threads() <= before[1])


def test_a_cancelled_receiver_leaves_the_broadcast(group: Group) -> None:
    group.open_epoch(1, members=[0])
    cancelled = Event()
    with ThreadPoolExecutor(1) as threads:
        update = announce([], [1 << 20] * 64, [0] * 64, timeout_s=TIMEOUT_S)
        receiving = threads.submit(group.receivers[0].receive, update, cancelled=cancelled)
        cancelled.set()
        with pytest.raises(WeightTransferError):
            group.sender.broadcast([torch.zeros(1 << 20, dtype=torch.uint8)] * 64, timeout_s=TIMEOUT_S)
        with pytest.raises(WeightTransferError, match=r"bucket 0 of 64 .* it was aborted"):
            receiving.result(TIMEOUT_S)
