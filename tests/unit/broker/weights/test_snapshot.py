"""A snapshot is complete or absent, and refused with a reason if it is damaged."""

from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.weights import buckets as flat
from slipstream.broker.weights import snapshots
from slipstream.broker.weights.snapshots import Manifest
from tests.fakes import no_file_above
from tests.unit.broker.weight_versions import make_slots, make_version


def write(path: Path, version: int = 12) -> tuple[Manifest, list[Tensor]]:
    update, packed = make_version(version)
    manifest = Manifest.of(update)
    snapshots.write(path, manifest, packed)
    return manifest, packed


def read(path: Path) -> list[Tensor]:
    manifest = snapshots.read_manifest(path)
    mapped = [snapshots.map_bucket(path, manifest, index) for index in range(len(manifest.checksums))]
    for index, bucket in enumerate(mapped):
        flat.check_bucket(bucket, index, expected=manifest.checksums)
    return mapped


def test_a_snapshot_is_read_back_bit_for_bit_into_memory_of_its_own(tmp_path: Path) -> None:
    manifest, packed = write(path := tmp_path / snapshots.folder_name(12))
    files = [*(f"bucket-000{index}.bin" for index in range(3)), "manifest.json"]
    assert sorted(file.name for file in path.iterdir()) == files
    assert snapshots.read_manifest(path) == manifest
    assert manifest.checksum == flat.combine(flat.checksums(packed))
    read(path)[0].zero_()
    assert all(torch.equal(got, expected) for got, expected in zip(read(path), packed, strict=True))
    assert [name for name, _ in flat.unpack(read(path), manifest.slots)] == [slot.name for slot in make_slots()[0]]


def test_empty_buckets_are_supported(tmp_path: Path) -> None:
    empty = [torch.zeros(0, dtype=torch.uint8)]
    sums = flat.checksums(empty)
    snapshots.write(tmp_path / "version-00000001", Manifest(1, flat.combine(sums), [], [0], sums), empty)
    assert [bucket.numel() for bucket in read(tmp_path / "version-00000001")] == [0]


def test_only_complete_versions_are_listed(tmp_path: Path) -> None:
    assert snapshots.versions(tmp_path / "absent") == []
    for name in ("version-00000012", "version-00000002", ".version-00000013.tmp", "other", "version-3"):
        (tmp_path / name).mkdir()
    assert snapshots.versions(tmp_path) == [2, 12]


@pytest.mark.parametrize("index", [0, 12345, -1])
def test_a_changed_byte_is_refused(tmp_path: Path, index: int) -> None:
    write(path := tmp_path / "version-00000012")
    content = bytearray((path / "bucket-0001.bin").read_bytes())
    content[index] ^= 1
    (path / "bucket-0001.bin").write_bytes(content)
    with pytest.raises(WeightTransferError, match=r"bucket 1 of 3 must have checksum .* nothing was loaded"):
        read(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    write(path := tmp_path / "version-00000012")
    (path / "bucket-0002.bin").unlink()
    with pytest.raises(WeightTransferError, match=r"must have its file .*bucket-0002\.bin"):
        read(path)
    (path / "manifest.json").unlink()
    with pytest.raises(WeightTransferError, match=r"must be at .* with its manifest\.json"):
        read(path)


@pytest.mark.parametrize("size", [0, 100, 40_000])
def test_a_file_of_another_size_is_refused(tmp_path: Path, size: int) -> None:
    write(path := tmp_path / "version-00000012")
    (path / "bucket-0000.bin").write_bytes(bytes(size))
    with pytest.raises(WeightTransferError, match=rf"bucket-0000\.bin must have 32768 bytes, got {size}"):
        read(path)


def test_an_inconsistent_manifest_is_refused(tmp_path: Path) -> None:
    manifest, _ = write(tmp_path / "version-00000012")
    for inconsistent in (
        msgspec.structs.replace(manifest, checksum="0" * 16),
        msgspec.structs.replace(manifest, checksums=[*manifest.checksums[:-1], 7]),
        msgspec.structs.replace(manifest, bucket_bytes=[1]),
    ):
        with pytest.raises(WeightTransferError, match="it is damaged"):
            snapshots.parse_manifest(msgspec.json.encode(inconsistent))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": "twelve"}'])
def test_an_undecodable_manifest_is_refused(content: bytes) -> None:
    with pytest.raises(WeightTransferError, match="must be readable"):
        snapshots.parse_manifest(content)


def test_a_full_disk_raises_and_leaves_nothing_behind(tmp_path: Path) -> None:
    before, _ = write(path := tmp_path / "version-00000012")
    update, packed = make_version(13)
    with (
        no_file_above(1000),
        pytest.raises(
            WeightTransferError,
            match=r"version 13 \(0 MiB\) must fit into .* free\), which holds .*, got .*: free some space",
        ),
    ):
        snapshots.write(tmp_path / "version-00000013", Manifest.of(update), packed)
    assert [file.name for file in tmp_path.iterdir()] == ["version-00000012"]
    assert snapshots.read_manifest(path) == before


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    update, packed = make_version(13)
    with pytest.raises(WeightTransferError, match=r"must fit into .*file"):
        snapshots.write(tmp_path / "file" / "version-00000013", Manifest.of(update), packed)


def test_leftovers_of_a_killed_writer_are_overwritten_and_a_version_can_be_replaced(tmp_path: Path) -> None:
    left = tmp_path / ".version-00000012.tmp"
    left.mkdir()
    (left / "bucket-0000.bin").write_bytes(b"half")
    assert snapshots.versions(tmp_path) == []
    _, packed = write(tmp_path / "version-00000012")
    assert [file.name for file in tmp_path.iterdir()] == ["version-00000012"]
    assert torch.equal(read(tmp_path / "version-00000012")[0], packed[0])
    update, packed = make_version(12, seed=1)
    path = tmp_path / "version-00000012"
    snapshots.write(path, Manifest.of(update), packed)
    assert torch.equal(read(path)[2], packed[2])
    assert [file.name for file in tmp_path.iterdir()] == ["version-00000012"]
