from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs
from structlog.testing import capture_logs

from slipstream.broker.errors import RefusedByBrokerError
from slipstream.broker.guests import convict
from slipstream.broker.ingest import Ingest
from slipstream.broker.messages import (
    UNREADABLE,
    Ack,
    Audit,
    Audited,
    Bye,
    Drain,
    Hello,
    LeaseRequest,
    LenderError,
    Member,
    Message,
    Nack,
    OpenEpoch,
    Pong,
    Prompt,
    Put,
    Refuse,
    UpdateApplied,
    Welcome,
)
from slipstream.broker.transport.client import BrokerClient, BrokerClientThread
from slipstream.broker.transport.endpoints import machine_id
from slipstream.broker.transport.session import QueueInbox
from slipstream.buffer.codec import decode, encode, unpack
from slipstream.buffer.records import Insertion
from slipstream.buffer.store import StoreOutage
from slipstream.buffer.trajectory import SCHEMA_VERSION, AnswerCheck, Reward, Sampling, VersionSpan
from tests.builders import make_packed
from tests.cases import cases
from tests.fakes import FakeClock, FakePeer, RouterScene
from tests.memory_store.store import MemoryStore

NEWER = SCHEMA_VERSION + 1
HELLO = Hello("generator", "g0", "1", "here", 1)
NUM_GROUPS = 100
READY = Pong(-1.0, "ready", 0)
SETTINGS = {"cluster": {"untrusted_generators": {"names": ["alice", "mallory"], "audit_fraction": 1.0}}}
LIE = "its reward is another"


def as_plain(message: Message, **changes: Any) -> dict[str, Any]:
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


@pytest.mark.parametrize("trusted", [False, True])
def test_a_generator_elsewhere_that_insists_on_broadcasts_needs_a_trusted_network(tmp_path: Path, trusted: bool):
    cluster = {"trusted_network": trusted, "interface": "127.0.0.0/8"}
    scene = RouterScene(tmp_path, settings={"cluster": cluster})
    for machine, is_here in (("", True), (machine_id(), True), ("elsewhere", False)):
        hello = structs.replace(HELLO, machine=machine, weight_transport="collective")
        (answer,) = (each for each in greet(scene, hello) if isinstance(each, Welcome | Refuse))
        assert isinstance(answer, Welcome) == (trusted or is_here)
        needs = "weights.transport=collective on another machine needs cluster.trusted_network=true"
        assert isinstance(answer, Welcome) or needs in answer.reason


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


def test_each_readable_trajectory_id_of_an_unreadable_put_of_a_known_peer_gets_a_fatal_nack(scene):
    peer = scene.join()
    peer.lease()
    packed = [make_packed("0", 0), make_packed("0", 1)]
    put = as_plain(Put([header for header, _ in packed]))
    put["headers"][1]["color"] = "red"
    answers = peer.exchange(put, *(payload for _, payload in packed))
    expected = [("0-0-0", "0-0", True), ("0-0-1", "0-0", True)]
    assert [(nack.id, nack.lease_id, nack.is_fatal) for nack in answers] == expected
    assert all(nack.reason.startswith(f"{UNREADABLE}: ") for nack in answers)
    assert (scene.store.counts().refused, scene.store.counts().accepted) == ({"malformed": 1}, 0)
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
    stored = {member.header.id for group in store._groups.values() for member in group.members.values()}
    assert stored == sent
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


class GuestPeer(FakePeer):
    def __init__(self, hosted: RouterScene, name: str, *, role: str = "generator", key: str = "") -> None:
        client = hosted.hub.client
        hosted.hub.client = lambda: client(guest=key or name)  # type: ignore[method-assign]
        super().__init__(hosted, role, name)
        hosted.hub.client = client  # type: ignore[method-assign]


@pytest.fixture
def hosted(tmp_path: Path) -> RouterScene:
    return RouterScene(tmp_path, settings=SETTINGS, staleness={"max_lag": 4})


def own(hosted: RouterScene, name: str = "g0") -> FakePeer:
    peer = FakePeer(hosted, "generator", name)
    peer.exchange(READY)
    return peer


def join(hosted: RouterScene, name: str = "mallory") -> GuestPeer:
    guest = GuestPeer(hosted, name)
    guest.exchange(READY)
    return guest


def answer(prompt: Prompt, index: int, *, guest: str = "mallory", **overrides: object):
    fields = {"prompt_uid": prompt.uid, "generator_id": guest, "attempt": prompt.lease.attempt}
    fields |= {"sampling": Sampling(1.0, 1.0, -1, 16, seed=index), "data_source": "test"}
    return make_packed(prompt.lease.group_id, index, **(fields | overrides))  # type: ignore[arg-type]


def send_all(peer: FakePeer, *packed) -> list:
    return peer.exchange(Put([header for header, _ in packed]), *(payload for _, payload in packed))


def ordered(peer: FakePeer) -> list[Audit]:
    return [message for message in peer.receive() if isinstance(message, Audit)]


def give_answers(hosted: RouterScene, guest: FakePeer, name: str = "mallory") -> list[Prompt]:
    """The guest answers two groups of two; returns their prompts."""
    prompts = guest.lease().prompts
    for prompt in prompts:
        (ack,) = send_all(guest, *(answer(prompt, index, guest=name) for index in prompt.lease.indices))
        assert isinstance(ack, Ack), ack
    hosted.step()
    return prompts


def test_a_guest_gets_training_prompts_once_one_of_ones_own_can_check_it_and_no_evaluations(hosted: RouterScene):
    guest = join(hosted)
    assert guest.exchange(LeaseRequest(4)) == []
    hosted.tick(1.0)
    (empty,) = guest.receive()
    assert empty.prompts == []
    assert empty.reason == "guests: no trusted generator is ready to check answers"
    hosted.store.open_evaluation("e", purpose="sampled", version=0, rows=[0, 1])
    owned = own(hosted)
    assert {prompt.lease.purpose for prompt in guest.lease().prompts} == {"train"}
    assert "sampled" in {prompt.lease.purpose for prompt in owned.lease().prompts}


def test_a_check_of_a_guests_answer_counts_once_and_only_from_whoever_was_ordered_which_no_guest_is(hosted):
    first, second, guest, other = own(hosted), own(hosted, "g1"), join(hosted), join(hosted, "alice")
    (prompt, _) = give_answers(hosted, guest)
    orders = {peer: ordered(peer) for peer in (first, second)}
    assert sum(map(len, orders.values())) == 4
    assert orders[first][0].prompt == prompt
    assert ordered(guest) == ordered(other) == []
    for name in ("0-0-0", "0-0-1"):
        other.exchange(Audited(AnswerCheck(name, lie=LIE)))
    lies = {peer: [unpack(order.payload).id for order in each] for peer, each in orders.items()}
    own_lie, *others = lies[first]
    for name in (*others, *others, *lies[second]):
        (second if name in others else first).exchange(Audited(AnswerCheck(name, lie=LIE)))
    for _ in range(2):
        first.exchange(Audited(AnswerCheck(own_lie, lie=LIE)))
    assert hosted.store.quarantined_guests() == {}


def test_a_liar_is_quarantined_with_its_groups_drained_and_may_not_come_back(hosted: RouterScene):
    owned, guest, honest = own(hosted), join(hosted), join(hosted, "alice")
    give_answers(hosted, guest)
    hosted.store.commit_version(1)
    owned.receive()
    owned.exchange(Audited(AnswerCheck("0-0-0", lie=LIE)))
    assert hosted.store.counts().ready == 2
    owned.exchange(Audited(AnswerCheck("0-0-1", lie=LIE)))
    assert hosted.store.counts().ready == 0
    assert hosted.store.counts().reasons == {"quarantined: guest: mallory": 2}
    sentence = f"2 of 2 checked answers are false, the last one: {LIE}"
    assert hosted.store.quarantined_guests() == {"mallory": sentence}
    drain = next(message for message in guest.receive() if isinstance(message, Drain))
    assert drain.reason == f"quarantined: {sentence}"
    role = hosted.store.roles()["mallory"]
    assert (role["state"], role["reason"]) == ("gone", f"quarantined: {sentence}")
    told = [f"quarantined, with the 2 groups it contributed to: {sentence}"]
    told += [f"quarantined: {sentence}; 0 leases returned"]
    assert [text for role, text in hosted.events() if role == "mallory"] == told
    assert guest.exchange(LeaseRequest(4)) == [Bye()]
    (refusal,) = GuestPeer(hosted, "mallory").receive()
    assert isinstance(refusal, Refuse)
    assert refusal.reason == f"guest 'mallory' is quarantined and may not join again: {sentence}"
    assert len(honest.lease().prompts) == 2
    assert hosted.store.audit().is_sound


def test_checks_of_a_generator_that_leaves_or_says_nothing_go_to_another(hosted: RouterScene):
    first, guest = own(hosted), join(hosted)
    give_answers(hosted, guest)
    assert len(ordered(first)) == 4
    second = own(hosted, "g1")
    first.exchange(Bye())
    hosted.step()
    assert len(ordered(second)) == 4
    hosted.clock.now += 7.0
    second.exchange(READY)
    hosted.clock.now += 7.0
    assert ordered(second) == []


@pytest.mark.parametrize(("logprob", "is_lie"), [(-20.0, True), (-3.0, False)])
def test_an_answer_that_repeats_an_improbable_one_is_a_lie(hosted: RouterScene, logprob: float, is_lie: bool):
    owned, guest = own(hosted), join(hosted)
    give_answers(hosted, guest)
    for name in ("0-0-0", "0-0-1", "1-0-0", "1-0-1"):
        owned.exchange(Audited(AnswerCheck(name, digest="a", logprob=logprob)))
    found = hosted.store.quarantined_guests()
    assert list(found) == ["mallory"] * is_lie
    assert all(reason.endswith("1-0-1 repeats 1-0-0, which is no coincidence") for reason in found.values())


def test_a_guest_whose_answers_wait_for_checks_gets_no_more_leases(tmp_path: Path):
    settings = SETTINGS | {"generators": {"group_size": 32}, "learner": {"prompts_per_step": 2}}
    hosted = RouterScene(tmp_path, settings=settings, staleness={"max_lag": 9})
    own(hosted)
    guest = join(hosted)
    prompts = guest.lease(max_trajectories=64).prompts
    for prompt in prompts:
        send_all(guest, *(answer(prompt, index, group_size=32) for index in prompt.lease.indices))
    guest.exchange(LeaseRequest(64))
    hosted.tick(1.0)
    assert guest.receive()[-1].reason == "guests: 64 of its answers wait for a check"


@cases(
    "fields",
    {"group_id": "5"},
    {"attempt": 1},
    {"generator_id": "g0"},
    {"prompt_uid": "test/9"},
    {"data_source": "other"},
    {"sampling": Sampling(0.5, 1.0, -1, 16, seed=0)},
    {"reward": Reward(total=1.0, turns=[0.5, 0.5])},
    {"context_starts": [8]},
)
def test_what_a_lease_does_not_ask_for_is_refused(hosted: RouterScene, fields: dict[str, Any]):
    own(hosted)
    guest = join(hosted)
    (prompt, *_) = guest.lease().prompts
    if "group_id" in fields:
        packed = make_packed(fields["group_id"], 0, generator_id="mallory")
    else:
        packed = answer(prompt, 0, **fields)
    (nack,) = send_all(guest, packed)
    assert isinstance(nack, Nack)
    assert nack.is_fatal
    assert hosted.store.counts().accepted == 0
    assert sum(hosted.store.counts().refused.values()) == 1


def test_a_guest_answers_its_own_leases_as_itself_until_any_broker_has_quarantined_it(hosted: RouterScene):
    owned, guest = own(hosted), join(hosted)
    (prompt, *_) = owned.lease().prompts
    (nack,) = send_all(guest, answer(prompt, 0))
    assert nack.reason.startswith("guest_lease: guest 'mallory' must answer its own leases")
    for peer in (GuestPeer(hosted, "learner", role="learner", key="alice"), GuestPeer(hosted, "g7", key="alice")):
        (refusal,) = peer.receive()
        assert isinstance(refusal, Refuse)
        assert refusal.reason.startswith("a guest must be a generator named 'alice', got")
    (prompt, *_) = guest.lease().prompts
    hosted.store.quarantine_guest("mallory", reason="lies")
    answers = send_all(guest, answer(prompt, 0, version_spans=[VersionSpan(6, 0)]))
    assert "guest_quarantined" in [each.reason for each in answers if isinstance(each, Nack)]
    assert any(isinstance(each, Drain) for each in answers)
    assert hosted.store.quarantined_guests() == {"mallory": "lies"}


def test_a_guest_fetches_deltas_and_its_word_of_lenders_counts_for_nothing(hosted: RouterScene):
    learner = FakePeer(hosted, "learner", "learner")
    own(hosted)
    guest = join(hosted)
    members = learner.receive()[-1]
    assert [each.transport for each in members.generators] == ["collective", "delta"]
    accused = [LenderError("tcp://10.0.0.1:1", "altered", is_altered=True)]
    guest.exchange(UpdateApplied(0, 1, Member("mallory", "1"), lender_errors=accused))
    (relayed,) = [message for message in learner.receive() if isinstance(message, UpdateApplied)]
    assert relayed.lender_errors == []


HONEST = AnswerCheck("0-0-0", num_tokens=100, logprob_diff=1.0, own_logprob_diff=0.01, surplus=2.0, variance=20.0)


changed = partial(structs.replace, HONEST)


LIE_ABOUT_A_REWARD = changed(lie="7-0-1 has a reward of 1, and 0 by one's own reward function")
FEW_TOKENS = changed(num_tokens=4, logprob_diff=0.0, surplus=-1.0, variance=1.0)


@cases(
    "checks, reason",
    ([], ""),
    ([HONEST] * 64, ""),
    # One lie may be a fault, and two convict.
    ([LIE_ABOUT_A_REWARD, *[HONEST] * 9], ""),
    (
        [LIE_ABOUT_A_REWARD, *[HONEST] * 9, LIE_ABOUT_A_REWARD],
        "2 of 11 checked answers are false, the last one: 7-0-1 has a reward of 1, and 0 by one's own reward",
    ),
    # Log probabilities beyond the bound convict once four answers were scored.
    ([changed(logprob_diff=30.0)] * 3 + [AnswerCheck("0-0-1")] * 9, ""),
    ([changed(logprob_diff=30.0)] * 4, "within 0.05 nats on average, got 0.3 over 400 tokens of 4 answers"),
    # The policy's change since is allowed for by its effect on trusted answers.
    ([changed(logprob_diff=10.0, own_logprob_diff=0.0)] * 4, "nats"),
    ([changed(logprob_diff=10.0, own_logprob_diff=0.04)] * 4, ""),
    # Answers that the policy would not sample.
    ([changed(surplus=30.0)] * 4, "the likeliest token 30% more often"),
    ([changed(surplus=-30.0)] * 4, "the likeliest token 30% less often"),
    # Chance is allowed for where few tokens were scored.
    ([FEW_TOKENS] * 4, ""),
    ([FEW_TOKENS] * 64, "the likeliest token"),
    ([changed(logprob_diff=float("nan"))] * 4, "nats"),
    ([changed(surplus=float("nan"))] * 4, "the likeliest token"),
)
def test_the_checks_convict_a_dishonest_guest_and_no_honest_one(checks: list[AnswerCheck], reason: str):
    found = convict(checks)
    assert bool(found) == bool(reason)
    assert reason in found
