from pathlib import Path
from typing import Any

import pytest

from slipstream.broker import ingest
from slipstream.broker.messages import (
    Ack,
    AnyMessage,
    Bye,
    Drain,
    EpochOpened,
    Hello,
    LeaseRequest,
    Member,
    Members,
    Nack,
    OpenEpoch,
    Ping,
    Pong,
    Prompts,
    Put,
    ReturnLeases,
    Welcome,
)
from slipstream.broker.peers import Peer
from slipstream.buffer.codec import decode, encode
from slipstream.buffer.errors import StoreCannotWriteError, StoreUnavailableError
from slipstream.buffer.store import StoreOutage
from slipstream.buffer.trajectory import TrajectoryHeader
from slipstream.runtime.model_files import ModelFingerprint
from tests.builders import make_packed
from tests.cases import cases
from tests.fakes import FakeClock, FakePeer, RouterScene
from tests.memory_store.store import MemoryStore

DRAIN_G0 = "drain/g0"
UNAVAILABLE = StoreUnavailableError("it does not answer")


def test_a_hello_gets_config_and_fingerprint_and_prompts_are_leased_up_to_the_pacing_limit(tmp_path: Path):
    scene = RouterScene(tmp_path, model=ModelFingerprint(vocab_size=41))
    peer = FakePeer(scene, "generator", "g0")
    (welcome,) = peer.receive()
    assert isinstance(welcome, Welcome)
    assert (welcome.config_json, welcome.model.vocab_size) == (scene.config_json, 41)
    assert (welcome.store_url, welcome.living) == ("", None)
    assert [p.lease.group_id for p in peer.lease().prompts] == ["0", "1"]
    assert peer.exchange(LeaseRequest(max_trajectories=4)) == []
    scene.tick(1.0)
    (answer,) = peer.receive()
    assert answer.prompts == []
    assert "pacing" in answer.reason


def test_a_peer_that_changes_its_name_on_one_connection_loses_its_leases(scene: RouterScene):
    peer = scene.join()
    peer.lease()
    peer.exchange(Hello("generator", "g1", "1", "here", 1))
    assert scene.store.counts().returned == 2


def test_a_generator_that_is_silent_for_longer_than_its_leases_keeps_them_until_it_counts_as_gone(tmp_path: Path):
    scene = RouterScene(tmp_path, settings={"broker": {"lease_s": 3.0}})
    peer = FakePeer(scene, "generator", "g0")
    peer.exchange(Pong(0.0, "ready", 0, lease_ids=[each.lease.id for each in peer.lease().prompts]))
    scene.wait(scene.run.broker.peer_timeout_s - 0.5)
    assert scene.store.counts().leased == 2
    scene.wait(2.0)
    assert scene.store.counts().returned == 2


def test_leases_of_a_silent_generator_go_to_another_but_not_after_a_pause_of_the_broker(scene: RouterScene):
    peer = scene.join()
    peer.lease()
    scene.tick(scene.run.broker.peer_timeout_s + 1)
    assert scene.store.counts().leased == 2
    scene.wait(scene.run.broker.peer_timeout_s + 1)
    assert scene.store.counts().returned == 2
    assert scene.events() == [("g0", "silent for 8 s; 2 leases returned")]
    gone = scene.store.roles()["g0"]
    assert (gone["state"], gone["host"], gone["pid"]) == ("gone", "here", 1)
    assert [p.lease.attempt for p in scene.join("g1").lease().prompts] == [1, 1]


def test_a_request_is_not_answered_on_a_connection_that_was_replaced(scene: RouterScene):
    other, peer = (FakePeer(scene, "generator", name) for name in ("g1", "g0"))
    other.lease()
    assert peer.exchange(LeaseRequest(max_trajectories=4))[1:] == []
    again = FakePeer(scene, "generator", "g0")
    other.exchange(Bye())
    scene.step()
    assert (scene.store.counts().leased, scene.store.counts().returned) == (0, 2)
    assert [prompt.lease.attempt for prompt in again.lease().prompts] == [1, 1]


def test_leases_listed_in_pongs_are_renewed_and_others_lapse(scene: RouterScene):
    peer = scene.join()
    held = peer.lease().prompts[0].lease.id
    for _ in range(int(scene.run.broker.lease_s) + 3):
        scene.clock.now += 1.0
        peer.exchange(Pong(0.0, "ready", 0, lease_ids=[held]))
    assert scene.store.counts().leased == 1
    assert scene.store.counts().returned == 1


def test_returned_leases_and_a_bye_make_the_prompts_available_again_without_an_event(scene: RouterScene):
    peer = scene.join()
    first, _ = (p.lease.id for p in peer.lease().prompts)
    peer.exchange(ReturnLeases([first], "test"))
    assert scene.store.counts().returned == 1
    peer.exchange(Bye())
    assert scene.store.counts().returned == 2
    assert scene.store.roles()["g0"]["state"] == "gone"
    assert scene.events() == []
    assert peer.exchange(LeaseRequest(max_trajectories=4)) == [Bye()], "it is unknown now"


def test_prompts_that_cannot_be_delivered_are_available_again(scene: RouterScene):
    peer = scene.join()
    peer.channel.send([encode(LeaseRequest(max_trajectories=4))])
    # It sends its request and disconnects before the answer.
    peer.channel.close()
    scene.step()
    assert (scene.store.counts().leased, scene.store.counts().returned) == (0, 2)


def test_the_learner_receives_the_members_and_its_orders_reach_those_it_names(scene: RouterScene):
    learner = scene.join("learner", role="learner")
    first, second = scene.join("g0"), scene.join("g1")
    first.exchange(Pong(0.0, "unsynced", -1))
    members = [m for m in learner.receive() if isinstance(m, Members)][-1]
    assert [(g.member.peer_id, g.state) for g in members.generators] == [("g0", "unsynced"), ("g1", "starting")]
    order = OpenEpoch(1, [members.generators[0].member], "127.0.0.1", 1, 1.0)
    learner.exchange(order)
    assert first.receive() == [order]
    assert second.receive() == []


def test_a_generator_that_misses_pings_is_reported_silent_until_it_answers(scene: RouterScene):
    learner, generator = FakePeer(scene, "learner", "learner"), FakePeer(scene, "generator", "g0")
    generator.exchange(Pong(0.0, "ready", 3))

    def reported() -> list[str]:
        members = [message for message in learner.receive() if isinstance(message, Members)]
        return [generator.state for message in members for generator in message.generators]

    assert reported()[-1:] == ["ready"]
    for _ in range(3):
        scene.tick(1.0)
    assert reported() == ["silent"], "reported once"
    generator.exchange(Pong(0.0, "ready", 3))
    assert reported() == ["ready"]


@cases("jump_s, effect", (36000.0, "keep the time they had left"), (-36000.0, "last at most their full time from now"))
def test_a_clock_of_the_store_that_is_set_costs_no_lease_and_is_an_event(scene, jump_s, effect):
    scene.step()
    assert scene.store.roles()["broker"].keys() >= {"host", "pid"}
    scene.store.lease(owner="nobody", group_size=2, max_groups=1, lease_s=30.0, admission_limit=9)
    scene.store_is_ahead_s = jump_s
    scene.tick(1)
    assert scene.events() == [("broker", f"the store's clock jumped by {jump_s:+.0f} s: leases and claims {effect}")]
    scene.tick(31)
    assert "lapsed" in scene.events()[-1][1]


def test_leases_that_lapse_together_make_one_event_even_if_the_clock_was_set_back_before_the_broker_started(scene):
    scene.store.lease(owner="nobody", group_size=2, max_groups=2, lease_s=30.0, admission_limit=9)
    scene.store_is_ahead_s = -36000.0
    scene.step()
    scene.tick(31)
    ((role, text),) = scene.events()
    assert (role, "lapsed" in text, text.count("; ")) == ("broker", True, 1)


def test_the_named_generator_is_ordered_to_drain_until_it_does_and_its_successor_is_not(scene: RouterScene):
    scene.store.request("broker", DRAIN_G0, str(scene.store.now() - 1))
    scene.tick()
    assert scene.store.take_requests("broker") == {}, "dropped past its deadline"
    scene.store.request("broker", DRAIN_G0, str(scene.store.now() + 60))
    # Like a restarted broker, which reads the request before any peer is back.
    scene.tick()
    peer, other = scene.join("g0"), scene.join("g1")
    for _ in range(2):
        scene.tick()
        assert (peer.receive(), other.receive()) == ([Drain("drain requested")], [])
    peer.exchange(Pong(sent_at=0.0, state="draining", version=0, reason="", gauges={}))
    scene.tick()
    assert peer.receive() == []
    assert scene.events() == [("g0", "ordered to drain, as requested")]
    peer.exchange(Bye())
    successor = scene.join(incarnation="2")
    scene.tick()
    assert successor.receive() == []


def test_gauges_cannot_replace_what_the_broker_knows_of_a_peer():
    gauges = {"role": "learner", "state": "gone", "version": "x", "pid": 1, "tokens": 5}
    status = Pong(-1.0, "ready", 3, gauges=gauges)
    peer = Peer(b"", Hello("generator", "g-0", "i", "node", 7), heard_at=0.0, status=status)
    known = {"role": "generator", "state": "ready", "version": 3, "reason": "", "host": "node", "pid": 7}
    assert peer.beat({}).gauges == known | {"tokens": 5}


def test_each_trajectory_of_one_put_is_checked_by_itself(scene: RouterScene):
    peer = scene.join()
    peer.lease()
    packed = [make_packed("0", 0), make_packed("0", 1), make_packed("77", 0), make_packed("1", 0)]
    payloads = [payload for _, payload in packed]
    payloads[1] = payloads[1][:-1]
    answers = peer.exchange(Put([header for header, _ in packed]), *payloads)
    expected = [("0-0-1", True, "0-0"), ("77-0-0", True, "77-0")]
    assert [(nack.id, nack.is_fatal, nack.lease_id) for nack in answers[:2]] == expected
    assert answers[2:] == [Ack(["0-0-0", "1-0-0"])]
    assert peer.exchange(Put([packed[0][0]]), packed[0][1]) == [Ack(["0-0-0"])], "a duplicate again"
    counts = scene.store.counts()
    assert (counts.accepted, counts.duplicates) == (2, 1)
    assert counts.refused == {"checksum": 1, "unknown_group": 1}


def test_invalid_frames_are_refused_with_their_reason_and_do_not_end_the_loop(scene: RouterScene):
    peer = scene.join()
    for frames in ([b""], [b"\xc1"], [b"\x80\x04\x95pickle"], [encode({"type": "Put"})]):
        peer.send(frames)
    assert peer.exchange(LeaseRequest(max_trajectories=4), b"surplus") == []
    assert scene.store.counts().leased == 0
    assert peer.lease().prompts
    # The size of a report is bounded.
    for message in (
        Pong(0.0, "ready", 0, gauges={"a": [1]}),
        Pong(0.0, "ready", 0, gauges={str(n): n for n in range(10_000)}),
        Pong(0.0, "ready", 0, lease_ids=["x" * 10_000]),
        ReturnLeases(["0-0"], "x" * 10_000),
    ):
        assert peer.exchange(message) == []
    # A Put with another number of payloads is refused as a whole.
    packed = [make_packed("0", 0), make_packed("0", 1)]
    for num_payloads in (0, 1, 3):
        answers = peer.exchange(Put([header for header, _ in packed]), *[packed[0][1]] * num_payloads)
        assert [(nack.id, nack.is_fatal) for nack in answers] == [("0-0-0", True), ("0-0-1", True)]
    too_large = b"x" * (scene.run.broker.max_message_bytes + 1)
    (nack,) = peer.exchange(Put([packed[0][0]]), too_large)
    assert nack.is_fatal
    peer.send([too_large])
    assert scene.store.counts().refused == {"malformed": 8, "frame_count": 4, "oversized": 2}


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


class FailingStore(MemoryStore):
    """A store whose every operation raises `error` while it is set."""

    error: StoreUnavailableError | None = None

    def __getattribute__(self, name: str) -> Any:
        error = object.__getattribute__(self, "error")
        if error and name != "error" and not name.startswith("_"):
            raise error
        return object.__getattribute__(self, name)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RouterScene:
    monkeypatch.setattr("tests.fakes.MemoryStore", FailingStore)
    return RouterScene(tmp_path)


def test_every_peer_is_pinged_during_an_outage(scene: RouterScene):
    peers = [scene.join(f"g{number}") for number in range(3)]
    for peer in peers:
        peer.exchange(Pong(0.0, "ready", 0, lease_ids=["0-0"]))
    scene.store.error = UNAVAILABLE
    for peer in peers:
        peer.receive()
    scene.tick()
    for peer in peers:
        frames = peer.channel.receive(timeout_s=0)
        assert isinstance(decode(frames[0], AnyMessage), Ping)


@cases(
    "error, reason",
    (UNAVAILABLE, "store_unavailable"),
    (StoreCannotWriteError("its disk is full"), "store_cannot_write"),
)
def test_trajectories_are_deferred_counted_and_stored_later_and_so_are_requests(scene: RouterScene, error, reason):
    peer = scene.join("g0")
    peer.lease(max_trajectories=2)
    header, payload = make_packed("0", 0)
    scene.store.error = error
    (nack,) = peer.exchange(Put([header]), payload)
    assert isinstance(nack, Nack)
    assert (nack.id, nack.reason, nack.is_fatal, nack.retry_after_s > 0) == (header.id, reason, False, True)
    assert peer.exchange(LeaseRequest(max_trajectories=4)) == []
    scene.tick(1.0)
    assert peer.receive() == [Prompts([], reason=reason)]
    scene.store.error = None
    scene.tick()
    gauges = scene.store.roles()["broker"]
    assert gauges[f"deferred_{reason}"] == 1
    assert gauges["reason"] == f"trajectories are deferred: {reason}"
    assert peer.exchange(Put([header]), payload) == [Ack([header.id])]
    assert peer.lease().prompts
    scene.tick()
    assert scene.store.roles()["broker"]["reason"] == ""


def test_departures_during_an_outage_are_recorded_afterwards_except_of_a_peer_that_came_back(scene: RouterScene):
    for name in ("g0", "g1"):
        scene.join(name).lease(max_trajectories=2)
    scene.join("g2")
    scene.store.error = UNAVAILABLE
    scene.wait(scene.run.broker.peer_timeout_s + 1)
    scene.join("g0")
    scene.store.error = None
    assert scene.store.counts().returned == 0
    scene.tick()
    assert (scene.store.counts().leased, scene.store.counts().returned) == (1, 1)
    assert [scene.store.roles()[name]["state"] for name in ("g1", "g2")] == ["gone", "gone"]


def test_of_a_store_that_hangs_one_answer_is_waited_for_however_many_peers_fall_silent(scene, monkeypatch):
    for number in range(3):
        scene.join(f"g{number}")
    asked, record = [], scene.router._departures.record
    monkeypatch.setattr(scene.router._departures, "record", lambda: asked.append(1) or record())
    scene.store.error = UNAVAILABLE
    while len(scene.router._peers):
        asked.clear()
        scene.tick()
    assert len(asked) == 1


def test_nothing_lapses_right_after_an_outage_so_that_its_holder_can_renew_it_first(scene: RouterScene):
    reaped_at: list[float] = []
    scene.store.reap = lambda **_: reaped_at.append(scene.clock.now) or []
    scene.tick()
    assert len(reaped_at) == 1
    scene.store.error = StoreCannotWriteError("its disk is full")
    scene.tick()
    scene.store.error = None
    scene.tick()
    assert len(reaped_at) == 1
    scene.tick(10)
    assert len(reaped_at) == 2


def test_a_thousand_failures_produce_few_lines_and_the_end_is_reported_once():
    clock, reported = FakeClock(100.0), list[str]()
    outage = StoreOutage(report=reported.append, clock=clock)
    outage.end()
    for number in range(1000):
        clock.now = 100 + number / 100
        outage.record(UNAVAILABLE)
    assert (outage.reason, round(outage.seconds)) == ("store_unavailable", 10)
    for _ in range(2):
        outage.end()
    outage.record(StoreCannotWriteError("its disk is full"))
    assert (outage.reason, outage.seconds) == ("store_cannot_write", 0)
    assert reported == [
        *(f"waiting for the store for {seconds} s: it does not answer" for seconds in (0, 5)),
        "the store works again after 10.0 s",
        "waiting for the store for 0 s: its disk is full",
    ]
