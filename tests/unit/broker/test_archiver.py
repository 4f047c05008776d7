import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slipstream.broker import archiver as archiver_module
from slipstream.broker.archiver import Archiver, ArchiverThread
from slipstream.buffer import errors
from slipstream.buffer.accounting import StoreCounts
from slipstream.buffer.archive.archive import Archive, ArchiveMirror
from slipstream.buffer.archive.index import ShardEntry
from slipstream.buffer.archive.shards import ShardWriter
from slipstream.buffer.errors import StaleFenceError, StorageError, StoreUnavailableError
from slipstream.buffer.object_folder import ObjectFolder, StorageWait
from slipstream.buffer.records import CheckpointPointer, RunState, StepEntry, StoredGroup
from slipstream.buffer.store_rules import NO_FENCE
from slipstream.configs.buffer import ArchiveConfig
from tests.builders import make_finished, write_archive
from tests.fakes import FakeClock
from tests.memory_store.store import MemoryStore
from tests.unit.buffer.archive.test_archive import make_step

CONFIG = ArchiveConfig()


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_GROUPS_PER_SHARD", 3), ("_TICK_S", 0.001)):
        monkeypatch.setattr(archiver_module, name, value)


class FakeStore:
    """A store of finished groups and steps only; the operation named by `broken` fails."""

    def __init__(self) -> None:
        self.groups: list[StoredGroup] = []
        self.steps: list[StepEntry] = []
        """All that were committed; those up to `archived_step` have left the store."""
        self.archived_step = 0
        self.checkpoint: CheckpointPointer | None = None
        self.broken = ""
        self.fence = NO_FENCE
        self.events: list[str] = []
        memory = MemoryStore()
        memory.open_run("run", config_json="{}", num_rows=1, seed=0)
        self._empty_counts = memory.counts()
        self._state = memory.run_state()

    def finish(self, *group_ids: int, members: int = 2) -> None:
        self.groups += [make_finished(str(group_id), members=members) for group_id in group_ids]

    def train(self, step: int, *group_ids: int, is_over: bool = True, fence: int = 0) -> None:
        """Commit a step on these groups and a checkpoint that covers it."""
        self.steps = [entry for entry in self.steps if entry.step < step]
        self.steps.append(make_step(step, *map(str, group_ids), fence=fence))
        self.checkpoint = CheckpointPointer(step, step, f"step-{step}")
        if is_over:
            self.finish(*group_ids)

    def run_state(self) -> RunState:
        return msgspec.structs.replace(self._state, checkpoint=self.checkpoint)

    def ledger(self, *, first_step: int = 1) -> list[StepEntry]:
        return [entry for entry in self.steps if entry.step >= first_step and entry.step > self.archived_step]

    def forget_steps(self, entry: StepEntry, *, fence: int) -> int:
        self._record("forget_steps", fence=fence)
        assert entry in self.steps
        self.archived_step, before = entry.step, self.archived_step
        return entry.step - before

    def lose(self, *, after: int) -> None:
        """Go back to the state after a step, as if the last seconds had not reached the disk."""
        self.steps, self.archived_step = self.steps[:after], 0
        self.checkpoint = CheckpointPointer(after, after, f"step-{after}")

    def report_role(self, role_id: str, gauges: dict[str, Any]) -> None:
        self._record("report_role")

    def counts(self) -> StoreCounts:
        self._record("counts")
        return msgspec.structs.replace(self._empty_counts, unarchived=len(self.groups))

    def finished(self, *, limit: int) -> list[StoredGroup]:
        self._record("finished")
        return self.groups[:limit]

    def forget(self, group_ids: list[str], *, fence: int) -> int:
        self._record("forget", fence=fence)
        before = len(self.groups)
        self.groups = [group for group in self.groups if group.id not in group_ids]
        return before - len(self.groups)

    def close(self) -> None:
        self._record("close")

    def _record(self, operation: str, *, fence: int | None = None) -> None:
        self.events.append(operation)
        if self.broken == operation:
            raise StoreUnavailableError("the store does not answer")
        if fence not in (None, self.fence):
            raise StaleFenceError(f"another broker took over from fence {fence}")


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(0.0)


@pytest.fixture
def archiver(store: FakeStore, clock: FakeClock, tmp_path: Path) -> Iterator[Archiver]:
    made = Archiver(store, tmp_path, CONFIG, clock=clock)
    yield made
    made.close()


def shards_in(folder: Path) -> list[list[str]]:
    archive = Archive(folder)
    ids = iter([stored.trajectory.group_id for stored in archive.read()])
    return [list(dict.fromkeys(next(ids) for _ in range(shard.rows))) for shard in archive.shards]


def test_a_shard_is_written_when_enough_groups_wait_or_one_has_waited_for_flush_s(archiver, store, clock, tmp_path):
    store.finish(0, 1)
    assert archiver.step() == 0
    assert "finished" not in store.events, "payloads were read although no shard was due"
    store.finish(2, 3)
    assert (archiver.step(), archiver.step()) == (3, 0)
    assert [group.id for group in store.groups] == ["3"]
    clock.now = 29.0
    store.finish(4)
    assert archiver.step() == 0
    clock.now = 30.0
    assert archiver.step() == 2
    store.finish(5)
    assert archiver.step() == 0, "the time restarts with the first group after a shard"
    clock.now = 60.0
    assert archiver.step() == 1
    store.finish(*range(6, 11))
    assert (archiver.flush(), archiver.flush(), archiver.num_groups) == (5, 0, 11)
    assert shards_in(tmp_path) == [["0", "1", "2"], ["3", "4"], ["5"], ["6", "7", "8"], ["9", "10"]]


def test_a_shard_of_large_groups_has_fewer_of_them(store, tmp_path, monkeypatch):
    monkeypatch.setattr(archiver_module, "_MAX_SHARD_BYTES", 2**20)
    size = len(make_finished().payloads[0])
    store.finish(*range(4), members=2**20 // size // 2 + 1)
    archiver = Archiver(store, tmp_path, CONFIG)
    assert archiver.step() == 1


@pytest.mark.parametrize("operation", ["counts", "finished", "forget"])
def test_an_error_of_the_store_loses_nothing(archiver, store, tmp_path, operation):
    store.finish(0, 1, 2)
    store.broken = operation
    with pytest.raises(StoreUnavailableError):
        archiver.step()
    assert [group.id for group in store.groups] == ["0", "1", "2"]
    store.broken = ""
    archiver.step()
    assert shards_in(tmp_path) == [["0", "1", "2"]]
    assert store.groups == []


def test_a_full_disk_loses_neither_groups_nor_steps(archiver, store, tmp_path):
    store.finish(0, 1, 2)
    (tmp_path / "shard-00000001.parquet.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        archiver.step()
    assert [group.id for group in store.groups] == ["0", "1", "2"]
    assert archiver.step() == 3
    assert shards_in(tmp_path) == [["0", "1", "2"]]
    store.train(1, 7)
    (tmp_path / "ledger.jsonl").unlink()
    (tmp_path / "ledger.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left|Invalid argument"):
        archiver.flush()
    (tmp_path / "ledger.jsonl").unlink()
    (tmp_path / "ledger.jsonl").touch()
    assert store.ledger() == store.steps
    archiver.flush()
    assert steps_in(tmp_path) == [1]
    assert store.ledger() == []


def steps_in(folder: Path) -> list[int]:
    return [entry.step for entry in Archive(folder).steps()]


def test_a_step_is_in_the_ledger_once_all_of_its_groups_are_archived_and_in_order(archiver, store, tmp_path):
    store.train(1, 0, 1)
    assert archiver.step() == 0
    assert (steps_in(tmp_path), archiver.last_step) == ([], 0)
    store.finish(7)
    assert archiver.step() == 3
    assert (steps_in(tmp_path), archiver.last_step) == ([1], 1)
    store.train(2, 2, is_over=False)
    store.train(3, 3)
    archiver.flush()
    assert steps_in(tmp_path) == [1], "group 2 is kept for reuse"
    store.train(4, 2)
    archiver.flush()
    assert Archive(tmp_path).steps() == store.steps
    assert Archive(tmp_path).check().is_sound


def test_a_restarted_archiver_continues_the_ledger_and_archives_no_group_twice(archiver, store, clock, tmp_path):
    store.train(1, 0)
    archiver.flush()
    store.train(2, 1, 2)
    store.broken = "forget"
    with pytest.raises(StoreUnavailableError):
        archiver.flush()
    archiver.close()
    store.broken = ""
    store.finish(3)
    after = Archiver(store, tmp_path, CONFIG, clock=clock)
    assert (after.flush(), after.num_groups) == (3, 1)
    assert shards_in(tmp_path) == [["0"], ["1", "2"], ["3"]]
    assert steps_in(tmp_path) == [1, 2]
    assert Archive(tmp_path).check().is_sound


def test_steps_lost_by_the_store_and_repeated_are_written_again(archiver, store, tmp_path):
    for step in (1, 2, 3):
        store.train(step, step)
    archiver.flush()
    store.lose(after=1)
    archiver.flush()
    store.train(2, 8, fence=9, is_over=False)
    archiver.flush()
    assert store.ledger() == store.steps[1:], "the archive holds another step 2"
    store.finish(8)
    archiver.flush()
    assert Archive(tmp_path).steps() == store.steps
    assert store.ledger() == []


def test_a_step_that_the_store_lost_while_it_waited_for_a_group_is_not_written(archiver, store, tmp_path):
    store.train(1, 1)
    store.train(2, 2, is_over=False)
    archiver.flush()
    store.lose(after=1)
    archiver.flush()
    store.train(2, 3, is_over=False, fence=9)
    store.finish(2)
    archiver.flush()
    assert Archive(tmp_path).steps() == store.steps[:1]
    store.finish(3)
    archiver.flush()
    assert Archive(tmp_path).steps() == store.steps


@pytest.mark.parametrize("waits_for", ["store", "disk"])
def test_a_stuck_archiver_says_which_side_it_waits_for(store, tmp_path, monkeypatch, waits_for):
    def fail(*_: object) -> None:
        raise errors.StoreCannotWriteError("no room") if waits_for == "store" else OSError("no space left")

    monkeypatch.setattr(*((store, "run_state") if waits_for == "store" else (archiver_module, "ShardWriter")), fail)
    thread = ArchiverThread(lambda: store, tmp_path / "archive", CONFIG)
    thread.start()
    assert thread.stop(timeout_s=10)
    assert thread.status().waits_for == waits_for


def test_a_full_archive_lets_groups_go_says_so_and_its_ledger_ends_where_it_does(tmp_path: Path, store: FakeStore):
    config = msgspec.structs.replace(CONFIG, max_gib=1 / 2**30)
    store.train(1, 1, 2, 3)
    store.train(2, 4, 5, 6)
    thread = ArchiverThread(lambda: store, tmp_path, config)
    thread.start()
    await_status(thread, lambda status: status.state == "full")
    thread.stop(timeout_s=10)
    assert store.groups == []
    assert thread.status().groups == 3
    assert "buffer.archive.max_gib (9.31323e-10): 3 groups were dropped" in thread.status().reason
    assert steps_in(tmp_path) == [1]
    assert Archive(tmp_path).check().problems == []


def make_mirrored(store: FakeStore, folder: Path, remote: Path) -> Archiver:
    storage = ObjectFolder(f"file://{remote}", StorageWait(0))
    return Archiver(store, folder, CONFIG, mirror=ArchiveMirror(folder, storage))


def test_groups_and_steps_leave_the_store_only_after_the_object_store_has_them(store, tmp_path):
    archiver = make_mirrored(store, tmp_path / "here", tmp_path / "remote")
    (tmp_path / "remote").write_text("no folder")
    store.finish(0, 1, 2)
    with pytest.raises(StorageError, match=r"remote/shard-00000001\.parquet must be reachable in storage.uri"):
        archiver.step()
    assert [group.id for group in store.groups] == ["0", "1", "2"]
    (tmp_path / "remote").unlink()
    archiver.step()
    assert store.groups == []
    store.train(1, 3, 4, 5)
    send, ledger = archiver._mirror.send, tmp_path / "here" / "ledger.jsonl"

    def send_all_but_steps() -> None:
        if ledger.stat().st_size:
            raise StorageError("the object store is away")
        send()

    archiver._mirror.send = send_all_but_steps
    with pytest.raises(StorageError):
        archiver.flush()
    assert store.groups == []
    assert store.ledger() == store.steps
    archiver._mirror.send = send
    archiver.flush()
    assert store.ledger() == []
    assert shards_in(tmp_path / "remote") == shards_in(tmp_path / "here") == [["0", "1", "2"], ["3", "4", "5"]]
    assert Archive(tmp_path / "remote").check().is_sound
    assert steps_in(tmp_path / "remote") == [1]


def test_an_archive_goes_on_elsewhere_and_refuses_the_folder_that_was_left(store, tmp_path):
    store.train(1, 0, 1, 2)
    first = make_mirrored(store, tmp_path / "here", tmp_path / "remote")
    first.flush()
    first.close()
    store.train(2, 3, 4, 5)
    second = make_mirrored(store, tmp_path / "there", tmp_path / "remote")
    assert second.last_step == 1
    second.flush()
    second.close()
    for place in ("there", "remote"):
        assert shards_in(tmp_path / place) == [["0", "1", "2"], ["3", "4", "5"]]
        assert steps_in(tmp_path / place) == [1, 2]
    # The first machine fetches the newest shard that it lacks; a folder with other shards is refused.
    make_mirrored(store, tmp_path / "here", tmp_path / "remote").close()
    assert shards_in(tmp_path / "here") == shards_in(tmp_path / "remote")
    other = write_archive(tmp_path / "other", [make_finished("9")])
    with pytest.raises(errors.ArchiveError, match=r"must have the first shards of .*remote, got others"):
        make_mirrored(store, other, tmp_path / "remote")


def test_an_object_store_that_is_away_is_reported_by_name(store, tmp_path):
    (tmp_path / "remote").write_text("no folder")
    store.finish(0, 1, 2)
    storage = ObjectFolder(f"file://{tmp_path}/remote", StorageWait(0))
    thread = ArchiverThread(lambda: store, tmp_path / "here", CONFIG, storage=storage)
    thread.start()
    try:
        await_status(thread, lambda status: status.waits_for == "storage" and f"{tmp_path}/remote" in status.reason)
        (tmp_path / "remote").unlink()
        await_status(thread, lambda status: status.state == "archiving" and not store.groups)
    finally:
        thread.stop(timeout_s=5)


def await_status(thread: ArchiverThread, holds) -> None:
    ends_at = time.monotonic() + 10
    while not holds(thread.status()):
        assert time.monotonic() < ends_at, thread.status()
        time.sleep(0.01)


def test_the_archiver_works_while_its_broker_is_the_chief_and_leaves_the_folder_to_the_next(tmp_path, store):
    fences: dict[str, int | None] = {"first": None, "second": None}
    store.finish(*range(3))
    threads = {name: ArchiverThread(lambda: store, tmp_path, CONFIG, lead=partial(fences.get, name)) for name in fences}
    for thread in threads.values():
        thread.start()
    time.sleep(0.02)
    assert store.events == [], "neither is the chief"
    store.fence = fences["first"] = 1
    await_status(threads["first"], lambda status: status.groups == 3)
    # The first broker does not know yet; the store refuses its `forget`.
    store.fence = 2
    store.finish(*range(3, 6))
    before = store.events.count("forget")
    deadline = time.monotonic() + 10
    while store.events.count("forget") == before:
        assert time.monotonic() < deadline
    assert len(store.groups) == 3
    fences["first"], fences["second"] = None, 2
    await_status(threads["second"], lambda status: status.state == "archiving" and not store.groups)
    for thread in threads.values():
        assert thread.stop(timeout_s=10)
    assert shards_in(tmp_path) == [["0", "1", "2"], ["3", "4", "5"]]


def test_an_archiver_that_hung_does_not_overwrite_what_its_successor_wrote(tmp_path, store, monkeypatch):
    def archiver(place: str, fence: int) -> Archiver:
        mirror = ArchiveMirror(tmp_path / place, ObjectFolder(f"file://{tmp_path}/remote", StorageWait(0)))
        return Archiver(store, tmp_path / place, CONFIG, mirror=mirror, fence=fence)

    class Hangs(ShardWriter):
        """Hangs after its shard until another broker has become the chief and archived on its machine."""

        def write(self, groups: list[StoredGroup]) -> ShardEntry | None:
            written = super().write(groups)
            store.fence = 2
            store.groups.pop(0)
            monkeypatch.undo()
            second = archiver("there", 2)
            second.flush()
            second.close()
            return written

    store.fence = 1
    monkeypatch.setattr(archiver_module, "ShardWriter", Hangs)
    first = archiver("here", 1)
    store.finish(0, 1, 2)
    with pytest.raises(StaleFenceError):
        first.step()
    first.close()
    assert shards_in(tmp_path / "remote") == [["1", "2"]]
    assert Archive(tmp_path / "remote").check().is_sound
