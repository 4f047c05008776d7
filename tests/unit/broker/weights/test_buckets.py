"""Flat buckets hold tensors exactly, in order and aligned, and checksums detect any change."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import TensorSlot
from slipstream.broker.weights import buckets
from tests.unit.broker.weight_versions import pack

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool]


def make_tensor(shape: list[int], dtype: torch.dtype, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


def layout(tensors: list[tuple[str, Tensor]], *, bucket_bytes: int) -> tuple[list[TensorSlot], list[int]]:
    return buckets.plan([(name, t.shape, t.dtype) for name, t in tensors], bucket_bytes=bucket_bytes)


def same(left: list[tuple[str, Tensor]], right: list[tuple[str, Tensor]]) -> bool:
    return [name for name, _ in left] == [name for name, _ in right] and all(
        a.dtype == b.dtype and torch.equal(a, b) for (_, a), (_, b) in zip(left, right, strict=True)
    )


SHAPES = st.lists(st.integers(0, 7), max_size=3)


@settings(max_examples=60, deadline=None)
@given(
    specs=st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=12),
    bucket_bytes=st.sampled_from([64, 200, 1024, 1 << 20]),
)
def test_tensors_are_unpacked_as_they_were_packed(
    specs: list[tuple[list[int], torch.dtype]], bucket_bytes: int
) -> None:
    tensors = [(f"t{i}", make_tensor(shape, dtype, seed=i)) for i, (shape, dtype) in enumerate(specs)]
    slots, sizes = layout(tensors, bucket_bytes=bucket_bytes)
    packed = pack(tensors, slots, sizes)
    assert [bucket.numel() for bucket in packed] == sizes
    assert same(buckets.unpack(packed, slots), tensors)


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(0, 300), min_size=1, max_size=20), bucket_bytes=st.integers(1, 500))
def test_slots_are_ordered_aligned_disjoint_and_within_the_limit(sizes: list[int], bucket_bytes: int) -> None:
    slots, bucket_sizes = buckets.plan(
        [(f"t{i}", [size], torch.int8) for i, size in enumerate(sizes)], bucket_bytes=bucket_bytes
    )
    ends = [0] * len(bucket_sizes)
    occupied = [slot.bucket for slot, size in zip(slots, sizes, strict=True) if size > 0]
    for slot, size in zip(slots, sizes, strict=True):
        assert slot.offset % buckets.ALIGNMENT_BYTES == 0
        assert slot.offset >= ends[slot.bucket]
        ends[slot.bucket] = slot.offset + size
        assert ends[slot.bucket] <= bucket_bytes or occupied.count(slot.bucket) == 1
    assert ends == bucket_sizes
    assert [slot.bucket for slot in slots] == sorted(slot.bucket for slot in slots)


def test_a_tensor_larger_than_a_bucket_gets_its_own_and_names_must_be_unique() -> None:
    tensors = [("a", torch.zeros(4)), ("big", torch.zeros(1000)), ("b", torch.zeros(4)), ("c", torch.zeros(4))]
    slots, sizes = layout(tensors, bucket_bytes=128)
    assert [(slot.bucket, slot.offset) for slot in slots] == [(0, 0), (1, 0), (2, 0), (2, 64)]
    assert sizes == [16, 4000, 80]
    with pytest.raises(WeightTransferError, match="must be unique, got repeated: w"):
        layout([("w", torch.ones(3)), ("w", torch.ones(3))], bucket_bytes=1024)


def test_packing_casts_and_records_no_gradient_and_unpacked_tensors_are_views() -> None:
    source = torch.tensor([1.0, 2.5, 3.00001])
    slots, sizes = buckets.plan([("w", source.shape, torch.bfloat16)], bucket_bytes=64)
    (_, received) = buckets.unpack(pack([("w", source)], slots, sizes), slots)[0]
    assert received.dtype == torch.bfloat16
    assert torch.equal(received, source.to(torch.bfloat16))
    tensors = [("w", torch.ones(3))]
    slots, sizes = layout(tensors, bucket_bytes=64)
    packed = pack(tensors, slots, sizes)
    buckets.unpack(packed, slots)[0][1].fill_(7.0)
    assert torch.equal(buckets.unpack(packed, slots)[0][1], torch.full((3,), 7.0))
    parameter = torch.nn.Parameter(torch.ones(3))
    slots, sizes = layout([("w", parameter)], bucket_bytes=64)
    assert not pack([("w", parameter)], slots, sizes)[0].requires_grad


def test_buckets_are_overwritten_in_any_order_and_one_flipped_bit_changes_a_checksum() -> None:
    first = [("a", torch.ones(3)), ("b", torch.ones(100))]
    slots, sizes = layout(first, bucket_bytes=64)
    packed = pack(first, slots, sizes)
    second = [("b", torch.full((100,), 2.0)), ("a", torch.full((3,), 3.0))]
    buckets.pack(second, slots, into=packed)
    assert same(buckets.unpack(packed, slots), second[::-1])
    tensors = [("a", torch.ones(3)), ("b", torch.ones(100))]
    slots, sizes = layout(tensors, bucket_bytes=1024)
    left, right = (pack(tensors, slots, sizes) for _ in range(2))
    assert buckets.checksums(left) == buckets.checksums(right)
    right[0][5] ^= 1
    with pytest.raises(WeightTransferError, match="bucket 0 of 1 must have checksum"):
        buckets.verify(right, expected=buckets.checksums(left))
    assert buckets.checksums([torch.zeros(0, dtype=torch.uint8)]) == [0x2D06800538D394C2]


@pytest.mark.parametrize(
    ("given_tensors", "message"),
    [
        ([("w", torch.ones(3))], "every planned tensor must be packed: v not given"),
        ([("w", torch.ones(4)), ("v", torch.ones(1))], r"tensor w must match the plan, which has shape \[3\]"),
        ([("u", torch.ones(3))], r"tensor u must match the plan, which has no further slot"),
        ([("w", torch.ones(3)), ("w", torch.ones(3))], r"tensor w must match the plan, which has no further slot"),
    ],
)
def test_tensors_that_do_not_match_the_plan_are_refused(given_tensors: list[tuple[str, Tensor]], message: str) -> None:
    slots, sizes = layout([("w", torch.ones(3)), ("v", torch.ones(1))], bucket_bytes=1024)
    with pytest.raises(WeightTransferError, match=message):
        pack(given_tensors, slots, sizes)


@pytest.mark.parametrize(
    "slot",
    [
        TensorSlot("w", [5], "float32", 0, 0),
        TensorSlot("w", [1], "float32", 0, 64),
        TensorSlot("w", [1], "float32", 1, 0),
        TensorSlot("w", [1], "float32", -1, 0),
        TensorSlot("w", [1], "float32", 0, -64),
        TensorSlot("w", [1], "float32", 0, 4),
        TensorSlot("w", [-1], "float32", 0, 0),
        TensorSlot("w", [1], "load", 0, 0),
        TensorSlot("w", [1], "nonsense", 0, 0),
    ],
)
def test_a_slot_from_the_wire_cannot_reach_outside_its_bucket(slot: TensorSlot) -> None:
    with pytest.raises(WeightTransferError, match="tensor w must"):
        buckets.unpack([torch.zeros(16, dtype=torch.uint8)], [slot])
