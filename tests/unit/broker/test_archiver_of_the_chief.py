"""Only the chief's archiver works; those of other brokers wait."""

import time
from pathlib import Path

import pytest

from slipstream.broker.archiver import Archiver, ArchiverThread, OpenWriter
from slipstream.buffer.archive.archive import Archive, ArchiveMirror
from slipstream.buffer.archive.index import ShardEntry
from slipstream.buffer.archive.shards import ShardWriter
from slipstream.buffer.errors import StaleFenceError
from slipstream.buffer.object_folder import ObjectFolder, StorageWait
from slipstream.buffer.records import FinishedGroup
from tests.unit.broker.test_archiver import CONFIG, FakeStore, await_status, shards_in


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


def test_the_archiver_works_while_its_broker_is_the_chief_and_leaves_the_folder_to_the_next(
    tmp_path: Path, store: FakeStore
):
    fences: dict[str, int | None] = {"first": None, "second": None}
    store.finish(*range(3))
    threads = {
        name: ArchiverThread(
            lambda: store,
            tmp_path,
            CONFIG,
            tick_s=0.001,
            lead=lambda name=name: fences[name],  # type: ignore[misc]
        )
        for name in fences
    }
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


def test_an_archiver_that_hung_does_not_overwrite_in_the_object_store_what_its_successor_wrote(
    tmp_path: Path, store: FakeStore
):
    def archiver(place: str, fence: int, open_writer: OpenWriter = ShardWriter) -> Archiver:
        mirror = ArchiveMirror(tmp_path / place, ObjectFolder(f"file://{tmp_path}/remote", StorageWait(0)))
        return Archiver(store, tmp_path / place, CONFIG, mirror=mirror, fence=fence, open_writer=open_writer)

    class Hangs(ShardWriter):
        """Hangs after its shard until another broker has become the chief and archived on its machine."""

        def write(self, groups: list[FinishedGroup]) -> ShardEntry | None:
            written = super().write(groups)
            store.fence = 2
            store.groups.pop(0)
            second = archiver("there", 2)
            second.flush()
            second.close()
            return written

    store.fence = 1
    first = archiver("here", 1, Hangs)
    store.finish(0, 1, 2)
    with pytest.raises(StaleFenceError):
        first.step()
    first.close()
    assert shards_in(tmp_path / "remote") == [["1", "2"]]
    assert Archive(tmp_path / "remote").check().is_sound
