from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.weights import buckets as flat
from slipstream.broker.weights import host_weights, snapshots
from slipstream.broker.weights.host_weights import HostWeights
from slipstream.broker.weights.snapshots import Manifest, SnapshotStore
from slipstream.runtime.clock import Deadline
from tests.fakes import no_file_above
from tests.unit.broker.weight_versions import make_slots, make_update, make_version

NUM_BYTES = 3 * 32 * 1024


def fill(store: SnapshotStore, versions: Sequence[int], *, with_delta: bool = True) -> None:
    """Put versions, each with a hundred more changed weights."""
    for version in versions:
        store.put(*make_version(version, moved=100 * version), with_delta=with_delta)


def update_to(weights: HostWeights, store: SnapshotStore, version: int, *, with_deltas: bool = True) -> int:
    """Update to a version and verify it; returns the bytes read."""
    update, packed = make_version(version, moved=100 * version)
    before = weights.num_bytes
    weights.update_to(store, Manifest.of(update), with_deltas=with_deltas, timeout_s=1.0)
    assert weights.checksum == flat.combine(update.checksums)
    assert all(torch.equal(got, expected) for got, expected in zip(weights.tensors, packed, strict=True))
    return weights.num_bytes - before


def files(store: SnapshotStore) -> dict[int, list[str]]:
    folders = {version: store.folder / snapshots.folder_name(version) for version in snapshots.versions(store.folder)}
    return {version: sorted({file.name.split("-")[0] for file in each.iterdir()}) for version, each in folders.items()}


def held(store: SnapshotStore) -> HostWeights:
    """Put version 1 into the store; returns host weights that hold it."""
    weights = HostWeights()
    fill(store, [1])
    update_to(weights, store, 1)
    return weights


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "weights", num_kept=2, num_deltas_kept=4)


def test_old_versions_lose_their_buckets_first(store: SnapshotStore) -> None:
    fill(store, range(6))
    step = ["delta", "delta.json", "manifest.json"]
    assert files(store) == {2: step, 3: step, 4: ["bucket", *step], 5: ["bucket", *step]}
    assert store.newest() == 5


def test_a_version_is_found_by_its_checksum_and_not_rewritten_and_an_older_one_deletes_the_newer(store):
    assert (store.newest(), store.find("ab")) == (None, None)
    fill(store, [3, 7])
    assert store.find(flat.combine(make_version(3, moved=300)[0].checksums)) == 3
    assert store.find("ab") is None
    fill(store, [2, 1, 4])
    before = (store.folder / "version-00000004").stat().st_ino
    fill(store, [4])
    assert (store.folder / "version-00000004").stat().st_ino == before
    update, packed = make_version(4, seed=9)
    store.put(update, packed, with_delta=True)
    assert (store.newest(), store.find(flat.combine(update.checksums))) == (4, 4)
    assert snapshots.versions(store.folder) == [1, 4]


def test_buckets_that_do_not_match_the_update_are_refused(store: SnapshotStore) -> None:
    update, packed = make_version(1)
    packed[1][5] += 1
    with pytest.raises(WeightTransferError, match="bucket 1 of 3"):
        store.put(update, packed)
    assert store.newest() is None


def test_only_files_of_a_held_version_can_be_opened(store: SnapshotStore) -> None:
    fill(store, [1])
    (store.folder / "version-00000001" / "secret").write_text("secret")
    for name in ("secret", "../../etc/passwd", "/etc/passwd", "bucket-0000.bin/../secret", "bucket-0000.bin\n", ""):
        with pytest.raises(WeightTransferError, match="must match"):
            store.read(1, name)
    fill(store, range(2, 5))
    words = r"bucket-0000\.bin of version-00000001 must be in the snapshot store"
    with pytest.raises(WeightTransferError, match=words):
        store.read(1, "bucket-0000.bin")


def test_one_time_limit_covers_all_files_of_an_update(store: SnapshotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    now, limits, read = 0.0, list[float](), store.read_into

    def read_slowly(*arguments: Any, timeout_s: float) -> None:
        nonlocal now
        now += 0.4
        limits.append(timeout_s)
        read(*arguments, timeout_s=timeout_s)

    monkeypatch.setattr(store, "read_into", read_slowly)
    monkeypatch.setattr(host_weights, "Deadline", partial(Deadline, clock=lambda: now))
    fill(store, [0])
    update_to(HostWeights(), store, 0)
    assert limits == pytest.approx([1.0, 0.6, 0.2])


def test_a_snapshot_is_read_first_then_chains_of_deltas_unless_they_are_incomplete(store: SnapshotStore) -> None:
    weights = HostWeights()
    fill(store, [0, 1])
    assert update_to(weights, store, 1) >= NUM_BYTES
    for versions in ([2], [3, 4, 6]):
        fill(store, versions)
        assert update_to(weights, store, versions[-1]) < NUM_BYTES / 10
    fill(store, range(7, 13))
    assert update_to(weights, store, 12) >= NUM_BYTES


@pytest.mark.parametrize(("damaged", "share"), [("delta.json", 1), ("delta-0001.bin", 2 / 3)])
def test_a_damaged_delta_falls_back_to_the_snapshot(store: SnapshotStore, damaged: str, share: float) -> None:
    weights = held(store)
    fill(store, [2])
    path = store.folder / "version-00000002" / damaged
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    # Buckets that were already right are not read again.
    assert share * NUM_BYTES <= update_to(weights, store, 2) < share * NUM_BYTES + NUM_BYTES / 10
    fill(store, [3])
    assert update_to(weights, store, 3) < NUM_BYTES / 10


def test_weights_of_another_run_take_no_delta(store: SnapshotStore) -> None:
    weights, other = HostWeights(), SnapshotStore(store.folder / "other")
    other.put(*make_version(1, seed=5))
    weights.update_to(other, Manifest.of(make_version(1, seed=5)[0]), with_deltas=True, timeout_s=1.0)
    fill(store, [1, 2])
    assert update_to(weights, store, 2) >= NUM_BYTES


def test_a_bucket_that_changed_entirely_is_read_whole_beside_deltas(store: SnapshotStore) -> None:
    weights = HostWeights()
    fill(store, [1])
    before = update_to(weights, store, 1)
    update, packed = make_version(2, moved=200)
    changed = torch.Generator().manual_seed(1)
    packed[0] = torch.randint(0, 256, packed[0].shape, dtype=torch.uint8, generator=changed)
    update = make_update(2, update.slots, packed)
    store.put(update, packed, with_delta=True)
    weights.update_to(store, Manifest.of(update), with_deltas=True, timeout_s=1.0)
    assert all(torch.equal(got, expected) for got, expected in zip(weights.tensors, packed, strict=True))
    assert NUM_BYTES / 3 < weights.num_bytes - before < NUM_BYTES / 2


def test_a_damaged_snapshot_is_refused_and_no_version_is_held(store: SnapshotStore) -> None:
    weights = held(store)
    fill(store, [2], with_delta=False)
    path = store.folder / "version-00000002" / "bucket-0002.bin"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(WeightTransferError, match="bucket 2 of 3"):
        update_to(weights, store, 2)
    assert weights.checksum == ""


def write_version(path: Path, version: int = 12) -> tuple[Manifest, list[Tensor]]:
    update, packed = make_version(version)
    manifest = Manifest.of(update)
    snapshots.write(path, manifest, packed)
    return manifest, packed


def loaded(folder: Path, manifest: Manifest) -> list[Tensor]:
    weights = HostWeights()
    weights.update_to(SnapshotStore(folder), manifest, with_deltas=False, timeout_s=1.0)
    return weights.tensors


def test_a_snapshot_has_a_file_for_each_bucket_which_may_be_empty(tmp_path: Path) -> None:
    manifest, packed = write_version(path := tmp_path / snapshots.folder_name(12))
    files = [*(f"bucket-000{index}.bin" for index in range(3)), "manifest.json"]
    assert sorted(file.name for file in path.iterdir()) == files
    assert snapshots.parse_manifest((path / snapshots.MANIFEST).read_bytes()) == manifest
    assert manifest.checksum == flat.combine(flat.checksums(packed))
    assert [name for name, _ in flat.unpack(packed, manifest.slots)] == [slot.name for slot in make_slots()[0]]
    empty = [torch.zeros(0, dtype=torch.uint8)]
    sums = flat.checksums(empty)
    manifest = Manifest(1, flat.combine(sums), [], [0], sums)
    snapshots.write(tmp_path / "version-00000001", manifest, empty)
    assert [bucket.numel() for bucket in loaded(tmp_path, manifest)] == [0]


def test_an_inconsistent_or_undecodable_manifest_is_refused(tmp_path: Path) -> None:
    manifest, _ = write_version(tmp_path / "version-00000012")
    for change in ({"checksum": "0" * 16}, {"checksums": [*manifest.checksums[:-1], 7]}, {"bucket_bytes": [1]}):
        with pytest.raises(WeightTransferError, match="it is damaged"):
            snapshots.parse_manifest(msgspec.json.encode(msgspec.structs.replace(manifest, **change)))
    for content in (b"", b"{", b"[]", b'{"version": "twelve"}'):
        with pytest.raises(WeightTransferError, match="must be readable"):
            snapshots.parse_manifest(content)


@pytest.mark.parametrize("lost", ["manifest.json", "bucket-0002.bin", "bytes"])
def test_a_damaged_base_gets_no_delta(tmp_path: Path, lost: str) -> None:
    write_version(path := tmp_path / "version-00000012")
    if lost == "bytes":
        (path / "bucket-0000.bin").write_bytes(bytes(100))
    else:
        (path / lost).unlink()
    SnapshotStore(tmp_path).put(*make_version(13), with_delta=True)
    assert not (tmp_path / "version-00000013" / "delta.json").exists()


def test_a_full_disk_or_folder_that_cannot_be_created_is_named_and_leaves_nothing_behind(tmp_path: Path) -> None:
    before, _ = write_version(path := tmp_path / "version-00000012")
    update, packed = make_version(13)
    words = r"version 13 \(0 MiB\) must fit into .* free\), which holds .*, got .*: free some space"
    with no_file_above(1000), pytest.raises(WeightTransferError, match=words):
        snapshots.write(tmp_path / "version-00000013", Manifest.of(update), packed)
    assert [file.name for file in tmp_path.iterdir()] == ["version-00000012"]
    assert snapshots.parse_manifest((path / snapshots.MANIFEST).read_bytes()) == before
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(WeightTransferError, match=r"must fit into .*file"):
        snapshots.write(tmp_path / "file" / "version-00000013", Manifest.of(update), packed)


def test_leftovers_of_a_killed_writer_are_overwritten_and_a_version_can_be_replaced(tmp_path: Path) -> None:
    assert snapshots.versions(tmp_path / "absent") == []
    left = tmp_path / ".version-00000012.tmp"
    left.mkdir()
    (left / "bucket-0000.bin").write_bytes(b"half")
    assert snapshots.versions(tmp_path) == []
    for seed in (0, 1):
        update, packed = make_version(12, seed=seed)
        manifest = Manifest.of(update)
        snapshots.write(tmp_path / "version-00000012", manifest, packed)
        assert [file.name for file in tmp_path.iterdir()] == ["version-00000012"]
        assert all(torch.equal(got, sent) for got, sent in zip(loaded(tmp_path, manifest), packed, strict=True))
