"""Weights handed over within one process."""

from threading import Event

import pytest
import torch

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import OpenEpoch
from slipstream.broker.weights import buckets
from slipstream.broker.weights.transport import MemoryReceiver, MemorySender
from tests.unit.broker.weight_versions import announce, pack

TENSORS = [("a", torch.arange(6.0).reshape(2, 3)), ("b", torch.ones(3, dtype=torch.int8))]


def opening(epoch: int) -> OpenEpoch:
    return OpenEpoch(epoch=epoch, members=[], host="memory", port=0, timeout_s=1.0)


def test_weights_arrive_bit_for_bit_and_the_sender_may_go_on_with_its_own() -> None:
    receiver = MemoryReceiver(sender := MemorySender())
    slots, sizes = buckets.plan([(name, t.shape, t.dtype) for name, t in TENSORS], bucket_bytes=16)
    for epoch in (1, 2):
        sender.open_epoch(epoch, num_members=1, timeout_s=1.0)
        receiver.open_epoch(opening(epoch), rank=1)
        packed = pack(TENSORS, slots, sizes)
        checksums = buckets.checksums(packed)
        sender.broadcast(packed, timeout_s=1.0)
        for bucket in packed:
            bucket.zero_()
        received = buckets.unpack(receiver.receive(announce(slots, sizes, checksums), cancelled=Event()).tensors, slots)
        assert all(got.equal(sent) for (_, got), (_, sent) in zip(received, TENSORS, strict=True))
        with pytest.raises(WeightTransferError, match="checksum"):
            receiver.receive(announce(slots, sizes, [0] * len(checksums)), cancelled=Event())
        with pytest.raises(WeightTransferError, match="announced sizes"):
            receiver.receive(announce(slots, [1], checksums), cancelled=Event())


def test_without_its_epoch_neither_end_does_anything() -> None:
    receiver = MemoryReceiver(sender := MemorySender())
    with pytest.raises(WeightTransferError, match="must be open"):
        sender.broadcast([], timeout_s=1.0)
    sender.open_epoch(1, num_members=1, timeout_s=1.0)
    for epoch, rank in ((2, 1), (1, 2)):
        with pytest.raises(WeightTransferError, match="takes ranks 1 to 1"):
            receiver.open_epoch(opening(epoch), rank=rank)
    receiver.open_epoch(opening(1), rank=1)
    sender.close()
    with pytest.raises(WeightTransferError, match="must be open"):
        receiver.receive(announce([], [], []), cancelled=Event())
