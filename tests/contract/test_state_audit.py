import pytest
import redis

from slipstream.buffer.codec import encode
from slipstream.buffer.records import CheckpointPointer
from tests.cases import cases
from tests.chaos.state_audit import Snapshot, find_end_problems, find_progress_problems, find_state_problems
from tests.chaos.state_audit import read_snapshot as read
from tests.chaos.watched.journal import Life
from tests.contract.stores import (
    answer,
    checkpoint,
    claim,
    commit,
    lease,
    make_ready,
    make_redis_store,
    open_run,
    shared_server,
)


@pytest.fixture
def store(clock):
    """Groups: 0 retired, 1 used, 2 claimed, 3 ready, 4 leased and open, 5 returned."""
    store = open_run(make_redis_store(clock), keeps_finished=True)
    assert store.roll_back(to_step=0, to_version=0) == (0, 1)
    make_ready(store, 4)
    for step in (1, 2):
        commit(store, claim(store, step, 1))
        store.commit_version(step)
    checkpoint(store, 1)
    claim(store, 3, 1)
    fourth, fifth = lease(store, 2)
    store.insert([answer(fourth)])
    store.return_leases(lease_ids=[fifth.id], reason="drain")
    return store


def snapshot(store, *commands: tuple) -> Snapshot:
    """Return the store's state after commands that no script would issue; the second word of each is a key."""
    admin = redis.Redis.from_url(shared_server().url)
    for name, key, *words in commands:
        admin.execute_command(name, store._prefix + key, *words)
    return read(admin, store._prefix)


@cases(
    "command, words",
    (("ZADD", "returned", 0, "3"), "group 3 is in returned and ready"),
    (("ZADD", "leases", 0, "1"), "group 1 is in used and leases"),
    (("ZREM", "ready", "3"), "groups with a record"),
    (("ZADD", "reusable", 0, "3"), "groups to be used again that are not used: the store has ['3']"),
    (("HDEL", "group:3", "at:1"), "members of group 3"),
    (("HDEL", "payloads:2", "0"), "members of group 2"),
    (("HSET", "group:4", "size", "1"), "group 4 waits for members, and has all 1"),
    (("HSET", "group:3", "size", "3"), "group 3 waits for no members, and has 2 of 3"),
    (("ZREM", "open", "4"), "open groups: the store has []"),
    (("DEL", "leases_of:generator-0"), "leases by owner"),
    (("HSET", "run", "step", "1"), "steps of the ledger: the store has [1, 2]"),
    (("HSET", "run", "fence", "3"), "the newest fence is 4, the store counts 3"),
    (("HDEL", "claim_fences", "3"), "claims with a fence"),
    (("ZREM", "claims", "3"), "lists of groups of no claim and no step: the store has ['3']"),
    (("ZREM", "used_steps", "2"), "lists of groups of no claim and no step: the store has ['2']"),
    (("HSET", "group:3", "steps", "7"), "group 3 was trained on in the steps [7]"),
    (("HINCRBY", "counters", "open_members", "1"), "counters: the store has {'open_members': 2"),
    (("HINCRBY", "counters", "payload_bytes", "-1"), "counters"),
    (("HINCRBY", "run", "admitted", "1"), "groups admitted: the store has 7"),
    # Progress that the ledger contradicts.
    (("HSET", "run", "version", "3"), "version 3 is committed, the newest step is 2"),
    (("HSET", "run", "checkpoint", encode(CheckpointPointer(3, 3, "step-3"))), "covers step 3"),
    (("HSET", "run", "consumed", "3"), "progress: the store has {'consumed': 3"),
    (("HSET", "run", "uses", "3"), "'uses': 3"),
    (("HINCRBY", "counters", "trained", "-2"), "'trained': 2}"),
)
def test_keys_that_contradict_each_other_or_the_ledger_are_found(store, command, words):
    def problems(found: Snapshot) -> list[str]:
        return [*find_state_problems(found), *find_progress_problems(found)]

    assert problems(snapshot(store)) == []
    assert any(words in problem for problem in problems(snapshot(store, command)))


def test_an_end_that_the_learners_journals_contradict_is_found(store):
    events = [
        {"t": 0.0, "k": "rolled_back", "step": 0, "version": 0, "fence": 1},
        {"t": 1.0, "k": "claimed", "step": 2, "fence": 3},
        {"t": 2.0, "k": "committed", "step": 2, "fence": 3},
        {"t": 3.0, "k": "version", "version": 2},
    ]
    (left,) = find_end_problems(snapshot(store), [Life("learner", 1, events)])
    assert left.startswith("groups left: the store has {'claimed': ['2'], 'used': ['1'], ")
    later = {"t": 4.0, "k": "claimed", "step": 3, "fence": 9}
    wrong = find_end_problems(snapshot(store, ("HSET", "run", "version", "1")), [Life("learner", 1, [*events, later])])
    assert wrong[0].startswith("the end of the run: the store has {'step': 2, 'learner_fence': 3, 'version': 1}")
    assert wrong[2] == "the newest fence: the store has 9, the rest of it implies 4"
