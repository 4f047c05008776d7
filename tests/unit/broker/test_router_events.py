"""Events for departed peers and lapsed leases."""

import pytest

from slipstream.broker.messages import Bye
from tests.fakes import FakePeer


def test_a_silent_peer_is_an_event_and_its_host_and_pid_stay_known(scene):
    FakePeer(scene, "generator", "g0")
    scene.wait(scene.run.broker.peer_timeout_s + 1)
    assert scene.events() == [("g0", "silent for 8 s; 0 leases returned")]
    gone = scene.store.roles()["g0"]
    assert (gone["state"], gone["host"], gone["pid"]) == ("gone", "here", 1)


def test_a_regular_departure_is_no_event(scene):
    FakePeer(scene, "generator", "g0").exchange(Bye())
    assert scene.store.roles()["g0"]["state"] == "gone"
    assert scene.events() == []


def test_leases_that_lapse_together_make_one_event(scene):
    lapsing = {"owner": "nobody", "group_size": 2, "lease_s": 1.0, "admission_limit": 9}
    scene.store.lease(max_groups=2, **lapsing)
    scene.tick(5)
    ((role, text),) = scene.events()
    assert role == "broker"
    assert text.count("; ") == 1


@pytest.mark.parametrize("jump_s", [36000.0, -36000.0])
def test_a_clock_of_the_store_that_is_set_costs_no_lease_and_is_an_event(scene, jump_s):
    scene.step()
    assert scene.store.roles()["broker"].keys() >= {"host", "pid"}
    scene.store.lease(owner="nobody", group_size=2, max_groups=1, lease_s=30.0, admission_limit=9)
    scene.store_is_ahead_s = jump_s
    scene.tick(1)
    assert scene.events() == [
        ("broker", f"the store's clock jumped by {jump_s:+.0f} s: leases and claims keep the time they had left")
    ]
    scene.tick(31)
    assert "lapsed" in scene.events()[-1][1]


def test_a_broker_that_starts_after_the_clock_was_set_back_waits_for_no_lease_longer_than_it_lasts(scene):
    scene.store.lease(owner="nobody", group_size=2, max_groups=1, lease_s=30.0, admission_limit=9)
    scene.store_is_ahead_s = -36000.0
    scene.step()
    scene.tick(31)
    ((_, text),) = scene.events()
    assert "lapsed" in text
