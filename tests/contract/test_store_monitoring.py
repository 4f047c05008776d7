from collections.abc import Callable

import pytest

from slipstream.buffer.errors import StaleFenceError
from slipstream.buffer.records import ROLES_KEPT, Event, Heartbeat, MetricsRows, StepEntry
from slipstream.buffer.store_rules import NO_FENCE, Brokers
from slipstream.buffer.trajectory import VersionSpan
from tests.contract.stores import AnyStore, answer, claim, lease


def test_a_role_progresses_when_its_totals_grow_and_not_when_it_only_reports(store, clock):
    store.report_role("broker", {"state": "ready", "peers": 3})
    store.report_role("learner", {"state": "ready", "tokens": 100.0})
    clock.now += 5
    store.report_role("learner", {"state": "ready", "tokens": 100.0, "reason": "waiting"})
    role = store.roles()["learner"]
    assert (role["progressed_at"], role["reported_at"]) == (1000.0, 1005.0)
    clock.now += 1
    store.report_role("learner", {"state": "ready", "tokens": 101.0})
    assert store.roles()["learner"]["progressed_at"] == 1006.0
    assert "progressed_at" not in store.roles()["broker"], "it has no totals"
    # Joining again and leaving are no progress.
    clock.now += 1
    for gauges in ({"version": -1}, {"state": "ready", "tokens": 101.0}, {"state": "gone", "reason": "silent"}):
        store.report_role("learner", gauges)
    gone = {"state": "gone", "reason": "silent", "reported_at": 1007.0, "progressed_at": 1006.0}
    assert store.roles()["learner"] == gone


def test_above_the_cap_the_role_that_is_silent_for_longest_is_forgotten(store, clock):
    for role_id, gauges in (("early", {"tokens": 1.0}), ("learner", {}), ("late", {})):
        store.report_role(role_id, gauges)
        clock.now += 1
    clock.now += 1
    store.heartbeat([Heartbeat(f"generator-{number}", {}) for number in range(ROLES_KEPT - 3)], lease_s=1)
    clock.now += 1
    store.heartbeat([Heartbeat("generator-last", {}), Heartbeat("learner", {})], lease_s=1)
    assert len(store.roles()) == ROLES_KEPT
    assert "early" not in store.roles()
    assert {"learner", "late", "generator-0"} <= store.roles().keys()
    store.report_role("one-more", {})
    assert len(store.roles()) == ROLES_KEPT
    assert "late" not in store.roles()
    store.report_role("early", {})
    assert "progressed_at" not in store.roles()["early"], "its progress was forgotten, too"


def test_one_heartbeat_of_many_renews_the_leases_of_each_owner_and_reports_its_role(store, clock):
    held = {f"generator-{number}": lease(store, 2, owner=f"generator-{number}", lease_s=10) for number in range(100)}
    clock.now += 9
    # Each names its own first lease, the second of its neighbor, and one that does not exist.
    stolen = [leases[1].id for leases in held.values()]
    beats = []
    for number, (owner, leases) in enumerate(held.items()):
        named = [leases[0].id, leases[0].id, stolen[number - 1], "777-0"]
        beats.append(Heartbeat(owner, {"state": "ready", "lags": {"of": [number]}}, owner, named))
    assert store.heartbeat([*beats, Heartbeat("broker", {"state": "ready"})], lease_s=10) == 100
    assert store.heartbeat([], lease_s=10) == 0
    assert store.roles()["generator-70"] == {"state": "ready", "lags": {"of": [70]}, "reported_at": clock.now}
    assert len(store.roles()) == 101
    clock.now += 2
    lapsed = store.reap()
    assert len(lapsed) == 100, "second leases"
    assert f"lease {stolen[0]} of generator-0 lapsed: its prompt will be leased again" in lapsed
    assert store.counts().leased == 100


def test_the_newest_events_are_kept_in_order_and_short(store, clock):
    for number in range(300):
        store.record_event("generator-0", f"died {number}")
    clock.now += 1.5
    store.record_event("learner", "ü" * 5000)
    *_, before, last = store.events(limit=3)
    assert before == Event(1000.0, "generator-0", "died 299")
    assert last == Event(1001.5, "learner", "ü" * 1000)
    assert len(store.events(limit=1000)) == 256
    assert store.events(limit=0) == []


def test_metrics_are_counted_from_the_first_ever_appended(store):
    assert store.metrics() == MetricsRows(0, [])
    for step in range(1003):
        store.append_metrics({"step": step})
    assert (store.metrics().last, len(store.metrics().rows)) == (1003, 1000)
    assert store.metrics(after=1001) == MetricsRows(1003, [{"step": 1001}, {"step": 1002}])
    assert store.metrics(after=2).rows[0] == {"step": 3}
    assert store.metrics(after=1003) == store.metrics(after=5000) == MetricsRows(1003, [])


def test_ready_groups_are_counted_by_their_oldest_version(store):
    assert store.ready_versions() == {}
    store.announce_version(12)
    for each, versions in zip(lease(store, 4), ((0, 0), (12, 0), (12, 12), (3, 12)), strict=True):
        members = zip(each.indices, versions, strict=True)
        store.insert([answer(each, index, version_spans=[VersionSpan(6, version)]) for index, version in members])
    lease(store, 1)
    assert store.ready_versions() == {0: 2, 12: 1, 3: 1}
    claim(store, 1, 2)
    assert store.ready_versions() == {12: 1, 3: 1}


def test_images_are_kept_once_by_name(store):
    store.put_images({"aa": b"\x89PNG\x00", "bb": b"2"})
    store.put_images({"bb": b"other", "cc": b"3"})
    assert store.images(["cc", "aa", "bb", "dd"]) == {"aa": b"\x89PNG\x00", "bb": b"2", "cc": b"3"}
    assert store.images([]) == {}


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
    assert report(store, "broker", "b").fence == 2, "restarted"
    assert report(store, "broker-1").fence == NO_FENCE


@pytest.mark.parametrize("jump_s", [LEASE_S, -3600.0])
def test_another_broker_becomes_chief_when_the_lease_lapses_or_the_clock_is_set_back(store, clock, jump_s):
    report(store, "broker")
    clock.now += jump_s
    assert report(store, "broker-1") == Brokers("broker-1", 2, {"broker-1": {}})
    back = report(store, "broker")
    assert (back.chief, back.fence, set(back.living)) == ("broker-1", NO_FENCE, {"broker", "broker-1"})


OPERATIONS: dict[str, Callable[[AnyStore, int], object]] = {
    "reap": lambda store, fence: store.reap(fence=fence),
    "follow_clock": lambda store, fence: store.follow_clock(jump_s=1.0, lease_s=30, claim_lease_s=30, fence=fence),
    "forget": lambda store, fence: store.forget(["0"], fence=fence),
    "forget_steps": lambda store, fence: store.forget_steps(StepEntry(1, 0, 0, 0, "", [], []), fence=fence),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_work_for_all_needs_the_fence_of_the_chief(store, clock, operation):
    operation(store, NO_FENCE)
    first = report(store, "broker").fence
    operation(store, first)
    for other in (NO_FENCE, first + 1):
        with pytest.raises(StaleFenceError, match="must be the chief of its run"):
            operation(store, other)
    lease(store, 1, lease_s=1.0)
    clock.now += LEASE_S
    with pytest.raises(StaleFenceError):
        operation(store, first)
    assert (store.counts().leased, store.counts().returned) == (1, 0)
    second = report(store, "broker-1").fence
    operation(store, second)
    with pytest.raises(StaleFenceError):
        operation(store, first)


def test_of_requests_that_all_brokers_read_each_is_taken_by_one_in_its_newest_form(store):
    for subject, value in (("drain/generator-0", "8"), ("drain/generator-0", "9"), ("drain/generator-1", "9")):
        store.request("broker", subject, value)
    store.request("launcher", "generators", "2")
    assert store.requests("broker") == {"drain/generator-0": "9", "drain/generator-1": "9"}
    assert store.take_requests("broker", subjects=[]) == {}
    wanted = ["drain/generator-1", "drain/generator-2"]
    assert store.take_requests("broker", subjects=wanted) == {"drain/generator-1": "9"}
    assert store.take_requests("broker", subjects=wanted) == {}
    assert store.take_requests("broker") == {"drain/generator-0": "9"}
    assert store.requests("broker") == {}
    assert store.take_requests("launcher") == {"generators": "2"}
