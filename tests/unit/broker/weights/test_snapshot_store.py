"""What a shelf keeps, and how a generator's holding is brought up from it."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import Update
from slipstream.broker.weights import buckets as flat
from slipstream.broker.weights import snapshot
from slipstream.broker.weights.host_weights import HostWeights
from slipstream.broker.weights.snapshot_store import SnapshotStore
from tests.unit.broker.weight_versions import make_update, make_version

NUM_BYTES = 3 * 32 * 1024


def fill(shelf: SnapshotStore, versions: Sequence[int], *, with_delta: bool = True) -> None:
    """Versions of which each has moved a hundred weights further."""
    for version in versions:
        shelf.put(*make_version(version, moved=100 * version), with_delta=with_delta)


def bring_up(holding: HostWeights, shelf: SnapshotStore, version: int, *, with_deltas: bool = True) -> int:
    """Returns how many bytes that took."""
    update, packed = make_version(version, moved=100 * version)
    holding.update_to(shelf, version, slots=update.slots, with_deltas=with_deltas, timeout_s=1.0)
    assert holding.checksum == flat.combine(update.checksums)
    assert all(torch.equal(got, wanted) for got, wanted in zip(holding.tensors, packed, strict=True))
    return holding.num_bytes


def files(shelf: SnapshotStore) -> dict[int, list[str]]:
    """Kinds of files by version."""
    return {
        version: sorted({file.name.split("-")[0] for file in (shelf.folder / snapshot.folder_name(version)).iterdir()})
        for version in snapshot.versions(shelf.folder)
    }


@pytest.fixture
def shelf(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "weights", num_kept=2, num_deltas_kept=4)


# --- keeping ---------------------------------------------------------------------------------------------------------
def test_old_versions_lose_their_buckets_then_everything(shelf: SnapshotStore) -> None:
    fill(shelf, range(6))
    step = ["delta", "delta.json", "manifest.json"]
    assert files(shelf) == {2: step, 3: step, 4: ["bucket", *step], 5: ["bucket", *step]}
    assert shelf.newest() == 5


def test_a_version_is_found_by_its_checksum(shelf: SnapshotStore) -> None:
    assert (shelf.newest(), shelf.find("ab")) == (None, None)
    fill(shelf, [3, 7])
    assert shelf.find(flat.combine(make_version(3, moved=300)[0].checksums)) == 3
    assert shelf.find("ab") is None


def test_what_is_there_already_is_left_alone(shelf: SnapshotStore) -> None:
    fill(shelf, [1])
    before = (shelf.folder / "version-00000001").stat().st_ino
    fill(shelf, [1])
    assert (shelf.folder / "version-00000001").stat().st_ino == before


def test_a_learner_that_resumed_takes_back_what_came_after(shelf: SnapshotStore) -> None:
    fill(shelf, [1, 2, 3, 4])
    update, packed = make_version(2, seed=9)
    shelf.put(update, packed, with_delta=True)
    assert shelf.newest() == 2
    assert shelf.find(flat.combine(update.checksums)) == 2
    assert snapshot.versions(shelf.folder) == [1, 2]


def test_buckets_that_were_written_over_are_not_put(shelf: SnapshotStore) -> None:
    update, packed = make_version(1)
    packed[1][5] += 1
    with pytest.raises(WeightTransferError, match="bucket 1 of 3"):
        shelf.put(update, packed)
    assert shelf.newest() is None


def test_nothing_but_files_of_a_version_is_opened(shelf: SnapshotStore) -> None:
    fill(shelf, [1])
    (shelf.folder / "version-00000001" / "secret").write_text("secret")
    for name in ("secret", "../../etc/passwd", "/etc/passwd", "bucket-0000.bin/../secret", "bucket-0000.bin\n", ""):
        with pytest.raises(WeightTransferError, match="must be asked for"):
            shelf.read(1, name)


def test_a_file_that_was_pruned_is_named(shelf: SnapshotStore) -> None:
    fill(shelf, range(4))
    with pytest.raises(WeightTransferError, match=r"bucket-0000\.bin of version-00000001 must be on the shelf"):
        shelf.read(1, "bucket-0000.bin")


# --- bringing up -----------------------------------------------------------------------------------------------------
def test_a_newcomer_takes_the_whole(shelf: SnapshotStore) -> None:
    fill(shelf, [1, 2])
    assert bring_up(HostWeights(), shelf, 2) > NUM_BYTES


def test_one_step_takes_its_delta(shelf: SnapshotStore) -> None:
    holding = HostWeights()
    fill(shelf, [1])
    bring_up(holding, shelf, 1)
    fill(shelf, [2])
    assert bring_up(holding, shelf, 2) < NUM_BYTES / 10


def test_many_steps_take_many_deltas(shelf: SnapshotStore) -> None:
    holding = HostWeights()
    fill(shelf, [1])
    bring_up(holding, shelf, 1)
    fill(shelf, [2, 3, 5])
    assert bring_up(holding, shelf, 5) < NUM_BYTES / 10


def test_a_chain_whose_start_is_gone_is_replaced_by_the_whole(shelf: SnapshotStore) -> None:
    holding = HostWeights()
    fill(shelf, [1])
    bring_up(holding, shelf, 1)
    fill(shelf, range(2, 8))
    assert bring_up(holding, shelf, 7) > NUM_BYTES


@pytest.mark.parametrize("damaged", ["delta.json", "delta-0001.bin"])
def test_a_damaged_delta_is_replaced_by_the_whole(shelf: SnapshotStore, damaged: str) -> None:
    holding = HostWeights()
    fill(shelf, [1])
    bring_up(holding, shelf, 1)
    fill(shelf, [2])
    path = shelf.folder / "version-00000002" / damaged
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    assert bring_up(holding, shelf, 2) > NUM_BYTES
    fill(shelf, [3])
    assert bring_up(holding, shelf, 3) < NUM_BYTES / 10


def test_a_holding_of_other_bytes_takes_no_delta(shelf: SnapshotStore) -> None:
    holding, other = HostWeights(), SnapshotStore(shelf.folder / "other")
    other.put(*make_version(1, seed=5))
    holding.update_to(other, 1, slots=make_version(1)[0].slots, with_deltas=True, timeout_s=1.0)
    fill(shelf, [1, 2])
    assert bring_up(holding, shelf, 2) > NUM_BYTES


def test_without_deltas_on_the_shelf_the_whole_is_taken(shelf: SnapshotStore) -> None:
    holding = HostWeights()
    fill(shelf, [1, 2], with_delta=False)
    bring_up(holding, shelf, 1)
    assert bring_up(holding, shelf, 2) > NUM_BYTES


def test_a_bucket_that_changed_entirely_travels_whole_beside_deltas(shelf: SnapshotStore) -> None:
    holding = HostWeights()
    fill(shelf, [1])
    bring_up(holding, shelf, 1)
    update, packed = half_new(2)
    shelf.put(update, packed, with_delta=True)
    holding.update_to(shelf, 2, slots=update.slots, with_deltas=True, timeout_s=1.0)
    assert all(torch.equal(got, wanted) for got, wanted in zip(holding.tensors, packed, strict=True))
    assert NUM_BYTES / 3 < holding.num_bytes < NUM_BYTES / 2


def half_new(version: int) -> tuple[Update, list[Tensor]]:
    """The first bucket at random, the others a little moved."""
    update, packed = make_version(version, moved=100 * version)
    packed[0] = torch.randint(0, 256, packed[0].shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return make_update(version, update.slots, packed), packed


def test_a_damaged_whole_is_refused_and_nothing_is_held(shelf: SnapshotStore) -> None:
    holding = HostWeights()
    fill(shelf, [1])
    bring_up(holding, shelf, 1)
    fill(shelf, [2], with_delta=False)
    path = shelf.folder / "version-00000002" / "bucket-0002.bin"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(WeightTransferError, match="bucket 2 of 3 of version 2"):
        bring_up(holding, shelf, 2)
    assert holding.checksum == ""


def test_another_model_is_refused_before_its_bytes_are_read(shelf: SnapshotStore) -> None:
    fill(shelf, [1])
    holding = HostWeights()
    with pytest.raises(WeightTransferError, match="it is of another model"):
        holding.update_to(shelf, 1, slots=make_version(1, num_columns=8)[0].slots, with_deltas=True, timeout_s=1.0)
    assert holding.tensors == []
