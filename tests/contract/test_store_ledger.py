from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from slipstream.broker.archiver import Archiver
from slipstream.buffer.archive.archive import Archive, whole_ledger
from slipstream.buffer.codec import unpack
from slipstream.buffer.errors import StoreUnavailableError
from slipstream.buffer.records import StepEntry, VersionEntry
from slipstream.buffer.redis import store as redis_store
from slipstream.buffer.redis.connection import connect
from slipstream.buffer.redis.store import RedisStore
from slipstream.configs.buffer import ArchiveConfig
from tests.builders import make_finished
from tests.contract.stores import (
    GROUP_SIZE,
    AnyStore,
    audit,
    check_state,
    checkpoint,
    claim,
    commit,
    entry_of,
    lease,
    make_ready,
    open_run,
    shared_server,
)

STEPS = 5


@pytest.fixture
def store(fresh_store: AnyStore) -> AnyStore:
    open_run(fresh_store, keeps_finished=True)
    make_ready(fresh_store, STEPS + 3)
    return fresh_store


def train(store: AnyStore, *steps: int) -> list[StepEntry]:
    claims = [claim(store, step, 1) for step in steps]
    for each in claims:
        commit(store, each)
        store.record_version(VersionEntry(each.step, each.step, "sum"))
        store.commit_version(each.step)
    return [entry_of(each) for each in claims]


@pytest.fixture
def archiver(store: AnyStore, tmp_path: Path) -> Iterator[Archiver]:
    opened = Archiver(store, tmp_path, ArchiveConfig())
    yield opened
    opened.close()


def assert_whole(store: AnyStore, folder: Path, entries: list[StepEntry]) -> None:
    archive = Archive(folder)
    for first in range(1, len(entries) + 2):
        assert whole_ledger(store, archive, first_step=first) == entries[first - 1 :]
    assert whole_ledger(store, archive, first_step=2, last_step=2) == entries[1:2]
    found = store.audit(archived=archive.steps)
    assert found.is_sound, found
    check_state(store, archived=archive.steps())


def test_archived_steps_leave_the_store_and_a_resume_finds_those_that_it_needs(store, archiver, tmp_path):
    entries = train(store, *range(1, STEPS + 1))
    checkpoint(store, 3)
    archiver.flush()
    assert Archive(tmp_path).steps() == entries[:3]
    assert store.ledger() == entries[3:], "the store keeps what no checkpoint covers"
    assert_whole(store, tmp_path, entries)
    store.roll_back(to_step=3, to_version=3)
    assert store.run_state().consumed == 3, "pacing counts from the checkpoint"
    assert_whole(store, tmp_path, entries[:3])
    again = train(store, 4, 5)
    assert [entry.group_ids for entry in again] == [entry.group_ids for entry in entries[3:]]
    checkpoint(store, 5)
    archiver.flush()
    assert store.ledger() == []
    assert_whole(store, tmp_path, entries[:3] + again)
    assert Archive(tmp_path).check().is_sound
    assert store.counts().trained == sum(len(names) for entry in again + entries[:3] for names in entry.trajectory_ids)


def test_a_step_without_a_checkpoint_or_with_another_entry_stays(store):
    entries = train(store, 1, 2, 3)
    checkpoint(store, 2)
    assert store.forget_steps(entries[2]) == 0, "no checkpoint covers it"
    of_a_lost_future = msgspec.structs.replace(entries[1], fence=99)
    assert store.forget_steps(of_a_lost_future) == 0
    assert store.ledger() == entries
    assert store.forget_steps(entries[1]) == 2
    assert store.forget_steps(entries[1]) == 0, "repeated after a lost answer"
    assert store.ledger() == entries[2:]


def test_an_audit_finds_moved_steps_that_are_lost_or_trained_on_again(store):
    entries = train(store, 1, 2, 3)
    checkpoint(store, 2)
    store.forget_steps(entries[1])
    assert store.audit(archived=lambda: entries).is_sound, "the archive may hold more than left the store"
    assert store.audit().problems == ["steps moved to the archive, but not in its ledger: 1, 2"]
    assert store.audit(archived=None).is_sound, "without the archive, only the store is audited"
    lost = store.audit(archived=lambda: entries[:1])
    assert lost.problems == ["steps moved to the archive, but not in its ledger: 2"]
    assert not lost.is_sound
    again = msgspec.structs.replace(entries[0], trajectory_ids=entries[2].trajectory_ids)
    assert store.audit(archived=lambda: [again, entries[1]]).duplicated == len(entries[2].trajectory_ids[0])


def test_a_rollback_below_moved_steps_takes_them_back(store):
    entries = train(store, 1, 2, 3)
    checkpoint(store, 3)
    store.forget_steps(entries[2])
    store.roll_back(to_step=1, to_version=1)
    again = train(store, 2)
    assert store.ledger() == again
    assert store.audit(archived=lambda: entries).problems == [], "entries of undone steps do not count"
    checkpoint(store, 2)
    assert store.forget_steps(again[0]) == 1, "the new entry moves as well"
    assert store.ledger() == []


def test_a_long_ledger_moves_in_parts(store, monkeypatch):
    monkeypatch.setattr(redis_store, "_FORGOTTEN_AT_ONCE", 2)
    entries = train(store, *range(1, STEPS + 1))
    checkpoint(store, STEPS)
    assert store.forget_steps(entries[-2]) == STEPS - 1
    assert store.ledger() == entries[-1:]


@pytest.mark.parametrize("is_done", [False, True])
def test_a_kill_around_the_removal_leaves_every_step_once(store, archiver, tmp_path, monkeypatch, is_done):
    """`is_done`: the kill comes after the store has removed the entries."""
    entries = train(store, 1, 2, 3)
    checkpoint(store, 1)
    archiver.flush()
    checkpoint(store, 3)
    forget_steps = store.forget_steps

    def killed(entry: StepEntry, *, fence: int) -> int:
        if is_done:
            forget_steps(entry, fence=fence)
        raise StoreUnavailableError("killed")

    monkeypatch.setattr(store, "forget_steps", killed)
    with pytest.raises(StoreUnavailableError, match="killed"):
        archiver.flush()
    archiver.close()
    assert store.ledger() == ([] if is_done else entries[1:])
    assert_whole(store, tmp_path, entries)
    monkeypatch.undo()
    after = Archiver(store, tmp_path, ArchiveConfig())
    after.flush()
    after.close()
    assert store.ledger() == []
    assert Archive(tmp_path).steps() == entries
    assert_whole(store, tmp_path, entries)


GROUPS = [make_finished(group_id) for group_id in ("5", "2", "9")]


@pytest.fixture
def loaded(request: pytest.FixtureRequest) -> Iterator[RedisStore]:
    with RedisStore(connect(shared_server().url), f"loaded-{request.node.name}") as opened:
        yield open_run(opened)
        audit(opened.counts())
        assert opened.audit().is_sound


def test_groups_are_claimed_in_the_order_loaded_and_prompts_between_them_never_leased(loaded: RedisStore):
    loaded.load(GROUPS, samples={})
    taken = claim(loaded, 1, 2)
    assert taken.group_ids == ["5", "2"]
    assert [[unpack(payload).index for payload in group] for group in loaded.fetch(["2"])] == [[0, 1]]
    commit(loaded, taken)
    assert checkpoint(loaded, 1) == 2
    counts = loaded.counts()
    assert (counts.admitted, counts.ready, counts.accepted) == (3, 1, 3 * GROUP_SIZE)
    assert counts.payload_bytes == sum(map(len, GROUPS[2].payloads)), "what is retired is gone"
    assert [each.ordinal for each in lease(loaded, 1)] == [10]


def test_of_a_long_ledger_only_the_steps_that_are_asked_for_are_read(loaded: RedisStore):
    loaded.load(GROUPS, samples={})
    for step in (1, 2, 3):
        commit(loaded, claim(loaded, step, 1))
    ledger, key = loaded.ledger(), loaded._key("ledger")
    first = loaded._client.hget(key, 1)
    loaded._client.hset(key, 1, b"not read")
    assert loaded.ledger(first_step=2) == ledger[1:]
    loaded._client.hset(key, 1, first)
