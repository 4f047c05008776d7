"""Groups of an earlier run in a Redis store: claims of a replay, and reads of its ledger."""

from collections.abc import Iterator

import pytest

from slipstream.buffer.codec import unpack
from slipstream.buffer.redis.connection import connect
from slipstream.buffer.redis.store import RedisStore
from slipstream.buffer.sampling import Sample, SamplingRules
from slipstream.configs.buffer import FreshestConfig
from tests.builders import make_finished
from tests.contract.stores import GROUP_SIZE, audit, checkpoint, claim, commit, lease, open_run, shared_server

GROUPS = [make_finished(group_id) for group_id in ("5", "2", "9")]


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[RedisStore]:
    with RedisStore(connect(shared_server().url), f"loaded-{request.node.name}") as opened:
        yield open_run(opened)
        audit(opened.counts())
        assert opened.audit().is_sound


def test_groups_are_claimed_in_the_order_loaded_and_prompts_between_them_never_leased(store: RedisStore):
    store.load(GROUPS, samples={})
    taken = claim(store, 1, 2)
    assert taken.group_ids == ["5", "2"]
    assert [[unpack(payload).index for payload in group] for group in store.fetch(["2"])] == [[0, 1]]
    commit(store, taken)
    assert checkpoint(store, 1) == 2
    counts = store.counts()
    assert (counts.admitted, counts.ready, counts.accepted) == (3, 1, 3 * GROUP_SIZE)
    assert counts.payload_bytes == sum(map(len, GROUPS[2].payloads)), "what is retired is gone"
    assert [each.ordinal for each in lease(store, 1)] == [10]


def test_a_planned_step_claims_its_groups_under_any_rules(store: RedisStore):
    store.load(GROUPS, samples={1: Sample(["9", "5"], weights=[1.0, 2.0], reused=[False, False])})
    taken = claim(store, 1, 1, rules=SamplingRules(FreshestConfig()))
    assert (taken.group_ids, taken.weights) == (["9", "5"], [1.0, 2.0])
    commit(store, taken)
    assert claim(store, 2, 1).group_ids == ["2"]


def test_groups_that_several_steps_take_stay_until_the_last(store: RedisStore):
    store.load(GROUPS, samples={step: Sample(["9"], weights=[1.0], reused=[step > 1]) for step in (1, 2)})
    for step in (1, 2):
        commit(store, claim(store, step, 1))
        checkpoint(store, step)
    assert store.counts().outcomes == {"retired": 1}


def test_of_a_long_ledger_only_the_steps_that_are_asked_for_are_read(store: RedisStore):
    store.load(GROUPS, samples={})
    for step in (1, 2, 3):
        commit(store, claim(store, step, 1))
    ledger, key = store.ledger(), store._key("ledger")
    first = store._client.hget(key, 1)
    store._client.hset(key, 1, b"not read")
    assert store.ledger(first_step=2) == ledger[1:]
    store._client.hset(key, 1, first)
