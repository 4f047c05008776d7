"""The router refuses invalid messages with a reason and continues."""

import pytest

from slipstream.broker import ingest
from slipstream.broker.messages import (
    Ack,
    EpochOpened,
    LeaseRequest,
    Member,
    Message,
    OpenEpoch,
    Pong,
    Put,
    ReturnLeases,
)
from slipstream.buffer.codec import encode
from slipstream.buffer.trajectory import TrajectoryHeader
from tests.builders import make_packed
from tests.fakes import RouterScene


def test_each_trajectory_of_one_put_is_checked_by_itself(scene: RouterScene):
    peer = scene.join()
    peer.lease()
    packed = [make_packed("0", 0), make_packed("0", 1), make_packed("77", 0), make_packed("1", 0)]
    payloads = [payload for _, payload in packed]
    payloads[1] = payloads[1][:-1]
    answers = peer.exchange(Put([header for header, _ in packed]), *payloads)
    assert [(nack.id, nack.is_fatal, nack.lease_id) for nack in answers[:2]] == [
        ("0-0-1", True, "0-0"),
        ("77-0-0", True, "77-0"),
    ]
    assert answers[2:] == [Ack(["0-0-0", "1-0-0"])]
    assert scene.store.counts().refused == {"checksum": 1, "unknown_group": 1}


@pytest.mark.parametrize("num_payloads", [0, 1, 3])
def test_a_put_with_a_wrong_number_of_payloads_is_refused_whole(scene: RouterScene, num_payloads: int):
    peer = scene.join()
    peer.lease()
    packed = [make_packed("0", 0), make_packed("0", 1)]
    answers = peer.exchange(Put([header for header, _ in packed]), *[packed[0][1]] * num_payloads)
    assert [nack.id for nack in answers] == ["0-0-0", "0-0-1"]
    assert all(nack.is_fatal for nack in answers)
    assert scene.store.counts().refused == {"frame_count": 1}


def test_payloads_after_any_other_message_are_refused(scene: RouterScene):
    peer = scene.join()
    assert peer.exchange(LeaseRequest(max_trajectories=4), b"surplus") == []
    assert scene.store.counts().refused == {"frame_count": 1}
    assert scene.store.counts().leased == 0


def test_a_generator_gives_no_weight_orders_and_speaks_for_itself_only(scene: RouterScene):
    learner, one, other = scene.join("learner", role="learner"), scene.join("g0"), scene.join("g1")
    one.exchange(OpenEpoch(1, [Member("g1", "1")], "127.0.0.1", 1, 1.0))
    assert other.receive() == []
    one.exchange(EpochOpened(1, Member("g1", "1")))
    assert not [message for message in learner.receive() if isinstance(message, EpochOpened)]
    other.exchange(EpochOpened(1, Member("g1", "1")))
    assert [message for message in learner.receive() if isinstance(message, EpochOpened)]
    held = one.lease().prompts[0].lease.id
    other.exchange(ReturnLeases([held], "test"))
    assert scene.store.counts().returned == 0


def test_oversized_frames_are_refused_with_their_reason(scene: RouterScene):
    peer = scene.join()
    peer.lease()
    too_large = b"x" * (scene.run.broker.max_message_bytes + 1)
    header, _ = make_packed("0", 0)
    (nack,) = peer.exchange(Put([header]), too_large)
    assert nack.is_fatal
    peer.send([too_large])
    assert scene.store.counts().refused == {"oversized": 2}


def test_an_exception_in_a_check_refuses_that_trajectory_only(scene: RouterScene, monkeypatch: pytest.MonkeyPatch):
    def check_header(header: TrajectoryHeader, payload: bytes) -> None:
        raise TypeError("a bug")

    peer = scene.join()
    peer.lease()
    monkeypatch.setattr(ingest, "check_header", check_header)
    header, payload = make_packed("0", 0)
    (nack,) = peer.exchange(Put([header]), payload)
    assert nack.is_fatal
    assert scene.store.counts().refused == {"internal_error": 1}


@pytest.mark.parametrize(
    "message",
    [
        Pong(0.0, "ready", 0, gauges={"a": [1]}),  # type: ignore[dict-item]
        Pong(0.0, "ready", 0, gauges={str(n): n for n in range(10_000)}),
        Pong(0.0, "ready", 0, lease_ids=["x" * 10_000]),
        ReturnLeases(["0-0"], "x" * 10_000),
    ],
)
def test_the_size_of_a_peer_report_is_bounded(scene: RouterScene, message: Message):
    peer = scene.join()
    assert peer.exchange(message) == []
    assert scene.store.counts().refused == {"malformed": 1}


def test_malformed_frames_do_not_end_the_loop(scene: RouterScene):
    peer = scene.join()
    for frames in ([b""], [b"\xc1"], [b"\x80\x04\x95pickle"], [encode({"type": "Put"})]):
        peer.send(frames)
    assert peer.lease().prompts
