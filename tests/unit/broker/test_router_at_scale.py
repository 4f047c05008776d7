"""Store calls and bytes of a router with hundreds of generators grow with events, not with N²."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from slipstream.broker.messages import (
    NO_EPOCH,
    LeaseRequest,
    Member,
    Members,
    Ping,
    Pong,
    Prompts,
    ReturnLeases,
    Update,
)
from slipstream.broker.peers import Peer, PingRound
from slipstream.buffer.codec import decode, encode
from tests.fakes import FakePeer, RouterScene

NUM_PEERS = 200


class CountedStore:
    """Counts the calls of a store, by name."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._store, name)

    def since(self) -> Counter[str]:
        calls, self.calls = self.calls, Counter()
        return calls


@pytest.fixture
def crowd(tmp_path: Path) -> tuple[RouterScene, CountedStore, list[FakePeer]]:
    """A router, its store, and ready generators."""
    scene = RouterScene(tmp_path)
    counted = CountedStore(scene.store)
    for part in (scene.router, scene.router._leases):
        part._store = counted
    peers = [FakePeer(scene, "generator", f"generator-{number:03}") for number in range(NUM_PEERS)]
    for peer in peers:
        peer.channel.send([encode(Pong(0.0, "ready", 0))])
        peer.read()
    scene.step()
    return scene, counted, peers


def test_a_heartbeat_takes_one_call_for_many_peers_and_reaches_each_once_an_interval(crowd):
    scene, counted, peers = crowd
    scene.clock.now += 2.0
    counted.since()
    began_at, pings = scene.clock.now, Counter()
    while scene.clock.now < began_at + 4 * scene.run.broker.heartbeat_s:
        scene.step()
        scene.clock.now += scene.run.broker.heartbeat_s / 16
        for number, peer in enumerate(peers):
            while (frames := peer.channel.receive(timeout_s=0)) is not None:
                pings[number] += isinstance(decode(frames[0], Ping), Ping)
            peer.channel.send([encode(Pong(0.0, "ready", 0))])
            peer.read()
    assert set(pings.values()) <= {4, 5}
    assert len(pings) == NUM_PEERS
    assert counted.since()["heartbeat"] <= 4 * 4 + 4, "four slices of 64"
    assert len(scene.store.roles()) == NUM_PEERS + 1


def test_a_round_of_pings_is_spread_and_has_everyone_once():
    peers: list[Any] = list(range(150))
    pings, taken = PingRound(peers), []
    while not pings.is_over:
        taken.append(pings.take())
    assert [len(each) for each in taken] == [64, 64, 22]
    assert [each for part in taken for each in part] == peers
    assert (pings.share, PingRound(peers[:64]).share, PingRound([]).share) == (1 / 3, 1.0, 1.0)


def test_generators_that_wait_cost_a_few_calls_a_round_and_not_some_each(crowd):
    scene, counted, peers = crowd
    first = peers[0].lease(max_trajectories=4)
    assert len(first.prompts) == 2, "all there is"
    for peer in peers[1:]:
        peer.channel.send([encode(LeaseRequest(4))])
        peer.read()
    scene.tick(0.1)
    counted.since()
    scene.tick(0.1)
    calls = counted.since()
    assert calls["lease"] == 1
    assert sum(calls.values()) < 12, calls
    # A returned prompt goes to one of them at once.
    peers[0].exchange(ReturnLeases([first.prompts[0].lease.id], "test"))
    scene.tick(0.1)
    answers = [answer for peer in peers[1:] for answer in peer.receive() if isinstance(answer, Prompts)]
    assert [len(answer.prompts) for answer in answers if answer.prompts] == [1]
    # After a second all others learn the reason for waiting, some dozens per step.
    scene.clock.now += 1.0
    for _ in range(4):
        scene.step()
    answers = [answer for peer in peers[1:] for answer in peer.receive() if isinstance(answer, Prompts)]
    assert len(answers) == NUM_PEERS - 2
    assert {answer.reason.partition(":")[0] for answer in answers} == {"pacing"}
    assert sum(counted.since().values()) < 60


def test_requests_that_can_be_answered_are_some_dozens_a_step_without_a_pause(tmp_path: Path):
    scene = RouterScene(
        tmp_path, settings={"learner": {"prompts_per_step": 2, "max_steps": 1000}}, staleness={"max_lag": 100}
    )
    lease = scene.store.lease

    def slow_lease(**asked: Any) -> Any:
        # A busy machine: slow answers must not cause a pause.
        scene.clock.now += 0.005
        return lease(**asked)

    scene.store.lease = slow_lease
    peers = [FakePeer(scene, "generator", f"generator-{number:03}") for number in range(NUM_PEERS // 2)]
    for peer in peers:
        peer.channel.send([encode(LeaseRequest(2))])
        peer.read()
    answered = []
    for _ in range(3):
        scene.step()
        received = [answer for peer in peers for answer in peer.receive() if isinstance(answer, Prompts)]
        answered.append(sum(bool(answer.prompts) for answer in received))
    assert answered == [64, NUM_PEERS // 2 - 64, 0]


def test_an_update_is_encoded_once_and_leaves_out_whom_else_it_goes_to(crowd):
    scene, _, peers = crowd
    learner = FakePeer(scene, "learner", "learner")
    members = [Member(f"generator-{number:03}", "1") for number in range(NUM_PEERS - 1)]
    sent, send = [], scene.router._channel.send
    scene.router._channel.send = lambda identity, frames: sent.append(frames[0]) or send(identity, frames)
    learner.exchange(Update(NO_EPOCH, members, 1, [], [], [], [], [], 1e-3, 60.0))
    updates = [frame for frame in sent if b"Update" in frame]
    assert len(updates) == NUM_PEERS - 1
    assert len({id(frame) for frame in updates}) == 1
    assert len(updates[0]) < 200
    received = [[each for each in peer.receive() if isinstance(each, Update)] for peer in peers]
    assert received == [[Update(NO_EPOCH, [], 1, [], [], [], [], [], 1e-3, 60.0)]] * (NUM_PEERS - 1) + [[]]


def test_changes_of_many_members_share_a_message_and_none_is_forgotten(crowd):
    scene, _, peers = crowd
    learner = FakePeer(scene, "learner", "learner")
    scene.tick(0.1)
    learner.receive()
    for peer in peers:
        peer.send([encode(Pong(0.0, "updating", 0))])
    told = [each for each in learner.receive() if isinstance(each, Members)]
    assert len(told) <= 1
    scene.tick(0.1)
    newest = learner.receive()[-1]
    assert {each.state for each in newest.generators} == {"updating"}
    scene.step()
    assert learner.receive() == [], "nothing has changed"


def test_peers_are_found_by_name_and_leave_nothing_behind(crowd):
    scene, _, _ = crowd
    peers = scene.router._peers
    known = list(peers)
    assert all(isinstance(peer, Peer) and peer in peers for peer in known)
    for peer in known:
        peers.remove(peer.identity)
    assert (len(peers), peers._by_name, peers.learner()) == (0, {}, None)
