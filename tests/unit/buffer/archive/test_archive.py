"""Reading an archive, complete or damaged."""

from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
import xxhash

from slipstream.buffer.archive.archive import Archive, ArchiveCheck
from slipstream.buffer.archive.index import MANIFEST, LedgerWriter, ManifestWriter, read_manifest
from slipstream.buffer.archive.shards import ShardWriter
from slipstream.buffer.archive.trajectory_filter import TrajectoryFilter
from slipstream.buffer.durable_files import LineFile
from slipstream.buffer.errors import ArchiveError, ShardError
from slipstream.buffer.trajectory import Reward, VersionSpan
from tests.builders import make_finished, make_trajectory, write_archive
from tests.unit.buffer.archive.test_ledger import make_step

SECOND = "shard-00000002.parquet"
ARRAYS = ("token_ids", "model_mask", "generator_logprobs")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_archive(tmp_path, *([make_finished(str(group), steps=[group])] for group in range(3)))


def groups_in(folder: Path, wanted: TrajectoryFilter | None = None) -> tuple[list[str], list[str]]:
    """(groups read, what was said of shards that cannot be)."""
    said: list[str] = []
    read = Archive(folder).read(wanted, on_refused=lambda refused: said.append(str(refused)))
    return list(dict.fromkeys(stored.trajectory.group_id for stored in read)), said


def test_a_folder_without_a_manifest_is_no_archive(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match=r"must be an archive, but it has no manifest.jsonl"):
        Archive(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda data: data[: len(data) // 2], "as the manifest says"),
        (lambda data: data[:100] + bytes(len(data) - 200) + data[-100:], "must have checksum"),
    ],
    ids=["cut", "damaged"],
)
def test_a_damaged_or_missing_shard_is_refused_by_name_and_the_others_are_read(folder: Path, spoil, words) -> None:
    shard = folder / SECOND
    shard.write_bytes(spoil(shard.read_bytes()))
    groups, (sentence,) = groups_in(folder)
    assert groups == ["0", "2"]
    assert sentence.startswith(f"{SECOND} must have ")
    assert words in sentence
    with pytest.raises(ShardError):
        list(Archive(folder).read())
    shard.unlink()
    assert groups_in(folder)[1][0].startswith(f"{SECOND} must be in {folder}")


def test_a_shard_of_a_newer_schema_or_of_other_columns_is_refused_by_name(folder: Path) -> None:
    table = pq.read_table(folder / SECOND)
    rewrite(folder, table.replace_schema_metadata({b"slipstream.archive_schema": b"3"}))
    groups, (sentence,) = groups_in(folder)
    assert groups == ["0", "2"]
    assert sentence.startswith(f"{SECOND} must have slipstream.archive_schema <= 2, got 3")
    rewrite(folder, table.drop_columns(["token_ids", "extras"]))
    assert groups_in(folder)[1] == [f"{SECOND} must have the columns of an archive, but lacks extras, token_ids."]


def test_an_archive_of_schema_1_is_read() -> None:
    # Written by the last version that had trajectories of schema 3.
    first, _, rejected, _ = Archive(Path(__file__).parent / "schema-1").read()
    assert first.trajectory == make_trajectory(
        version_spans=[VersionSpan(6, 2), VersionSpan(9, 4)],
        reward=Reward(0.5, {"positions": 0.5}),
        extras={"note": [1, None, b"x"]},
        **{name: getattr(first.trajectory, name) for name in ARRAYS},
    )
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(first.trajectory, name), getattr(make_trajectory(), name))
    assert (rejected.state, rejected.reason) == ("rejected", "equal_rewards")


def rewrite(folder: Path, table: object) -> None:
    pq.write_table(table, folder / SECOND)
    data = (folder / SECOND).read_bytes()
    first, second, third = read_manifest(folder).shards
    (folder / MANIFEST).write_bytes(b"")
    manifest = LineFile(folder / MANIFEST, digest=xxhash.xxh3_64(), num_bytes=0, schema=1)
    second = msgspec.structs.replace(second, bytes=len(data), checksum=xxhash.xxh3_64_hexdigest(data))
    manifest.append([first, second, third])


def test_groups_of_a_sound_archive_come_in_their_order_and_shards_of_other_steps_are_not_opened(folder: Path) -> None:
    assert groups_in(folder) == (["0", "1", "2"], [])
    check = Archive(folder).check()
    assert check == ArchiveCheck(shards=3, groups=3, trajectories=6)
    assert check.is_sound
    (folder / SECOND).unlink()
    assert groups_in(folder, TrajectoryFilter(step=2)) == (["2"], [])


def test_a_check_finds_one_changed_byte_and_duplicates(folder: Path, tmp_path: Path) -> None:
    data = bytearray((folder / SECOND).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / SECOND).write_bytes(data)
    check = Archive(folder).check()
    assert check.trajectories == 4
    assert [problem.split()[0] for problem in check.problems] == [SECOND]
    assert not check.is_sound
    twice = write_archive(tmp_path / "twice", [make_finished("0")], [make_finished("0", members=1)])
    check = Archive(twice).check()
    assert check.duplicated == 1
    assert not check.is_sound


@pytest.mark.parametrize("name", ["overflow", "set_aside"])
def test_a_group_in_the_overflow_is_not_missed(tmp_path: Path, name: str) -> None:
    """`set_aside` is the folder's name in archives of earlier versions."""
    with closing(ShardWriter(tmp_path)) as writer:
        writer.write([make_finished("0")])
    LedgerWriter(tmp_path, ManifestWriter(tmp_path)).append([make_step(1, "0", "7")])
    assert Archive(tmp_path).check().missing == 2
    (tmp_path / name).mkdir()
    (tmp_path / name / "group-7.msgpack").write_bytes(b"")
    check = Archive(tmp_path).check()
    assert (check.missing, check.is_sound) == (0, True)
    with closing(ShardWriter(tmp_path)) as writer:
        assert writer.groups_since(1) == {"0", "7"}
