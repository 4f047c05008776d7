"""A version is lent while it arrives: each bucket once it is verified, the deltas once all buckets are."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from slipstream.broker.errors import AlteredWeightsError, NotYetError, WeightTransferError
from slipstream.broker.weights import buckets as flat
from slipstream.broker.weights.host_weights import HostWeights, digest
from slipstream.broker.weights.snapshots import Manifest, SnapshotStore
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


def test_a_damaged_bucket_is_never_lent_and_ends_the_loan(tmp_path: Path) -> None:
    files, weights = WatchedFiles(tmp_path, 1), HostWeights()
    files.damaged = NAMES[1]
    with pytest.raises(AlteredWeightsError, match="bucket 1 of 3"):
        fetch(weights, files, 1)
    assert weights.newest() is None
    for name in NAMES:
        with pytest.raises(WeightTransferError, match="got nothing"):
            lent(weights, 1, name)


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


def test_a_fetch_that_failed_midway_is_continued_from_another_source(tmp_path: Path) -> None:
    files, weights = WatchedFiles(tmp_path, 1), HostWeights()
    files.damaged = NAMES[2]
    with pytest.raises(AlteredWeightsError):
        fetch(weights, files, 1)
    files.damaged, files.names = "", []
    fetch(weights, files, 1)
    assert files.names == NAMES[2:]


def test_a_delta_that_failed_midway_is_continued_from_another_source(tmp_path: Path) -> None:
    files, weights = WatchedFiles(tmp_path, 1), HostWeights()
    fetch(weights, files, 1)
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


def test_bytes_with_the_right_checksum_and_another_digest_are_refused(tmp_path: Path) -> None:
    files, weights = WatchedFiles(tmp_path, 1), HostWeights()
    update, packed = make_version(1, moved=100)
    digests = [digest(packed[0]), digest(packed[1]), bytes(32)]
    with pytest.raises(AlteredWeightsError, match="bucket 2 of version 1 must have the learner's digest"):
        weights.update_to(files, Manifest.of(update), with_deltas=False, timeout_s=1.0, digests=digests)
    assert weights.checksum == ""


def test_only_files_of_the_lent_version_are_lent(tmp_path: Path) -> None:
    files, weights = WatchedFiles(tmp_path, 1), HostWeights()
    fetch(weights, files, 1)
    for version, name in ((2, NAMES[0]), (1, "bucket-0003.bin"), (1, "../secret"), (1, "manifest.json"), (1, "")):
        with pytest.raises(WeightTransferError, match="must be lent here"):
            weights.size_bytes(version, name)
