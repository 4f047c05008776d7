"""What every store shows to people who watch a run: how far each role is, what went wrong, how old the queue is."""

import pytest

from slipstream.buffer.errors import RunConflictError
from slipstream.buffer.records import ROLES_KEPT, Event
from slipstream.buffer.trajectory import VersionSpan
from tests.contract.stores import answer, claim, commit, lease, make_ready


# --- progress --------------------------------------------------------------------------------------------------------
def test_a_role_progresses_when_its_numbers_grow_and_not_when_it_only_reports(store, clock):
    store.report_role("learner", {"state": "ready", "tokens": 100.0})
    clock.now += 5
    store.report_role("learner", {"state": "ready", "tokens": 100.0, "reason": "waiting"})
    role = store.roles()["learner"]
    assert (role["progressed_at"], role["reported_at"]) == (1000.0, 1005.0)
    clock.now += 1
    store.report_role("learner", {"state": "ready", "tokens": 101.0})
    assert store.roles()["learner"]["progressed_at"] == 1006.0


def test_joining_again_and_leaving_are_no_progress(store, clock):
    told = {"version": 3, "tokens": 7.0}
    for gauges in (told, {"version": -1}, told, {"state": "gone", "reason": "silent"}):
        store.report_role("generator-0", gauges)
        clock.now += 1
    assert store.roles()["generator-0"] == {
        "state": "gone", "reason": "silent", "reported_at": 1003.0, "progressed_at": 1000.0,
    }  # fmt: skip


def test_of_too_many_roles_those_not_heard_of_for_longest_are_forgotten_with_all_that_was_kept(store, clock):
    store.report_role("passer-by", {"state": "gone", "tokens": 1.0})
    clock.now += 1
    store.report_role("learner", {"state": "ready"})
    clock.now += 1
    store.report_role("passer-by-2", {"state": "gone"})
    for number in range(ROLES_KEPT - 2):
        clock.now += 1
        store.report_role(f"generator-{number}", {"state": "ready"})
        store.report_role("learner", {"state": "ready"})
    assert len(store.roles()) == ROLES_KEPT
    assert "passer-by" not in store.roles()
    assert {"learner", "passer-by-2", "generator-0"} <= store.roles().keys()
    store.report_role("one-more", {"state": "ready"})
    assert len(store.roles()) == ROLES_KEPT
    assert "passer-by-2" not in store.roles()
    store.report_role("passer-by", {"state": "ready"})
    assert "progressed_at" not in store.roles()["passer-by"]


def test_a_role_without_such_numbers_has_no_progress(store):
    store.report_role("broker", {"state": "ready", "peers": 3})
    assert "progressed_at" not in store.roles()["broker"]


def test_the_run_tells_when_its_newest_step_was_committed(store, clock):
    assert store.run_state().stepped_at is None
    make_ready(store, 2)
    clock.now = 1234.5
    commit(store, claim(store, 1, 1))
    clock.now += 10
    store.set_phase("finishing")
    assert store.run_state().stepped_at == 1234.5
    assert store.now() == 1244.5


# --- events ----------------------------------------------------------------------------------------------------------
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


def test_nothing_is_noted_of_a_run_that_was_not_opened(fresh_store):
    assert fresh_store.events(limit=9) == []
    with pytest.raises(RunConflictError):
        fresh_store.record_event("learner", "evicted")


# --- the queue by age ------------------------------------------------------------------------------------------------
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


# --- requests --------------------------------------------------------------------------------------------------------
def test_a_request_is_given_out_once_to_whom_it_is_for(store):
    store.request("launcher", "generators", "4")
    store.request("broker", "drain/generator-1", "99.5")
    assert store.take_requests("launcher") == {"generators": "4"}
    assert store.take_requests("launcher") == {}
    assert store.take_requests("broker") == {"drain/generator-1": "99.5"}


def test_a_newer_request_replaces_the_older_one_on_its_subject(store):
    for number in ("2", "3"):
        store.request("launcher", "generators", number)
    assert store.take_requests("launcher") == {"generators": "3"}
