"""The archiver of the chief works, and those of the other brokers wait."""

import time
from pathlib import Path

import pytest

from slipstream.broker.archiver import ArchiverThread
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
    # The first does not know yet, and what it forgets is refused.
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
