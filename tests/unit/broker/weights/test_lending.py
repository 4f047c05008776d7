"""A version is lent while it arrives: each bucket once it is verified, the deltas once all buckets are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.broker.errors import AlteredWeightsError, NotYetError, WeightTransferError
from slipstream.broker.messages import TensorSlot
from slipstream.broker.weights import buckets as flat
from slipstream.broker.weights import delta
from slipstream.broker.weights.delta import Delta
from slipstream.broker.weights.host_weights import HostWeights, digest
from slipstream.broker.weights.snapshots import Manifest, SnapshotStore
from tests.cases import cases
from tests.unit.broker.weight_versions import BUCKET_BYTES, make_version

NAMES = [f"bucket-000{index}.bin" for index in range(3)]


class WatchedFiles:
    """A snapshot store that calls `on_read` before each file, and can damage one. Implements WeightFiles."""

    def __init__(self, folder: Path, *versions: int) -> None:
        self.store = SnapshotStore(folder)
        self.num_arrived = 0
        for version in versions:
            self.store.put(*make_version(version, moved=100 * version), with_delta=True)
        self.on_read: Callable[[str], None] = lambda name: None
        self.damaged = ""
        self.names: list[str] = []

    def find(self, checksum: str, *, timeout_s: float = 0.0) -> int | None:
        return self.store.find(checksum)

    def newest(self, *, timeout_s: float = 0.0) -> int | None:
        return self.store.newest()

    def read(self, version: int, name: str, *, timeout_s: float = 0.0) -> bytes:
        content = bytearray(self.store.size_bytes(version, name))
        self.read_into(version, name, memoryview(content))
        return bytes(content)

    def read_into(self, version: int, name: str, into: memoryview, *, timeout_s: float = 0.0) -> None:
        self.on_read(name)
        self.names.append(name)
        self.store.read_into(version, name, into)
        self.num_arrived += len(into)
        if name == self.damaged:
            into[-1] ^= 0xFF


def fetch(weights: HostWeights, files: WatchedFiles, version: int, *, is_lent: bool = True) -> None:
    manifest = Manifest.of(make_version(version, moved=100 * version)[0])
    with weights.lending(manifest if is_lent else None, with_deltas=True):
        weights.update_to(files, manifest, with_deltas=True, timeout_s=1.0)


def lent(weights: HostWeights, version: int, name: str) -> bytes:
    return weights.read_part(version, name, offset=0, num_bytes=weights.size_bytes(version, name))


def bucket(version: int, index: int) -> bytes:
    return make_version(version, moved=100 * version)[1][index].numpy().tobytes()


def test_each_bucket_is_lent_once_it_is_verified(tmp_path: Path) -> None:
    files, weights = WatchedFiles(tmp_path, 1), HostWeights()
    seen: list[list[bool]] = []

    def look(_: str) -> None:
        seen.append([])
        for name in NAMES:
            try:
                seen[-1].append(lent(weights, 1, name) == bucket(1, NAMES.index(name)))
            except NotYetError as later:
                seen[-1].append(later.num_bytes != BUCKET_BYTES * (len(seen) - 1))

    files.on_read = look
    fetch(weights, files, 1)
    assert seen == [[False, False, False], [True, False, False], [True, True, False]]
    assert [lent(weights, 1, name) for name in NAMES] == [bucket(1, index) for index in range(3)]
    assert weights.find(flat.combine(make_version(1, moved=100)[0].checksums)) == weights.newest() == 1


def test_a_bucket_that_is_being_overwritten_is_not_lent_any_more(tmp_path: Path) -> None:
    files, weights = WatchedFiles(tmp_path, 1), HostWeights()
    fetch(weights, files, 1)
    other = SnapshotStore(tmp_path / "other")
    other.put(*make_version(2, seed=3))
    manifest = Manifest.of(make_version(2, seed=3)[0])
    with weights.lending(manifest):
        with pytest.raises(WeightTransferError, match="must be lent here, got version 2"):
            lent(weights, 1, NAMES[0])
        weights.update_to(other, manifest, with_deltas=False, timeout_s=1.0)


def test_nothing_is_lent_unasked(tmp_path: Path) -> None:
    files, weights = WatchedFiles(tmp_path, 1), HostWeights()
    fetch(weights, files, 1, is_lent=False)
    assert weights.newest() is None
    fetch(weights, files, 1)
    files.store.put(*make_version(2, moved=200), with_delta=True)
    fetch(weights, files, 2, is_lent=False)
    assert weights.newest() is None
    fetch(weights, files, 2)
    weights.release()
    assert weights.newest() is None


def test_deltas_are_lent_once_all_is_verified_and_of_the_newest_two_versions(tmp_path: Path) -> None:
    files, weights = WatchedFiles(tmp_path, 1), HostWeights()
    fetch(weights, files, 1)
    with pytest.raises(WeightTransferError, match=r"delta\.json of version 1 must be lent here"):
        lent(weights, 1, "delta.json")
    waited: list[bool] = []

    def look(_: str) -> None:
        with pytest.raises(NotYetError):
            lent(weights, 2, "delta.json")
        waited.append(True)

    for version in (2, 3, 4):
        files.store.put(*make_version(version, moved=100 * version), with_delta=True)
        files.on_read = look if version == 2 else lambda _: None
        fetch(weights, files, version)
    assert waited
    for version in (3, 4):
        assert lent(weights, version, "delta.json") == files.store.read(version, "delta.json")
        assert lent(weights, version, "delta-0001.bin") == files.store.read(version, "delta-0001.bin")
    with pytest.raises(WeightTransferError, match=r"delta\.json of version 2"):
        lent(weights, 2, "delta.json")


def test_a_fetch_or_a_delta_that_failed_midway_lends_nothing_and_is_continued_from_another_source(tmp_path: Path):
    files, weights = WatchedFiles(tmp_path, 1), HostWeights()
    files.damaged = NAMES[2]
    with pytest.raises(AlteredWeightsError, match="bucket 2 of 3"):
        fetch(weights, files, 1)
    assert weights.newest() is None
    for name in NAMES:
        with pytest.raises(WeightTransferError, match="got nothing"):
            lent(weights, 1, name)
    files.damaged, files.names = "", []
    fetch(weights, files, 1)
    assert files.names == NAMES[2:]
    update, packed = make_version(2, moved=200)
    files.store.put(update, packed, with_delta=True)
    manifest, digests = Manifest.of(update), [digest(bucket) for bucket in packed]
    files.damaged, files.names = "delta-0001.bin", []
    with pytest.raises(AlteredWeightsError, match="a delta must arrive as it was sent"):
        weights.update_to(files, manifest, with_deltas=True, timeout_s=1.0, digests=digests)
    files.damaged = ""
    weights.update_to(files, manifest, with_deltas=True, timeout_s=1.0, digests=digests)
    assert all(torch.equal(got, expected) for got, expected in zip(weights.tensors, packed, strict=True))
    # The bucket whose delta failed is read whole: its bytes are unknown.
    assert files.names[3:] == ["delta.json", NAMES[1], "delta-0002.bin"]


def test_only_files_of_the_lent_version_are_lent_and_bytes_of_another_digest_are_refused(tmp_path: Path) -> None:
    files, weights = WatchedFiles(tmp_path, 1), HostWeights()
    fetch(weights, files, 1)
    for version, name in ((2, NAMES[0]), (1, "bucket-0003.bin"), (1, "../secret"), (1, "manifest.json"), (1, "")):
        with pytest.raises(WeightTransferError, match="must be lent here"):
            weights.size_bytes(version, name)
    files, weights = WatchedFiles(tmp_path, 1), HostWeights()
    update, packed = make_version(1, moved=100)
    digests = [digest(packed[0]), digest(packed[1]), bytes(32)]
    with pytest.raises(AlteredWeightsError, match="bucket 2 of version 1 must have the learner's digest"):
        weights.update_to(files, Manifest.of(update), with_deltas=False, timeout_s=1.0, digests=digests)
    assert weights.checksum == ""


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
    slots = [TensorSlot("a", [2], "float32", 0, 0), TensorSlot("b", [2], "bfloat16", 0, 64)]
    slots += [TensorSlot("c", [2], "float64", 1, 0)]
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


@cases(
    "changes",
    {"blocks": []},
    {"blocks": [delta.Block(2**40, 10, 0)]},
    {"blocks": [delta.Block(1, 2**40, 0)]},
    {"blocks": [delta.Block(3, 3, 0)]},
    {"blocks": [delta.Block(41, 41, 0)]},
    {"width": 3},
    {"width": 8},
)
def test_an_inconsistent_delta_is_refused(changes: dict[str, Any]) -> None:
    base, entry, payload = make_small_delta()
    if "blocks" in changes:
        changes["blocks"] = [msgspec.structs.replace(block, num_bytes=len(payload)) for block in changes["blocks"]]
    with pytest.raises(WeightTransferError):
        delta.apply(msgspec.structs.replace(entry, **changes), payload, onto=base)
