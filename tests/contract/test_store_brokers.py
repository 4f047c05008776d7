"""Every store: live brokers, their chief, and the fence of its operations."""

from collections.abc import Callable

import pytest

from slipstream.buffer.errors import StaleFenceError
from slipstream.buffer.store_rules import NO_FENCE, Brokers
from tests.contract.stores import AnyStore, lease

LEASE_S = 5.0


def report(store: AnyStore, name: str, incarnation: str = "a", **facts: object) -> Brokers:
    return store.report_broker(name, incarnation=incarnation, facts=facts, lease_s=LEASE_S)


def test_the_first_broker_is_the_chief_and_stays_it_while_it_reports(store, clock):
    assert report(store, "broker", generators=3) == Brokers("broker", 1, {"broker": {"generators": 3}})
    for _ in range(4):
        clock.now += 4
        other = report(store, "broker-1")
        assert (other.chief, other.fence) == ("broker", NO_FENCE)
        assert report(store, "broker").fence == 1
    assert report(store, "broker").living == {"broker": {}, "broker-1": {}}


def test_another_broker_becomes_chief_with_a_new_fence_when_the_lease_lapses(store, clock):
    report(store, "broker")
    clock.now += LEASE_S
    assert report(store, "broker-1") == Brokers("broker-1", 2, {"broker-1": {}})
    back = report(store, "broker")
    assert (back.chief, back.fence, set(back.living)) == ("broker-1", NO_FENCE, {"broker", "broker-1"})


def test_a_broker_that_was_restarted_replaces_the_chief_that_it_was(store):
    report(store, "broker", "a")
    assert report(store, "broker", "b").fence == 2
    assert report(store, "broker-1").fence == NO_FENCE


def test_a_clock_that_was_set_back_keeps_no_dead_chief(store, clock):
    report(store, "broker")
    clock.now -= 3600
    assert report(store, "broker-1") == Brokers("broker-1", 2, {"broker-1": {}})


OPERATIONS: dict[str, Callable[[AnyStore, int], object]] = {
    "reap": lambda store, fence: store.reap(fence=fence),
    "follow_clock": lambda store, fence: store.follow_clock(jump_s=1.0, lease_s=30, claim_lease_s=30, fence=fence),
    "forget": lambda store, fence: store.forget(["0"], fence=fence),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_work_for_all_needs_the_fence_of_the_chief(store, clock, operation):
    operation(store, NO_FENCE)
    first = report(store, "broker").fence
    operation(store, first)
    for other in (NO_FENCE, first + 1):
        with pytest.raises(StaleFenceError, match="must be the chief of its run"):
            operation(store, other)
    clock.now += LEASE_S
    with pytest.raises(StaleFenceError):
        operation(store, first)
    second = report(store, "broker-1").fence
    operation(store, second)
    with pytest.raises(StaleFenceError):
        operation(store, first)


def test_a_chief_with_a_lapsed_lease_cannot_reap(store, clock):
    fence = report(store, "broker").fence
    lease(store, 1, lease_s=1.0)
    clock.now += LEASE_S
    with pytest.raises(StaleFenceError):
        store.reap(fence=fence)
    assert (store.counts().leased, store.counts().returned) == (1, 0)


def test_of_requests_that_all_brokers_read_each_is_taken_by_one(store):
    store.request("broker", "drain/generator-0", "9")
    store.request("broker", "drain/generator-1", "9")
    assert store.requests("broker") == {"drain/generator-0": "9", "drain/generator-1": "9"}
    assert store.take_requests("broker", subjects=[]) == {}
    wanted = ["drain/generator-1", "drain/generator-2"]
    assert store.take_requests("broker", subjects=wanted) == {"drain/generator-1": "9"}
    assert store.take_requests("broker", subjects=wanted) == {}
    assert store.requests("broker") == {"drain/generator-0": "9"}
