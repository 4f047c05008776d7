"""A rejected peer receives the reason in one sentence, and the run's events and log show it."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from slipstream.broker.errors import RefusedByBrokerError
from slipstream.broker.messages import Bye, Hello, Message, Nack, Put, Refuse, Welcome
from slipstream.broker.partial_decode import UNREADABLE
from slipstream.broker.transport.client import BrokerClient, BrokerClientThread, PeerStatus
from slipstream.broker.transport.inbox import QueueInbox
from slipstream.buffer.codec import decode, encode
from slipstream.buffer.trajectory import SCHEMA_VERSION
from slipstream.runtime.model_files import ModelFingerprint
from tests.builders import make_packed
from tests.fakes import FakePeer, RouterScene

NEWER = SCHEMA_VERSION + 1
TOKEN = "kept-to-ourselves"
HELLO = Hello("generator", "g0", "1", "here", 1, token=TOKEN)


@pytest.fixture
def guarded(tmp_path: Path) -> RouterScene:
    return RouterScene(tmp_path, token=TOKEN)


def as_plain(message: Message, **changes: Any) -> dict[str, Any]:
    """The message as a map, with changed or unknown fields."""
    return decode(encode(message), dict) | changes


def greet(scene: RouterScene, hello: Any) -> list:
    peer = FakePeer(scene, "generator", "somebody", token="not it")
    peer.receive()
    return peer.exchange(hello)


def events(scene: RouterScene) -> list[tuple[str, str]]:
    return [(event.role, event.text) for event in scene.store.events(limit=99)]


# --- token -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("token", "got"), [("", "got none"), ("wrong", "got a wrong one")])
def test_without_the_token_no_peer_joins_and_both_sides_show_the_reason(guarded, token, got):
    with capture_logs() as logs:
        (refuse,) = FakePeer(guarded, "generator", "g0", token=token).receive()
    assert isinstance(refuse, Refuse)
    assert got in refuse.reason
    assert "SLIPSTREAM_TOKEN" in refuse.reason
    assert events(guarded) == [("g0", f"refused: {refuse.reason}")]
    assert [(line["event"], line["kind"], line["reason"]) for line in logs] == [
        ("peer_refused", "token", refuse.reason)
    ]
    assert TOKEN not in f"{logs} {refuse}"


def test_with_the_token_a_peer_joins_and_the_broker_neither_keeps_nor_shows_it(guarded):
    with capture_logs() as logs:
        answers = FakePeer(guarded, "generator", "g0", token=TOKEN).receive()
    assert [type(answer) for answer in answers] == [Welcome]
    assert TOKEN not in f"{logs} {answers} {guarded.router._peers.generators()} {guarded.store.roles()}"


def test_a_peer_without_the_token_learns_nothing_about_other_peers(guarded):
    FakePeer(guarded, "generator", "g0", token=TOKEN)
    (refuse,) = FakePeer(guarded, "generator", "g0", "2").receive()
    assert "token" in refuse.reason
    assert "unique" not in refuse.reason


def test_a_broker_without_a_token_accepts_a_peer_that_has_one(scene):
    assert isinstance(FakePeer(scene, "generator", "g0", token="some").receive()[0], Welcome)


# --- names -----------------------------------------------------------------------------------------------------------
def test_of_two_generators_with_one_id_the_second_is_refused_and_the_first_continues(scene):
    first = FakePeer(scene, "generator", "g0")
    first.receive()
    (refuse,) = FakePeer(scene, "generator", "g0", "2").receive()
    assert "process 1 on here" in refuse.reason
    assert events(scene) == [("g0", f"refused: {refuse.reason}")]
    assert first.lease().prompts


@pytest.mark.parametrize("name", ["learner", "broker", "launcher", "archiver", "store"])
def test_a_generator_cannot_have_the_name_of_another_role(scene, name):
    (refuse,) = FakePeer(scene, "generator", name).receive()
    assert f"got {name!r}" in refuse.reason


# --- schema ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("version", [1, NEWER])
def test_an_older_and_a_newer_peer_are_refused_by_their_schema(guarded, version):
    (refuse,) = greet(guarded, msgspec.structs.replace(HELLO, schema_version=version))
    assert f"schema version must be {SCHEMA_VERSION}, got {version} from 'g0'" in refuse.reason
    assert ("g0", f"refused: {refuse.reason}") in events(guarded)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schema_version": NEWER, "mood": "good"}, f"schema version must be {SCHEMA_VERSION}, got {NEWER} from 'g0'"),
        (
            {"schema_version": NEWER, "role": "critic"},
            f"schema version must be {SCHEMA_VERSION}, got {NEWER} from 'g0'",
        ),
        ({"mood": "good"}, "unknown field `mood`"),
        ({"peer_id": ["g", 0], "token": 7}, "a Hello must match this version"),
        ({"schema_version": "three"}, "a Hello must match this version"),
    ],
)
def test_an_unreadable_hello_is_answered_and_none_of_it_is_stored(guarded, changes, words):
    (refuse,) = greet(guarded, as_plain(HELLO, **changes))
    assert words in refuse.reason
    assert len(refuse.reason) < 400
    assert guarded.store.counts().refused == {"malformed": 1}
    assert guarded.store.quarantined_frames() == [("malformed", b"")]


def test_a_hello_with_payloads_is_answered_too(guarded):
    peer = FakePeer(guarded, "generator", "g0")
    peer.receive()
    (refuse,) = peer.exchange(HELLO, b"surplus")
    assert "Hello must have one frame" in refuse.reason


# --- other unreadable messages ---------------------------------------------------------------------------------------
def test_each_readable_trajectory_id_of_an_unreadable_put_gets_a_fatal_nack(scene):
    peer = FakePeer(scene, "generator", "g0")
    peer.receive()
    peer.lease()
    packed = [make_packed("0", 0), make_packed("0", 1)]
    put = as_plain(Put([header for header, _ in packed]))
    put["headers"][1]["colour"] = "red"
    answers = peer.exchange(put, *(payload for _, payload in packed))
    assert [(nack.id, nack.lease_id, nack.is_fatal) for nack in answers] == [
        ("0-0-0", "0-0", True),
        ("0-0-1", "0-0", True),
    ]
    assert all(nack.reason.startswith(f"{UNREADABLE}: ") for nack in answers)
    assert scene.store.counts().refused == {"malformed": 1}
    assert scene.store.counts().accepted == 0


def test_an_unreadable_put_without_ids_or_from_an_unknown_peer_gets_no_nack(scene):
    peer = FakePeer(scene, "generator", "g0")
    peer.receive()
    assert peer.exchange({"type": "Put", "headers": [{"name": "0-0-0"}]}) == []
    peer.exchange(Bye())
    assert not any(isinstance(answer, Nack) for answer in peer.exchange({"type": "Put", "headers": [{"id": "0-0-0"}]}))


def test_a_flood_of_refusals_produces_few_log_lines_and_events(guarded):
    good = FakePeer(guarded, "generator", "g0", token=TOKEN)
    with capture_logs() as logs:
        for number in range(300):
            FakePeer(guarded, "generator", f"g{number}")
            good.send([b"\xc1"])
            good.send([encode(Put([make_packed("99", 0)[0]])), b"no"])
            guarded.clock.now += 0.01
        guarded.clock.now += 5
        guarded.step()
    for event in ("peer_refused", "frame_refused", "trajectory_refused"):
        *first, rest = (line for line in logs if line["event"] == event)
        assert len(first) == 8
        assert rest["more"] == 300 - 8
    assert len(events(guarded)) == 8
    assert guarded.store.counts().refused == {"malformed": 300, "checksum": 300}


# --- leaving ---------------------------------------------------------------------------------------------------------
def test_the_error_in_a_bye_is_shown_by_the_run(tmp_path):
    scene = RouterScene(tmp_path)
    peer = FakePeer(scene, "generator", "g0")
    peer.lease()
    peer.exchange(Bye("model.path must hold the same model"))
    assert events(scene) == [("g0", "left: model.path must hold the same model; 2 leases returned")]
    assert scene.store.roles()["g0"]["reason"] == "left: model.path must hold the same model"


def test_the_welcome_carries_the_fingerprint_of_the_model(tmp_path):
    model = ModelFingerprint(vocab_size=41)
    (welcome,) = FakePeer(RouterScene(tmp_path, model=model), "generator", "g0").receive()
    assert welcome.model == model


# --- the peer's side -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"type": "Refuse", "reason": "you are too old", "since": 3}, "you are too old"),
        ({"type": "Refuse", "text": "no"}, "same version"),
        ({"type": "Fanfare"}, "same version"),
    ],
)
def test_an_undecodable_answer_of_the_broker_refuses_the_peer_with_a_reason(scene, answer, words):
    server = scene.hub.server_channel
    inbox = QueueInbox()
    client = BrokerClient(scene.hub.client(), hello=HELLO, status=lambda: PeerStatus("starting"), on_message=inbox.put)
    client.step(timeout_s=0)
    identity, _ = server.receive(timeout_s=0)
    server.send(identity, [encode(answer)])
    thread = BrokerClientThread(client)
    thread.start()
    with pytest.raises(RefusedByBrokerError, match=words) as caught:
        inbox.get(timeout_s=20)
    thread.stop()
    assert client.refusal == str(caught.value)
