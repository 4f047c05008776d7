import errno
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
import xxhash

from slipstream.buffer.archive.archive import Archive, ArchiveCheck
from slipstream.buffer.archive.index import LEDGER, MANIFEST, LedgerWriter, ManifestWriter, read_manifest
from slipstream.buffer.archive.replay import Rollouts, plan_replay
from slipstream.buffer.archive.shards import OVERFLOW, ShardWriter
from slipstream.buffer.archive.trajectory_filter import TrajectoryFilter
from slipstream.buffer.codec import decode, unpack
from slipstream.buffer.durable_files import LineFile
from slipstream.buffer.errors import ArchiveError, ShardError
from slipstream.buffer.records import Claim, StepEntry, StoredGroup
from slipstream.buffer.redis.run_store import open_own_store
from slipstream.buffer.sampling import SamplingRules
from slipstream.buffer.trajectory import Reward, Sampling, VersionSpan
from slipstream.configs.base import ConfigError
from slipstream.configs.buffer import FreshestConfig
from slipstream.configs.run import RunConfig
from tests.builders import make_finished, make_run, make_trajectory, write_archive
from tests.cases import cases

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


def test_a_folder_without_a_manifest_or_groups_or_with_another_writer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match=r"must be an archive, but it has no manifest.jsonl"):
        Archive(tmp_path)
    with pytest.raises(ArchiveError, match="must hold groups to train on, got none"):
        Rollouts(write_archive(tmp_path), seed=0)
    first = ShardWriter(tmp_path)
    with pytest.raises(ArchiveError, match="must have one writer"):
        ShardWriter(tmp_path)
    first.close()
    ShardWriter(tmp_path).close()


@cases(
    "spoil, words",
    (lambda data: data[: len(data) // 2], "as the manifest says"),
    (lambda data: data[:100] + bytes(len(data) - 200) + data[-100:], "must have checksum"),
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
    check = Archive(tmp_path).check()
    assert (check.steps, check.missing, check.is_sound) == (1, 2, False)
    assert check.problems[0].startswith("step 1 must have all of its trajectories in shards, got 2 that are in none")
    (tmp_path / name).mkdir()
    (tmp_path / name / "group-7.msgpack").write_bytes(b"")
    check = Archive(tmp_path).check()
    assert (check.missing, check.is_sound) == (0, True)
    with closing(ShardWriter(tmp_path)) as writer:
        assert writer.groups_since(1) == {"0", "7"}


def make_step(step: int, *group_ids: str, **overrides: object) -> StepEntry:
    names = [[f"{group}-0-{index}" for index in range(2)] for group in group_ids]
    fields = {"version": step - 1, "fence": step, "seed": 3, "config_hash": "hash"} | overrides
    return StepEntry(step=step, group_ids=list(group_ids), trajectory_ids=names, **fields)  # type: ignore[arg-type]


def write(folder: Path, *entries: StepEntry) -> None:
    LedgerWriter(folder, ManifestWriter(folder)).append(list(entries))


@pytest.mark.parametrize("cut", [20, 0])
def test_ledger_lines_beyond_the_manifest_are_read_and_recorded_at_the_next_start(tmp_path: Path, cut: int) -> None:
    write(tmp_path, make_step(1, "0"))
    manifest, ledger = tmp_path / MANIFEST, tmp_path / LEDGER
    recorded = manifest.read_bytes()
    write(tmp_path, make_step(2, "1"))
    manifest.write_bytes(recorded)
    ledger.write_bytes(ledger.read_bytes()[: -cut or None])
    known = [1] if cut else [1, 2]
    assert [entry.step for entry in Archive(tmp_path).steps()] == known
    LedgerWriter(tmp_path, ManifestWriter(tmp_path))
    ledger.write_bytes(ledger.read_bytes().splitlines(keepends=True)[0])
    if not cut:
        with pytest.raises(ArchiveError, match=r"must begin with .* \(2 steps, up to step 2\), got .* with 1 whole"):
            Archive(tmp_path).steps()
    else:
        write(tmp_path, make_step(2, "1"))
        assert [entry.step for entry in Archive(tmp_path).steps()] == [1, 2]


def test_a_changed_line_is_refused_by_number_and_a_newer_schema_by_name(tmp_path: Path) -> None:
    write(tmp_path, make_step(1, "0"), make_step(2, "1"))
    ledger = tmp_path / LEDGER
    first, second = ledger.read_bytes().splitlines(keepends=True)
    newer = msgspec.json.encode(msgspec.json.decode(first) | {"schema": 2, "signature": "x"}) + b"\n"
    for line, words in (
        (first.replace(b'"version":0', b'"version":9'), r"line 1 of .*ledger.jsonl must hold a step"),
        (first.replace(b"schema", b"schemo"), r"line 1 of .*ledger.jsonl must hold a step"),
        (newer, r"ledger.jsonl must have schema <= 1, got 2"),
    ):
        ledger.write_bytes(line + second)
        with pytest.raises(ArchiveError, match=words):
            Archive(tmp_path).steps()


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


def make_replay(archive: Path, *, steps: int = 2, groups: int = 2) -> RunConfig:
    learner = {"max_steps": steps, "prompts_per_step": groups}
    return make_run(mode="replay", replay={"path": str(archive)}, learner=learner, weights={"transport": "memory"})


def archive_of(mixed: Path, *entries: StepEntry) -> Path:
    """Five groups that were archived in another order than that of the steps."""
    steps = {"4": [1], "3": [1], "2": [2], "1": [2, 3], "0": [3]}
    write_archive(mixed, [make_finished(group, steps=used) for group, used in steps.items()])
    LedgerWriter(mixed, ManifestWriter(mixed)).append(list(entries))
    return mixed


STEPS = (make_step(1, "3", "4", weights=[0.5, 1.0]), make_step(2, "2", "1"))
STEPS += (make_step(3, "0", "1", reused=[False, True]),)


def test_a_store_yields_the_batches_of_the_ledger_and_a_group_as_often_as_it_was_used(tmp_path: Path) -> None:
    plan = plan_replay(make_replay(archive_of(tmp_path, *STEPS), steps=3))
    assert plan.samples[1].weights == [0.5, 1.0]
    assert plan.samples[3].reused == [False, True]
    with open_own_store(tmp_path / "store", "run") as store:
        store.open_run("run", config_json="{}", num_rows=1, seed=0)
        store.load(plan.groups, samples=plan.samples)
        for entry in STEPS:
            asked = {"step": entry.step, "version": entry.version, "num_groups": 1, "lease_s": 60.0}
            claim = store.claim(rules=SamplingRules(FreshestConfig()), **asked)
            assert isinstance(claim, Claim)
            assert claim.group_ids == entry.group_ids, "under any rules"
            store.commit(claim, entry)
        assert store.audit().is_sound


def test_without_a_ledger_or_with_other_sizes_groups_are_in_the_order_of_their_steps(tmp_path):
    plan = plan_replay(make_replay(archive_of(tmp_path / "a")))
    assert ([group.id for group in plan.groups], plan.samples) == (["4", "3", "2", "1", "0"], {})
    plan = plan_replay(make_replay(archive_of(tmp_path / "b", *STEPS), steps=5, groups=1))
    assert (len(plan.groups), plan.samples) == (5, {})
    archive = write_archive(tmp_path / "c", [make_finished("0", steps=[]), make_finished("1", steps=[7])])
    assert [group.id for group in plan_replay(make_replay(archive, steps=1)).groups] == ["1", "0"]


@pytest.mark.parametrize(("entries", "steps", "most"), [(STEPS, 4, 3), ((), 3, 2)])
def test_more_steps_than_are_stored_are_refused(tmp_path, entries, steps, most):
    with pytest.raises(ConfigError, match=rf"learner.max_steps must be <= {most} to replay .*, got {steps}"):
        plan_replay(make_replay(archive_of(tmp_path, *entries), steps=steps))


def test_a_step_with_missing_trajectories_is_refused(tmp_path: Path) -> None:
    archive = archive_of(tmp_path, *STEPS[:1], make_step(2, "2", "9"))
    with pytest.raises(ArchiveError, match="must hold all trajectories of step 2 in its ledger, 9-0-0, 9-0-1, got"):
        plan_replay(make_replay(archive))


def test_each_group_comes_once_an_epoch_in_the_order_of_the_seed_and_quarantined_or_rejected_ones_never(tmp_path: Path):
    poison = make_finished("99", state="quarantined", reason="claim_attempts", steps=[])
    dull = make_finished("98", state="rejected", reason="zero_advantage", steps=[])
    shards = [[make_finished(str(10 * shard + each)) for each in range(3)] for shard in range(3)]
    archive = write_archive(tmp_path, *shards, [poison, dull])
    rollouts = Rollouts(archive, seed=3)
    assert rollouts.num_groups == 9
    epochs = [rollouts.take(first=9 * epoch, count=9)[0] for epoch in range(3)]
    assert all(sorted(epoch) == ["0", "1", "10", "11", "12", "2", "20", "21", "22"] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    whole, parts = Rollouts(archive, seed=3).take(first=0, count=20), Rollouts(archive, seed=3)
    assert [parts.take(first=place, count=1)[1][0] for place in range(20)] == whole[1]
    assert Rollouts(archive, seed=4).take(first=0, count=20)[0] != whole[0]
    members = [unpack(payload) for payload in whole[1][5]]
    assert [(member.group_id, member.index) for member in members] == [(whole[0][5], 0), (whole[0][5], 1)]
