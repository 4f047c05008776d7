"""Status of a run: its roles, their waits, admission and events."""

import pytest

from slipstream.buffer.records import Event
from slipstream.observe.run_status import Wait
from tests.builders import make_run
from tests.fakes import STATUS_ROW, make_gauges, make_reports, status_of


def role(status, name):
    return next(each for each in status.roles if each.name == name)


def test_roles_are_alive_silent_or_gone_and_a_generator_has_its_figures_whatever_the_types_of_its_gauges():
    status = status_of()
    names = ["broker", "launcher", "learner", "generator-0", "generator-1", "generator-2"]
    assert [each.name for each in status.roles] == names
    assert [each.liveness for each in status.roles[3:]] == ["alive", "silent", "gone"]
    assert role(status, "generator-1").report_age_s == 90.0
    first = role(status_of(), "generator-0")
    assert (first.version, first.version_lag, first.tokens_per_s) == (2, 1, 5210.25)
    assert (first.running, first.capacity, first.restarts) == (32, 64, 2)
    assert (first.host, first.pid, first.progress_age_s) == ("node", 7, 0.5)
    assert role(status_of(), "learner").version_lag is None
    gauges = make_gauges(version=-1, tokens_per_s="fast", running=None, max_concurrency="many")
    without_weights = role(status_of({"g": (0, gauges)}), "g")
    assert (without_weights.version, without_weights.version_lag) == (None, None)
    assert (without_weights.tokens_per_s, without_weights.running, without_weights.capacity) == (None, None, 64)
    assert role(status_of({"g": (0, make_gauges(max_concurrency=16))}), "g").capacity == 16, "as reported"


@pytest.mark.parametrize(("age_s", "liveness"), [(8.0, "alive"), (8.01, "silent"), (-60.0, "silent")])
def test_the_peer_timeout_comes_from_the_run(age_s, liveness):
    assert role(status_of({"generator-0": (age_s, make_gauges())}), "generator-0").liveness == liveness


@pytest.mark.parametrize(("age_s", "address"), [(0.5, "tcp://10.0.0.5:20000"), (90.0, "")])
def test_the_address_to_join_is_that_of_a_living_broker(age_s, address):
    broker = {"role": "broker", "state": "ready", "address": "tcp://10.0.0.5:20000"}
    assert status_of({"broker": (age_s, broker)}).address == address
    assert status_of().address == ""


def test_paced_generators_and_those_with_room_wait_for_the_learner_and_all_for_dead_silent_and_missing_roles():
    assert status_of().waits == [Wait("generator-0", "the learner", "pacing: wait")]
    reported = make_reports() | {"generator-0": (0, make_gauges())}
    waits = status_of(reported, phase="finishing").waits
    assert waits == [Wait("the generators", "the learner", "the run is finishing")]
    reported["generator-0"] = (0, make_gauges(running=64))
    assert status_of(reported, phase="finishing").waits == []
    reported = make_reports() | {"broker": (43.0, make_reports()["broker"][1])}
    assert status_of(reported).waits[0] == Wait("all roles", "the broker", "the broker has been silent for 43 s")
    reported = make_reports()
    reported["learner"] = (20.0, reported["learner"][1])
    del reported["generator-0"]
    found = [(wait.waiter, wait.blocked_on) for wait in status_of(reported).waits]
    assert found == [("the generators", "the learner"), ("the learner", "the generators")]
    assert status_of({}).waits == [Wait("all roles", "the broker", "no broker has joined yet")]
    assert status_of({}, phase="finished").waits == []


SHORT = "waiting for the 2 groups of step 4: 1 of 2 groups are ready"
DEFERRED = {"reason": "trajectories are deferred: store_full", "waits_for": "store"}
STORE = {"reason": "the store at x for 3 s of 60 s", "waits_for": "store"}


@pytest.mark.parametrize(
    ("changes", "waits"),
    [
        ({"learner": {"reason": SHORT, "waits_for": "groups"}}, [("learner", "the generators")]),
        ({"broker": DEFERRED, "learner": STORE}, [("broker", "the store"), ("learner", "the store")]),
    ],
)
def test_roles_wait_for_what_they_report(changes, waits):
    reports = {name: (0, {"role": name, "state": "ready"} | gauges) for name, gauges in changes.items()}
    found = {(wait.waiter, wait.blocked_on): wait.reason for wait in status_of(make_reports() | reports).waits}
    assert set(waits) <= found.keys()
    assert [found[wait] for wait in waits] == [gauges["reason"] for gauges in changes.values()]


def test_ready_groups_events_fractions_admission_and_a_full_disk_are_in_the_status():
    status = status_of(ready_versions={0: 1, 3: 5, 2: 4}, events=[Event(990.0, "generator-1", "died")])
    assert list(status.ready_by_lag.items()) == [(0, 5), (1, 4), (3, 1)]
    (event,) = status.events
    assert (event.age_s, event.role, event.text) == (10.0, "generator-1", "died")
    status = status_of(rows=(STATUS_ROW, STATUS_ROW))
    assert status.learner_wait_fraction == pytest.approx(0.25)
    assert status.generators_busy_fraction == 0.5, "of the only living generator"
    assert status_of({}).learner_wait_fraction is None
    assert status_of({}).generators_busy_fraction is None
    assert status_of().admission.reason == ""
    assert status_of(phase="finishing").admission.reason == "the run is finishing"
    lagging = make_run(staleness={"max_lag": 1})
    assert status_of(run=lagging).admission.limit == 2 * lagging.learner.prompts_per_step
    (wait,) = status_of(full_disk="/data (0 MiB of 9 MiB free), which holds runs/x/store").waits
    assert (wait.waiter, wait.blocked_on) == ("all roles", "the disk")
    assert "/data (0 MiB of 9 MiB free)" in wait.reason
    assert status_of(phase="finished", full_disk="/data").waits == []
