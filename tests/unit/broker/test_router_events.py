"""What the broker tells the store of peers that leave and of prompts that come back, for people to read."""

from slipstream.broker.messages import Bye
from tests.unit.broker.router_scene import Peer


def events(scene) -> list[tuple[str, str]]:
    return [(event.role, event.text) for event in scene.store.events(limit=9)]


def test_a_peer_that_falls_silent_is_an_event_and_stays_known_by_its_place(scene):
    Peer(scene, "generator", "g0")
    scene.clock.now += scene.run.broker.peer_timeout_s + 1
    scene.step()
    assert events(scene) == [("g0", "silent for 8 s; 0 leases returned")]
    gone = scene.store.roles()["g0"]
    assert (gone["state"], gone["host"], gone["pid"]) == ("gone", "here", 1)


def test_a_peer_that_says_goodbye_is_no_event(scene):
    Peer(scene, "generator", "g0").say(Bye())
    assert scene.store.roles()["g0"]["state"] == "gone"
    assert events(scene) == []


def test_leases_that_lapse_together_are_one_event(scene):
    lapsing = {"owner": "nobody", "group_size": 2, "lease_s": 1.0, "admission_limit": 9}
    scene.store.lease(max_groups=2, **lapsing)
    scene.clock.now += 5
    scene.step()
    ((role, text),) = events(scene)
    assert role == "broker"
    assert text.count("; ") == 1


def test_the_broker_tells_where_it_is(scene):
    scene.step()
    assert scene.store.roles()["broker"].keys() >= {"host", "pid"}
