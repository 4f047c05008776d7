"""Drain requests in the store become orders to generators."""

from slipstream.broker.messages import Bye, Drain, Pong
from tests.fakes import FakePeer, RouterScene

DRAIN_G0 = "drain/g0"


def drained(scene: RouterScene) -> FakePeer:
    """A generator that was sent one order to drain."""
    peer = scene.join()
    scene.store.request("broker", DRAIN_G0, str(scene.store.now() + 60))
    scene.tick()
    return peer


def test_the_named_generator_is_ordered_to_drain_and_no_other(scene: RouterScene):
    peers = [FakePeer(scene, "generator", name) for name in ("g0", "g1")]
    for peer in peers:
        peer.receive()
    scene.store.request("broker", DRAIN_G0, str(scene.store.now() + 60))
    scene.tick()
    assert [peer.receive() for peer in peers] == [[Drain("drain requested")], []]
    assert [(event.role, event.text) for event in scene.store.events(limit=9)] == [
        ("g0", "ordered to drain, as requested")
    ]


def test_a_generator_that_joins_later_is_ordered_too(scene: RouterScene):
    """Like a restarted broker, which reads the request before any peer is back."""
    scene.store.request("broker", DRAIN_G0, str(scene.store.now() + 60))
    scene.tick()
    peer = scene.join()
    scene.tick()
    assert peer.receive() == [Drain("drain requested")]
    assert len(scene.store.events(limit=9)) == 1


def test_the_order_is_repeated_until_the_generator_drains(scene: RouterScene):
    peer = drained(scene)
    scene.tick()
    assert peer.receive() == [Drain("drain requested")] * 2
    peer.exchange(Pong(sent_at=0.0, state="draining", version=0, reason="", gauges={}))
    scene.tick()
    assert peer.receive() == []
    assert len(scene.store.events(limit=9)) == 1


def test_a_successor_of_the_same_name_is_not_ordered(scene: RouterScene):
    drained(scene).exchange(Bye())
    other = scene.join(incarnation="2")
    scene.tick()
    assert other.receive() == []


def test_a_request_past_its_deadline_is_dropped(scene: RouterScene):
    peer = scene.join()
    scene.store.request("broker", DRAIN_G0, str(scene.store.now() - 1))
    scene.tick()
    assert peer.receive() == []
    assert scene.store.take_requests("broker") == {}
