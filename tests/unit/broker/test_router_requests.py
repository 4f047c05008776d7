"""What the broker does with requests that were left for it in the store."""

from slipstream.broker.messages import Bye, Drain, Pong
from tests.unit.broker.router_scene import Peer, Scene

DRAIN_G0 = "drain/g0"


def tick(scene: Scene) -> None:
    scene.clock.now += scene.run.broker.heartbeat_s
    scene.step()


def asked(scene: Scene) -> Peer:
    """One that was told to leave, once so far."""
    peer = Peer(scene, "generator", "g0")
    peer.receive()
    scene.store.request("broker", DRAIN_G0, str(scene.store.now() + 60))
    tick(scene)
    return peer


def test_the_generator_that_is_asked_to_leave_is_told_so_and_no_other(scene: Scene):
    peers = [Peer(scene, "generator", name) for name in ("g0", "g1")]
    for peer in peers:
        peer.receive()
    scene.store.request("broker", DRAIN_G0, str(scene.store.now() + 60))
    tick(scene)
    assert [peer.receive() for peer in peers] == [[Drain("asked to leave")], []]
    assert [(event.role, event.text) for event in scene.store.events(limit=9)] == [("g0", "is told to leave, as asked")]


def test_one_who_comes_later_is_told_as_well(scene: Scene):
    """The broker was killed and started again, and has taken the request before anybody is back."""
    scene.store.request("broker", DRAIN_G0, str(scene.store.now() + 60))
    tick(scene)
    peer = Peer(scene, "generator", "g0")
    peer.receive()
    tick(scene)
    assert peer.receive() == [Drain("asked to leave")]
    assert len(scene.store.events(limit=9)) == 1


def test_one_who_does_not_begin_to_leave_is_told_again_until_it_does(scene: Scene):
    peer = asked(scene)
    tick(scene)
    assert peer.receive() == [Drain("asked to leave")] * 2
    peer.say(Pong(sent_at=0.0, state="draining", version=0, reason="", gauges={}))
    tick(scene)
    assert peer.receive() == []
    assert len(scene.store.events(limit=9)) == 1


def test_another_one_under_the_same_name_is_not_told(scene: Scene):
    asked(scene).say(Bye())
    other = Peer(scene, "generator", "g0", "2")
    other.receive()
    tick(scene)
    assert other.receive() == []


def test_a_request_that_nobody_waits_for_any_more_is_dropped(scene: Scene):
    peer = Peer(scene, "generator", "g0")
    peer.receive()
    scene.store.request("broker", DRAIN_G0, str(scene.store.now() - 1))
    tick(scene)
    assert peer.receive() == []
    assert scene.store.take_requests("broker") == {}
