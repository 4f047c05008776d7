"""Events for departed peers and lapsed leases."""

from slipstream.broker.messages import Bye
from tests.fakes import FakePeer


def events(scene) -> list[tuple[str, str]]:
    return [(event.role, event.text) for event in scene.store.events(limit=9)]


def test_a_silent_peer_is_an_event_and_its_host_and_pid_stay_known(scene):
    FakePeer(scene, "generator", "g0")
    scene.clock.now += scene.run.broker.peer_timeout_s + 1
    scene.step()
    assert events(scene) == [("g0", "silent for 8 s; 0 leases returned")]
    gone = scene.store.roles()["g0"]
    assert (gone["state"], gone["host"], gone["pid"]) == ("gone", "here", 1)


def test_a_regular_departure_is_no_event(scene):
    FakePeer(scene, "generator", "g0").exchange(Bye())
    assert scene.store.roles()["g0"]["state"] == "gone"
    assert events(scene) == []


def test_leases_that_lapse_together_make_one_event(scene):
    lapsing = {"owner": "nobody", "group_size": 2, "lease_s": 1.0, "admission_limit": 9}
    scene.store.lease(max_groups=2, **lapsing)
    scene.clock.now += 5
    scene.step()
    ((role, text),) = events(scene)
    assert role == "broker"
    assert text.count("; ") == 1


def test_the_broker_reports_its_host_and_pid(scene):
    scene.step()
    assert scene.store.roles()["broker"].keys() >= {"host", "pid"}
