"""What the router refuses, with a reason, and goes on."""

import pytest

from slipstream.broker import ingest
from slipstream.broker.messages import (
    Ack,
    EpochOpened,
    LeaseRequest,
    Member,
    Message,
    Nack,
    OpenEpoch,
    Pong,
    Put,
    ReturnLeases,
)
from slipstream.buffer.codec import encode
from slipstream.buffer.trajectory import TrajectoryHeader
from tests.builders import make_packed
from tests.unit.broker.router_scene import Peer, Scene, lease


def test_a_trajectory_that_is_not_what_its_header_says_is_refused_and_kept_aside(scene: Scene):
    peer = Peer(scene, "generator", "g0")
    peer.receive()
    lease(peer)
    header, payload = make_packed("0", 0)
    (nack,) = peer.say(Put([header]), payload[:-1] + b"x")
    assert isinstance(nack, Nack)
    assert nack.is_fatal
    assert scene.store.counts().refused == {"checksum": 1}


def test_of_trajectories_that_came_together_each_is_judged_alone(scene: Scene):
    peer = Peer(scene, "generator", "g0")
    peer.receive()
    lease(peer)
    packed = [make_packed("0", 0), make_packed("0", 1), make_packed("77", 0), make_packed("1", 0)]
    payloads = [payload for _, payload in packed]
    payloads[1] = payloads[1][:-1]
    answers = peer.say(Put([header for header, _ in packed]), *payloads)
    assert [(nack.id, nack.is_fatal, nack.lease_id) for nack in answers[:2]] == [
        ("0-0-1", True, "0-0"),
        ("77-0-0", True, "77-0"),
    ]
    assert answers[2:] == [Ack(["0-0-0", "1-0-0"])]
    assert scene.store.counts().refused == {"checksum": 1, "unknown_group": 1}


@pytest.mark.parametrize("num_payloads", [0, 1, 3])
def test_headers_without_as_many_payloads_are_all_refused(scene: Scene, num_payloads: int):
    peer = Peer(scene, "generator", "g0")
    peer.receive()
    lease(peer)
    packed = [make_packed("0", 0), make_packed("0", 1)]
    answers = peer.say(Put([header for header, _ in packed]), *[packed[0][1]] * num_payloads)
    assert [nack.id for nack in answers] == ["0-0-0", "0-0-1"]
    assert all(nack.is_fatal for nack in answers)
    assert scene.store.counts().refused == {"frame_count": 1}


def test_other_messages_than_trajectories_have_one_frame(scene: Scene):
    peer = Peer(scene, "generator", "g0")
    peer.receive()
    assert peer.say(LeaseRequest(max_trajectories=4), b"surplus") == []
    assert scene.store.counts().refused == {"frame_count": 1}
    assert scene.store.counts().leased == 0


def test_a_generator_cannot_give_orders_about_weights(scene: Scene):
    one, other = Peer(scene, "generator", "g0"), Peer(scene, "generator", "g1")
    one.receive(), other.receive()
    one.say(OpenEpoch(1, [Member("g1", "1")], "127.0.0.1", 1, 1.0))
    assert other.receive() == []


def test_what_is_too_large_is_refused_with_its_reason(scene: Scene):
    peer = Peer(scene, "generator", "g0")
    peer.receive()
    lease(peer)
    too_large = b"x" * (scene.run.broker.max_message_bytes + 1)
    header, _ = make_packed("0", 0)
    (nack,) = peer.say(Put([header]), too_large)
    assert nack.is_fatal
    peer.send([too_large])
    assert scene.store.counts().refused == {"oversized": 2}


def test_a_generator_speaks_of_adopted_weights_for_itself_alone(scene: Scene):
    learner, one, other = (
        Peer(scene, "learner", "learner"),
        Peer(scene, "generator", "g0"),
        Peer(scene, "generator", "g1"),
    )
    learner.receive(), one.receive(), other.receive()
    one.say(EpochOpened(1, Member("g1", "1")))
    assert not [message for message in learner.receive() if isinstance(message, EpochOpened)]
    other.say(EpochOpened(1, Member("g1", "1")))
    assert [message for message in learner.receive() if isinstance(message, EpochOpened)]


def test_a_generator_returns_its_own_leases_alone(scene: Scene):
    one, other = Peer(scene, "generator", "g0"), Peer(scene, "generator", "g1")
    one.receive(), other.receive()
    held = lease(one).prompts[0].lease.id
    other.say(ReturnLeases([held], "test"))
    assert scene.store.counts().returned == 0


def test_a_fault_in_the_check_of_a_trajectory_ends_it_alone(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    def check_header(header: TrajectoryHeader, payload: bytes) -> None:
        raise TypeError("nobody thought of this")

    peer = Peer(scene, "generator", "g0")
    peer.receive()
    lease(peer)
    monkeypatch.setattr(ingest, "check_header", check_header)
    header, payload = make_packed("0", 0)
    (nack,) = peer.say(Put([header]), payload)
    assert nack.is_fatal
    assert scene.store.counts().refused == {"fault": 1}


@pytest.mark.parametrize(
    "message",
    [
        Pong(0.0, "ready", 0, gauges={"a": [1]}),  # type: ignore[dict-item]
        Pong(0.0, "ready", 0, gauges={str(n): n for n in range(10_000)}),
        Pong(0.0, "ready", 0, lease_ids=["x" * 10_000]),
        ReturnLeases(["0-0"], "x" * 10_000),
    ],
)
def test_what_a_peer_says_of_itself_is_bounded(scene: Scene, message: Message):
    peer = Peer(scene, "generator", "g0")
    peer.receive()
    assert peer.say(message) == []
    assert scene.store.counts().refused == {"malformed": 1}


def test_garbage_does_not_end_the_loop(scene: Scene):
    peer = Peer(scene, "generator", "g0")
    peer.receive()
    for frames in ([b""], [b"\xc1"], [b"\x80\x04\x95pickle"], [encode({"type": "Put"})]):
        peer.send(frames)
    assert lease(peer).prompts
