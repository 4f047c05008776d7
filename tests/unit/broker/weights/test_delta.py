"""Deltas reproduce every bit and refuse damaged input."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import TensorSlot
from slipstream.broker.weights import delta
from slipstream.broker.weights.delta import Delta

SPECIAL = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x3F80, 0x0001]
"""bfloat16: zeros, infinities, NaNs, one, the smallest."""
WIDTHS = st.sampled_from([1, 2, 4, 8])


@st.composite
def two_versions(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    """Arbitrary bytes, an arbitrary share of which changes."""
    width = draw(WIDTHS)
    num_bytes = width * draw(st.integers(0, 3000))
    seed, share = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from([0.0, 0.001, 0.02, 0.5, 1.0]))
    chance = np.random.default_rng(seed)
    base = chance.integers(0, 256, num_bytes, dtype=np.uint8)
    new = np.where(chance.random(num_bytes) < share, chance.integers(0, 256, num_bytes, dtype=np.uint8), base)
    return torch.from_numpy(base), torch.from_numpy(new), width


def assert_round_trip(base: Tensor, new: Tensor, *, width: int) -> delta.BucketDelta:
    """Encode and apply a delta; returns it after a round trip through JSON."""
    entry, payload = delta.encode(base, new, width=width)
    entry = msgspec.json.decode(msgspec.json.encode(entry), type=delta.BucketDelta)
    if entry.is_full:
        assert payload == b""
        assert entry.size_bytes == new.numel()
        return entry
    assert entry.size_bytes == len(payload) < max(new.numel(), 1)
    changed = base.clone()
    delta.apply(entry, payload, onto=changed)
    assert torch.equal(changed, new)
    return entry


@settings(deadline=None)
@given(two_versions())
def test_every_bit_is_reproduced(versions: tuple[Tensor, Tensor, int]) -> None:
    base, new, width = versions
    assert_round_trip(base, new, width=width)


@settings(deadline=None)
@given(st.data())
def test_floats_of_every_kind_are_reproduced(data: st.DataObject) -> None:
    bits = arrays.arrays(np.uint16, 200, elements=st.sampled_from(SPECIAL))
    base, new = (torch.from_numpy(data.draw(bits)).view(torch.uint8) for _ in range(2))
    # Padded with unchanged elements, so that the delta is smaller than the bucket.
    unchanged = torch.arange(4000).to(torch.int16).view(torch.uint8)
    assert not assert_round_trip(torch.cat([base, unchanged]), torch.cat([new, unchanged]), width=2).is_full


def test_the_size_of_a_delta_follows_the_change() -> None:
    bucket = torch.randint(0, 256, (4096,), dtype=torch.uint8)
    assert assert_round_trip(bucket, bucket.clone(), width=2).size_bytes == 0
    base = torch.randn(10_000).to(torch.bfloat16)
    steps_of_one = (base.view(torch.int16) + 1).view(torch.uint8)
    assert assert_round_trip(base.view(torch.uint8), steps_of_one, width=2).size_bytes < 1000
    base, new = (torch.randint(0, 256, (10_000,), dtype=torch.uint8) for _ in range(2))
    assert assert_round_trip(base, new, width=2).is_full
    empty = torch.zeros(0, dtype=torch.uint8)
    for width in (1, 2, 4, 8):
        entry, payload = delta.encode(empty, empty, width=width)
        assert (payload, entry.blocks) == (b"", [])
        delta.apply(entry, payload, onto=empty)


@pytest.mark.parametrize("index", [0, 1, -1, delta.BLOCK_ELEMENTS - 1, delta.BLOCK_ELEMENTS, 255, 256])
def test_a_single_change_is_reproduced_at_any_index(index: int) -> None:
    base = torch.zeros(2 * (2 * delta.BLOCK_ELEMENTS + 3), dtype=torch.uint8)
    new = base.clone()
    new.view(torch.int16)[index] = -3
    assert assert_round_trip(base, new, width=2).size_bytes < 100


def test_the_smallest_element_decides_the_width_and_other_sizes_or_bases_are_refused() -> None:
    slots = [
        TensorSlot("a", [2], "float32", 0, 0),
        TensorSlot("b", [2], "bfloat16", 0, 64),
        TensorSlot("c", [2], "float64", 1, 0),
    ]
    assert [delta.width_of(bucket, slots) for bucket in range(3)] == [2, 8, 1]
    with pytest.raises(WeightTransferError, match="must have the same size, got 8 and 16"):
        delta.encode(torch.zeros(8, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8), width=2)
    step = Delta(version=13, checksum="dd", base_version=12, base_checksum="cc", buckets=[])
    step.check_base("cc")
    words = "applied to version 12 with checksum cc, got weights with checksum ab"
    with pytest.raises(WeightTransferError, match=words):
        step.check_base("ab")
    with pytest.raises(WeightTransferError, match="none held"):
        step.check_base("")


def make_small_delta() -> tuple[Tensor, delta.BucketDelta, bytes]:
    base = torch.zeros(2000, dtype=torch.uint8)
    new = base.clone()
    new[::50] = 1
    return base, *delta.encode(base, new, width=2)


def test_a_flipped_bit_and_bytes_that_are_not_zstd_are_refused_before_anything_changes() -> None:
    base, entry, payload = make_small_delta()
    flipped = bytes([payload[0], payload[1] ^ 1]) + payload[2:]
    with pytest.raises(WeightTransferError, match="must arrive as it was sent"):
        delta.apply(entry, flipped, onto=base)
    assert not base.any()
    base, entry, _ = make_small_delta()
    noise = bytes(entry.size_bytes)
    forged = msgspec.structs.replace(entry, checksum=xxhash.xxh3_64_intdigest(noise))
    with pytest.raises(WeightTransferError, match="must be readable"):
        delta.apply(forged, noise, onto=base)


@pytest.mark.parametrize(
    "changes",
    [
        {"blocks": []},
        {"blocks": [delta.Block(2**40, 10, 0)]},
        {"blocks": [delta.Block(1, 2**40, 0)]},
        {"blocks": [delta.Block(3, 3, 0)]},
        {"blocks": [delta.Block(41, 41, 0)]},
        {"width": 3},
        {"width": 8},
    ],
)
def test_an_inconsistent_delta_is_refused(changes: dict[str, Any]) -> None:
    base, entry, payload = make_small_delta()
    if "blocks" in changes:
        changes["blocks"] = [msgspec.structs.replace(block, num_bytes=len(payload)) for block in changes["blocks"]]
    with pytest.raises(WeightTransferError):
        delta.apply(msgspec.structs.replace(entry, **changes), payload, onto=base)
