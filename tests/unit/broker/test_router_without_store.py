"""While the store is away the router goes on: it pings, puts off, says why; what it owes the store, it does later."""

from pathlib import Path
from typing import Any

import pytest

from slipstream.broker.messages import Ack, AnyMessage, LeaseRequest, Nack, Ping, Pong, Prompts, Put
from slipstream.buffer.codec import decode
from slipstream.buffer.errors import StoreCannotWriteError, StoreUnavailableError
from slipstream.buffer.memory.store import MemoryStore
from tests.builders import make_packed
from tests.unit.broker.router_scene import Peer, Scene, lease

AWAY = StoreUnavailableError("it does not answer")


class ShakyStore(MemoryStore):
    """While `fault` is set, every operation raises it."""

    fault: StoreUnavailableError | None = None

    def __getattribute__(self, name: str) -> Any:
        fault = object.__getattribute__(self, "fault")
        if fault and name != "fault" and not name.startswith("_"):
            raise fault
        return object.__getattribute__(self, name)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr("tests.unit.broker.router_scene.MemoryStore", ShakyStore)
    return Scene(tmp_path)


def join(scene: Scene, name: str) -> Peer:
    peer = Peer(scene, "generator", name)
    peer.receive()
    return peer


def beat(scene: Scene) -> None:
    """One heartbeat later."""
    scene.clock.now += scene.run.broker.heartbeat_s
    scene.step()


def test_every_peer_is_pinged(scene: Scene):
    peers = [join(scene, f"g{number}") for number in range(3)]
    for peer in peers:
        peer.say(Pong(0.0, "ready", 0, lease_ids=["0-0"]))
    scene.store.fault = AWAY
    for peer in peers:
        peer.receive()
    scene.clock.now += scene.run.broker.heartbeat_s
    scene.step()
    for peer in peers:
        frames = peer.channel.receive(timeout_s=0)
        assert isinstance(decode(frames[0], AnyMessage), Ping)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [(AWAY, "store_unavailable"), (StoreCannotWriteError("its disk is full"), "store_cannot_write")],
)
def test_trajectories_are_put_off_and_taken_later_and_the_number_is_told(scene: Scene, fault, reason):
    peer = join(scene, "g0")
    lease(peer)
    header, payload = make_packed("0", 0)
    scene.store.fault = fault
    (nack,) = peer.say(Put([header]), payload)
    assert isinstance(nack, Nack)
    assert (nack.id, nack.reason, nack.is_fatal, nack.retry_after_s > 0) == (header.id, reason, False, True)
    scene.store.fault = None
    beat(scene)
    gauges = scene.store.roles()["broker"]
    assert gauges[f"deferred_{reason}"] == 1
    assert gauges["reason"] == f"trajectories are deferred: {reason}"
    assert peer.say(Put([header]), payload) == [Ack([header.id])]
    beat(scene)
    assert scene.store.roles()["broker"]["reason"] == ""


def test_who_asks_for_prompts_is_told_why_there_are_none_and_gets_them_later(scene: Scene):
    peer = join(scene, "g0")
    scene.store.fault = AWAY
    assert peer.say(LeaseRequest(max_trajectories=4)) == []
    scene.clock.now += 1.0
    scene.step()
    assert peer.receive() == [Prompts([], reason="store_unavailable")]
    scene.store.fault = None
    assert lease(peer).prompts


def test_who_left_meanwhile_is_settled_when_the_store_is_back(scene: Scene):
    peers = [join(scene, f"g{number}") for number in range(2)]
    lease(peers[0])
    scene.store.fault = AWAY
    scene.clock.now += scene.run.broker.peer_timeout_s + 1
    scene.step()
    scene.store.fault = None
    assert scene.store.counts().returned == 0
    beat(scene)
    assert scene.store.counts().returned == 2
    assert [scene.store.roles()[name]["state"] for name in ("g0", "g1")] == ["gone", "gone"]


def test_who_has_come_back_meanwhile_keeps_its_leases(scene: Scene):
    peer = join(scene, "g0")
    lease(peer)
    scene.store.fault = AWAY
    scene.clock.now += scene.run.broker.peer_timeout_s + 1
    scene.step()
    again = Peer(scene, "generator", "g0")
    again.receive()
    scene.store.fault = None
    beat(scene)
    assert scene.store.counts().leased == 2
    assert scene.store.counts().returned == 0
