"""A rejected peer receives the reason in one sentence, and the run's events and log show it."""

from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from slipstream.broker.errors import RefusedByBrokerError
from slipstream.broker.ingest import Ingest
from slipstream.broker.messages import UNREADABLE, Ack, Bye, Hello, Member, Message, Nack, OpenEpoch, Pong, Put, Welcome
from slipstream.broker.transport.client import BrokerClient, BrokerClientThread
from slipstream.broker.transport.session import QueueInbox
from slipstream.buffer.codec import decode, encode
from slipstream.buffer.records import Insertion
from slipstream.buffer.store import StoreOutage
from slipstream.buffer.trajectory import SCHEMA_VERSION
from tests.builders import make_packed
from tests.cases import cases
from tests.fakes import FakeClock, FakePeer, RouterScene
from tests.memory_store.store import MemoryStore

NEWER = SCHEMA_VERSION + 1
HELLO = Hello("generator", "g0", "1", "here", 1)
NUM_GROUPS = 100


def as_plain(message: Message, **changes: Any) -> dict[str, Any]:
    """The message as a map, with changed or unknown fields."""
    return decode(encode(message), dict) | changes


def greet(scene: RouterScene, hello: Any) -> list:
    peer = scene.join("broker")
    return peer.exchange(hello)


def test_of_two_generators_with_one_id_the_second_is_refused_while_the_first_is_connected(scene):
    first = scene.join()
    (refuse,) = FakePeer(scene, "generator", "g0", "2").receive()
    assert "process 1 on here" in refuse.reason
    assert scene.events() == [("g0", f"refused: {refuse.reason}")]
    assert first.lease().prompts
    first.channel.close()
    (welcome,) = FakePeer(scene, "generator", "g0", "3").receive()
    assert isinstance(welcome, Welcome)


@pytest.mark.parametrize("name", ["learner", "broker", "launcher", "archiver", "store"])
def test_a_generator_cannot_have_the_name_of_another_role(scene, name):
    (refuse,) = FakePeer(scene, "generator", name).receive()
    assert f"got {name!r}" in refuse.reason


def test_a_second_learner_of_another_name_is_refused_and_its_orders_reach_nobody(scene):
    first, second = FakePeer(scene, "learner", "learner"), FakePeer(scene, "learner", "other")
    (refuse,) = second.receive()
    assert "a run has one learner, whose id must be 'learner', got 'other'" in refuse.reason
    generator = scene.join()
    members = [Member("g0", "1")]
    order = OpenEpoch(1, members, "nowhere", 1, 1.0)
    assert [type(answer) for answer in second.exchange(order)] == [Bye]
    assert generator.receive() == []
    first.send([encode(order)])
    assert order in generator.receive()


@cases(
    "changes",
    {"peer_id": "g\x1b[2J"},
    {"peer_id": "g\n12:00:00 [info ] peer_joined"},
    {"peer_id": "g\n"},
    {"peer_id": ""},
    {"incarnation": "1\r"},
    {"host": "\u202ehere"},
)
def test_names_with_control_characters_are_refused_and_reach_no_log_raw(scene, changes):
    with capture_logs() as logs:
        (refuse,) = greet(scene, as_plain(HELLO, **changes))
    assert "a Hello must match this version" in refuse.reason
    shown = [*(value for line in logs for value in line.values()), *(text for each in scene.events() for text in each)]
    assert all(text.isprintable() for text in shown if isinstance(text, str)), shown
    assert all(peer.hello.peer_id in ("g0", "broker") for peer in scene.router._peers.generators())


@pytest.mark.parametrize("version", [1, NEWER])
def test_an_older_and_a_newer_peer_are_refused_by_their_schema(scene, version):
    (refuse,) = greet(scene, msgspec.structs.replace(HELLO, schema_version=version))
    assert f"schema version must be {SCHEMA_VERSION}, got {version} from 'g0'" in refuse.reason
    assert ("g0", f"refused: {refuse.reason}") in scene.events()


@cases(
    "changes, words",
    ({"schema_version": NEWER, "mood": "good"}, f"schema version must be {SCHEMA_VERSION}, got {NEWER} from 'g0'"),
    ({"schema_version": NEWER, "role": "critic"}, f"version must be {SCHEMA_VERSION}, got {NEWER} from 'g0'"),
    ({"mood": "good"}, "unknown field `mood`"),
    ({"peer_id": ["g", 0], "token": "of an older version"}, "a Hello must match this version"),
    ({"schema_version": "three"}, "a Hello must match this version"),
)
def test_an_unreadable_hello_is_answered_and_none_of_it_is_stored(scene, changes, words):
    (refuse,) = greet(scene, as_plain(HELLO, **changes))
    assert words in refuse.reason
    assert len(refuse.reason) < 400
    assert scene.store.counts().refused == {"malformed": 1}
    assert scene.store.quarantined_frames() == [("malformed", b"")]


def test_each_readable_trajectory_id_of_an_unreadable_put_gets_a_fatal_nack(scene):
    peer = scene.join()
    peer.lease()
    packed = [make_packed("0", 0), make_packed("0", 1)]
    put = as_plain(Put([header for header, _ in packed]))
    put["headers"][1]["color"] = "red"
    answers = peer.exchange(put, *(payload for _, payload in packed))
    expected = [("0-0-0", "0-0", True), ("0-0-1", "0-0", True)]
    assert [(nack.id, nack.lease_id, nack.is_fatal) for nack in answers] == expected
    assert all(nack.reason.startswith(f"{UNREADABLE}: ") for nack in answers)
    assert scene.store.counts().refused == {"malformed": 1}
    assert scene.store.counts().accepted == 0


def test_an_unreadable_put_without_ids_or_from_an_unknown_peer_gets_no_nack(scene):
    peer = scene.join()
    (refuse,) = peer.exchange(HELLO, b"surplus")
    assert "Hello must have one frame" in refuse.reason
    assert peer.exchange({"type": "Put", "headers": [{"name": "0-0-0"}]}) == []
    peer.exchange(Bye())
    assert not any(isinstance(answer, Nack) for answer in peer.exchange({"type": "Put", "headers": [{"id": "0-0-0"}]}))


def test_a_flood_of_refusals_produces_few_log_lines_and_events(scene):
    good = FakePeer(scene, "generator", "g0")
    with capture_logs() as logs:
        for number in range(300):
            FakePeer(scene, "learner", f"g{number}")
            good.send([b"\xc1"])
            good.send([encode(Put([make_packed("99", 0)[0]])), b"no"])
            scene.clock.now += 0.01
        scene.tick(5)
    for event in ("peer_refused", "frame_refused", "trajectory_refused"):
        *first, rest = (line for line in logs if line["event"] == event)
        assert len(first) == 8
        assert rest["more"] == 300 - 8
    assert len(scene.events()) == 8
    assert scene.store.counts().refused == {"malformed": 300, "checksum": 300}


def test_the_error_in_a_bye_is_shown_by_the_run(tmp_path):
    scene = RouterScene(tmp_path)
    peer = FakePeer(scene, "generator", "g0")
    peer.lease()
    peer.exchange(Bye("model.path must hold the same model"))
    assert scene.events() == [("g0", "left: model.path must hold the same model; 2 leases returned")]
    assert scene.store.roles()["g0"]["reason"] == "left: model.path must hold the same model"


@cases(
    "answer, words",
    ({"type": "Refuse", "reason": "you are too old", "since": 3}, "you are too old"),
    ({"type": "Refuse", "text": "no"}, "same version"),
    ({"type": "Fanfare"}, "same version"),
)
def test_an_undecodable_answer_of_the_broker_refuses_the_peer_with_a_reason(scene, answer, words):
    server = scene.hub.server_channel
    inbox = QueueInbox()
    starting = Pong(-1.0, "starting", -1)
    client = BrokerClient(scene.hub.client(), hello=HELLO, status=lambda: starting, on_message=inbox.put)
    client.step(timeout_s=0)
    identity, _ = server.receive(timeout_s=0)
    server.send(identity, [encode(answer)])
    thread = BrokerClientThread(client)
    thread.start()
    with pytest.raises(RefusedByBrokerError, match=words) as caught:
        inbox.get(timeout_s=20)
    thread.stop()
    assert client.refusal == str(caught.value)


def make_ingest() -> tuple[Ingest, MemoryStore]:
    store = MemoryStore()
    store.open_run("run", config_json="{}", num_rows=8, seed=0)
    store.set_phase("training")
    store.lease(owner="g", max_groups=NUM_GROUPS, group_size=2, lease_s=60.0, admission_limit=NUM_GROUPS)
    return Ingest(store, StoreOutage(report=lambda *_, **__: None, clock=FakeClock(0.0))), store


def put(ingest: Ingest, sender: bytes, *, groups: range, index: int = 0) -> set[str]:
    """Receive one Put of one answer to each group; returns their ids."""
    packed = [make_packed(str(group), index, group_size=2) for group in groups]
    assert ingest.add(sender, Put([header for header, _ in packed]), [payload for _, payload in packed]) == []
    return {header.id for header, _ in packed}


@pytest.mark.parametrize("num_groups", [1, 49, 50, 51, NUM_GROUPS])
def test_what_is_acknowledged_is_stored_id_by_id_however_large_the_batch(num_groups: int):
    ingest, store = make_ingest()
    sent = put(ingest, b"g", groups=range(num_groups))
    acknowledged = [each for _, answer in ingest.flush() if isinstance(answer, Ack) for each in answer.ids]
    assert sorted(acknowledged) == sorted(sent)
    assert {member.id for group in store._groups.values() for member in group.members.values()} == sent
    assert store.counts().accepted == num_groups


def test_every_sender_is_acknowledged_its_own():
    ingest, _ = make_ingest()
    sent = {sender: put(ingest, sender, groups=range(3), index=index) for index, sender in enumerate((b"a", b"b"))}
    answers = {identity: set(answer.ids) for identity, answer in ingest.flush() if isinstance(answer, Ack)}
    assert answers == sent


def test_what_a_full_store_refuses_is_to_be_sent_again():
    ingest, store = make_ingest()
    refused = Insertion(outcome="refused", reason="store_full")
    store.insert = lambda trajectories, *, guest="": [refused for _ in trajectories]
    (trajectory_id,) = put(ingest, b"g", groups=range(1))
    ((identity, nack),) = ingest.flush()
    assert isinstance(nack, Nack)
    assert (identity, nack.id, nack.is_fatal, nack.reason) == (b"g", trajectory_id, False, "store_full")
    assert nack.retry_after_s > 0
    assert nack.lease_id == "0-0"
