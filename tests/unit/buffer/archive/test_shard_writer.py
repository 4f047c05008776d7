"""ShardWriter: shards are complete or absent, and a group is archived once."""

import errno
from contextlib import closing
from pathlib import Path

import pytest

from slipstream.buffer.archive.archive import Archive
from slipstream.buffer.archive.index import MANIFEST, read_manifest
from slipstream.buffer.archive.shards import OVERFLOW, ShardWriter
from slipstream.buffer.codec import decode
from slipstream.buffer.errors import ArchiveError
from slipstream.buffer.records import StoredGroup
from slipstream.buffer.trajectory import Sampling
from tests.builders import make_finished, write_archive

UNFIT = Sampling(1.0, 1.0, -1, 6, 2**63)
"""A seed beyond 64 bits with a sign."""


def ids_in(folder: Path) -> list[str]:
    return [stored.trajectory.id for stored in Archive(folder).read()]


def files_in(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()} - {"writer.lock"}


def test_the_manifest_describes_each_shard(tmp_path: Path) -> None:
    groups = [make_finished("0", steps=[4]), make_finished("1", steps=[2, 7]), make_finished("2", members=0, steps=[])]
    folder = write_archive(tmp_path, groups, [make_finished("3", steps=[], state="expired", reason="late")])
    shard, expired = read_manifest(folder).shards
    assert (expired.first_step, expired.last_step) == (None, None)
    assert (shard.file, shard.rows, shard.groups) == ("shard-00000001.parquet", 4, 2)
    assert (shard.first_step, shard.last_step, shard.archived_at) == (2, 7, 1000.0)
    assert shard.bytes == (folder / shard.file).stat().st_size
    assert files_in(folder) == {shard.file, expired.file, MANIFEST}


def test_numbering_continues_after_a_restart_which_removes_shards_that_the_manifest_does_not_name(tmp_path) -> None:
    write_archive(tmp_path, [make_finished("0")])
    write_archive(tmp_path, [make_finished("1")], [make_finished("2")])
    assert [shard.file[-9:-8] for shard in read_manifest(tmp_path).shards] == ["1", "2", "3"]
    assert [name.split("-")[0] for name in ids_in(tmp_path)] == ["0", "0", "1", "1", "2", "2"]
    lines = (tmp_path / MANIFEST).read_bytes().splitlines(keepends=True)
    (tmp_path / MANIFEST).write_bytes(b"".join(lines[:2]))
    (tmp_path / "shard-00000004.parquet.tmp").write_bytes(b"PAR1")
    write_archive(tmp_path)
    assert files_in(tmp_path) == {"shard-00000001.parquet", "shard-00000002.parquet", MANIFEST}


@pytest.mark.parametrize("left", [1, 20, -1])
def test_a_last_line_cut_short_is_dropped_with_its_shard(tmp_path: Path, left: int) -> None:
    write_archive(tmp_path, [make_finished("0")], [make_finished("1")])
    lines = (tmp_path / MANIFEST).read_bytes().splitlines(keepends=True)
    (tmp_path / MANIFEST).write_bytes(lines[0] + lines[1][:left])
    assert len(read_manifest(tmp_path).shards) == 1
    write_archive(tmp_path, [make_finished("1")])
    assert ids_in(tmp_path) == ["0-0-0", "0-0-1", "1-0-0", "1-0-1"]


def test_damaged_lines_in_the_middle_and_shards_without_their_manifest_are_reported_and_nothing_is_removed(tmp_path):
    write_archive(tmp_path, [make_finished("0")], [make_finished("1")])
    lines = (tmp_path / MANIFEST).read_bytes().splitlines(keepends=True)
    (tmp_path / MANIFEST).write_bytes(b"{}\n" + lines[1])
    for use in (ShardWriter, Archive):
        with pytest.raises(ArchiveError, match=r"line 1 of .*manifest.jsonl must name a shard"):
            use(tmp_path)
    assert len(files_in(tmp_path)) == 3
    (tmp_path / MANIFEST).unlink()
    with pytest.raises(ArchiveError, match=r"must have a manifest.jsonl beside its 2 shards"):
        ShardWriter(tmp_path)
    (tmp_path / MANIFEST).touch()
    with pytest.raises(ArchiveError, match=r"must name every shard but the one after its last"):
        ShardWriter(tmp_path)
    assert len(files_in(tmp_path)) == 3


def test_a_restarted_writer_knows_the_groups_of_its_last_shards_and_starts_with_a_damaged_one(tmp_path: Path) -> None:
    write_archive(tmp_path, [make_finished("0")], [make_finished("1"), make_finished("2", members=0)])
    with closing(ShardWriter(tmp_path)) as writer:
        assert [writer.has(group) for group in ("0", "1", "2", "3")] == [True, True, False, False]
    (tmp_path / "shard-00000002.parquet").write_bytes(b"PAR1")
    writer = ShardWriter(tmp_path)
    assert [writer.has("0"), writer.has("1")] == [True, False]
    assert [shard.file for shard in writer.shards] == ["shard-00000001.parquet", "shard-00000002.parquet"]


def test_an_archive_has_one_writer(tmp_path: Path) -> None:
    first = ShardWriter(tmp_path)
    with pytest.raises(ArchiveError, match="must have one writer"):
        ShardWriter(tmp_path)
    first.close()
    ShardWriter(tmp_path).close()


def test_a_write_that_failed_can_be_done_again_and_a_part_of_a_line_is_overwritten(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path)
    (tmp_path / "shard-00000001.parquet.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError) as caught:
        writer.write([make_finished("0")])
    assert caught.value.errno == errno.ENOSPC
    assert not writer.has("0")
    writer.write([make_finished("0")])
    assert ids_in(tmp_path) == ["0-0-0", "0-0-1"]
    assert files_in(tmp_path) == {"shard-00000001.parquet", MANIFEST}
    with (tmp_path / MANIFEST).open("ab") as file:
        file.write(b'{"file": "shard-')
    writer.write([make_finished("1")])
    assert len(read_manifest(tmp_path).shards) == 2


def test_a_group_no_column_can_hold_goes_to_the_overflow_and_the_others_are_written(tmp_path: Path) -> None:
    unfit = make_finished("2", sampling=UNFIT)
    garbage = StoredGroup("4", "quarantined", "claim_attempts", [], [b"noise"])
    folder = write_archive(tmp_path, [make_finished("0"), make_finished("1"), unfit, make_finished("3"), garbage])
    assert ids_in(folder) == ["0-0-0", "0-0-1", "1-0-0", "1-0-1", "3-0-0", "3-0-1"]
    for group in (unfit, garbage):
        kept = (folder / OVERFLOW / f"group-{group.id}.msgpack").read_bytes()
        assert decode(kept, StoredGroup) == group
    with closing(ShardWriter(folder)) as writer:
        assert writer.write([unfit]) is None, "a shard of nothing is not written"
        assert len(writer.shards) == 1
