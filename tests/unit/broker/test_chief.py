from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from slipstream.broker import messages
from slipstream.broker.chief import LEASE_S
from slipstream.broker.messages import Drain, Hello, LeaseRequest, LivingBrokers, Pong, Prompts, Update, Welcome
from slipstream.broker.router import Router
from slipstream.broker.transport.channels import MemoryBroker
from slipstream.buffer.codec import decode, encode
from slipstream.buffer.errors import StaleFenceError
from tests.fakes import FakePeer, RouterScene

NUM_PEERS = 200


class Beside(RouterScene):
    """Another router of the same run, on the same store and clock."""

    def __init__(self, scene: RouterScene, name: str) -> None:
        self.hub, self.clock, self.run, self.store = MemoryBroker(), scene.clock, scene.run, scene.store
        sets = {"train": scene.data, "heldout": {each.name: scene.data for each in scene.run.data.eval_sets}}
        at = {"name": name, "address": "tcp://10.0.0.1:20001"}
        self.router = Router(self.hub.server(), scene.store, run=scene.run, clock=scene.clock, **sets, **at)


@pytest.fixture
def first(tmp_path: Path) -> RouterScene:
    scene = RouterScene(tmp_path, settings={"broker": {"shards": 2}})
    scene.step()
    return scene


@pytest.fixture
def second(first: RouterScene) -> Beside:
    beside = Beside(first, "broker-1")
    for _ in range(2):
        tick(first, beside)
    return beside


def tick(*scenes: RouterScene, seconds: float = 1.0) -> None:
    scenes[0].clock.now += seconds
    for scene in scenes:
        scene.step()


def silence(*alive: RouterScene, seconds: float) -> None:
    """Let the other routers hang."""
    for _ in range(int(seconds)):
        tick(*alive)


def test_a_dead_chiefs_work_is_done_by_another_within_6_s(first, second):
    assert (bool(first.router.chief.fence), bool(second.router.chief.fence)) == (True, False)
    peer = second.join("g1", is_ready=True)
    peer.lease(max_trajectories=4)
    for _ in range(int(first.run.broker.lease_s) - 1):
        # It holds no lease: the answer was lost in transit.
        peer.exchange(Pong(-1.0, "ready", 0))
        tick(first, second)
    assert first.store.counts().leased == 2
    for _ in range(6):
        peer.exchange(Pong(-1.0, "ready", 0))
        tick(second)
    assert second.router.chief.fence == 2
    assert (first.store.counts().leased, first.store.counts().returned) == (0, 2)
    assert ("broker-1", "became the chief of all brokers") in first.events()


def test_a_chief_that_hung_does_nothing_for_all_any_more(first, second):
    fence = first.router.chief.fence
    silence(second, seconds=LEASE_S + 1)
    with pytest.raises(StaleFenceError):
        first.store.reap(fence=fence)
    assert first.router.chief.fence == fence, "it does not know yet"
    first.router.chief.work()
    tick(first, second)
    assert (first.router.chief.fence, second.router.chief.fence) == (0, 2)
    assert all("clock" not in text for _, text in first.events())


def test_the_clock_of_the_store_is_followed_by_whoever_is_the_chief_after_it(first, second):
    peer = second.join("g1", is_ready=True)
    (prompt,) = peer.lease(max_trajectories=2).prompts
    peer.exchange(Pong(-1.0, "ready", 0, lease_ids=[prompt.lease.id]))
    first.store_is_ahead_s += 3600
    silence(second, first, seconds=3)
    assert first.store.counts().leased == 1
    assert [text[:35] for _, text in first.events()].count("the store's clock jumped by +3600 s") == 1


def test_a_jump_of_the_clock_that_a_broker_saw_before_it_became_the_chief_takes_no_lease(first, second):
    peer = first.join("g1", is_ready=True)
    (prompt,) = peer.lease(max_trajectories=2).prompts
    peer.exchange(Pong(-1.0, "ready", 0, lease_ids=[prompt.lease.id]))
    first.store_is_ahead_s += 3600
    second.router.chief.work()
    second.router.chief.report(num_generators=0)
    second.router.chief.work()
    assert second.router.chief.fence == 2
    assert (first.store.counts().leased, first.store.counts().returned) == (1, 0)


def test_peers_are_told_who_is_alive_when_they_join_and_when_that_changes(first, second):
    here = first.router.chief.living_for("").brokers
    assert list(here) == ["broker", "broker-1"]
    assert all(address.startswith("ipc://") for address in here.values())
    peer = FakePeer(second, "generator", "g0")
    (welcome,) = (message for message in peer.receive() if isinstance(message, Welcome))
    assert welcome.living == LivingBrokers("broker-1", here)
    elsewhere = FakePeer(second, "generator", "g1")
    elsewhere.send([encode(Hello("generator", "g1", "1", "there", 1, machine="node7"))])
    welcomes = [message for message in elsewhere.receive() if isinstance(message, Welcome)]
    assert welcomes[-1].living.brokers == {"broker": "", "broker-1": "tcp://10.0.0.1:20001"}
    silence(second, seconds=LEASE_S + 1)
    assert LivingBrokers("broker-1", {"broker-1": here["broker-1"]}) in peer.receive()
    tick(first, second)
    assert LivingBrokers("broker-1", here) in peer.receive()


def test_a_broker_that_has_just_started_or_hung_first_asks_who_is_alive(first, second):
    # Its Hello waits in the queue when the broker begins to read.
    for broker, living in ((Beside(first, "broker-1"), ["broker", "broker-1"]), (second, ["broker-1"])):
        peer = FakePeer(broker, "learner", "learner")
        (welcome,) = (each for each in peer.receive() if isinstance(each, Welcome))
        assert list(welcome.living.brokers) == living
        first.clock.now += LEASE_S + 1


def test_a_generator_that_goes_to_another_broker_keeps_its_leases(first, second):
    before = first.join("g0", is_ready=True)
    (prompt,) = before.lease(max_trajectories=2).prompts
    before.exchange(messages.Bye(is_moving=True))
    after = FakePeer(second, "generator", "g0")
    for _ in range(int(2 * first.run.broker.lease_s)):
        after.exchange(Pong(-1.0, "ready", 0, lease_ids=[prompt.lease.id]))
        tick(first, second)
    assert (first.store.counts().leased, first.store.counts().returned) == (1, 0)
    assert first.store.roles()["g0"]["broker"] == "broker-1"


def test_a_broker_that_hung_returns_no_lease_of_a_generator_that_went_on_to_another(first, second):
    before = first.join("g0", is_ready=True)
    (prompt,) = before.lease(max_trajectories=2).prompts
    after = FakePeer(second, "generator", "g0")
    for _ in range(int(first.run.broker.peer_timeout_s) + 2):
        after.exchange(Pong(-1.0, "ready", 0, lease_ids=[prompt.lease.id]))
        tick(second)
    for seconds in range(int(first.run.broker.peer_timeout_s) + 2):
        after.exchange(Pong(-1.0, "ready", 0, lease_ids=[prompt.lease.id]))
        tick(second, first)
        # Once the peer is silent here, this broker no longer reports it.
        assert seconds < 3 or first.store.roles()["g0"]["broker"] == "broker-1"
    assert first.router._peers.generators() == []
    assert (first.store.counts().leased, first.store.counts().returned) == (1, 0)
    assert first.store.roles()["g0"]["state"] == "ready"


def test_a_request_to_drain_reaches_the_generator_of_another_broker_and_outlives_that_broker(first, second):
    other, before = FakePeer(first, "generator", "g1"), FakePeer(second, "generator", "g0")
    first.store.request("broker", "drain/g0", str(first.store.now() + 60))
    tick(first, second)
    drained = [[each for each in peer.receive() if isinstance(each, Drain)] for peer in (other, before)]
    assert drained == [[], [Drain("drain requested")]]
    # That broker and its order are lost; the generator moves here.
    peer = FakePeer(first, "generator", "g0")
    tick(first)
    assert Drain("drain requested") in peer.receive()
    peer.exchange(Pong(-1.0, "draining", 0))
    tick(first)
    assert first.store.requests("broker") == {}
    assert [text for name, text in first.events() if name == "g0"] == ["ordered to drain, as requested"]


def test_each_broker_offers_what_may_be_leased_to_its_share_of_the_generators(first, second):
    for name in ("g0", "g1", "g2"):
        FakePeer(first, "generator", name)
    FakePeer(second, "generator", "g3")
    for _ in range(2):
        tick(first, second)
    assert (first.router.chief.share, second.router.chief.share) == (0.75, 0.25)


class CountedStore:
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
                pings[number] += isinstance(decode(frames[0], messages.Ping), messages.Ping)
            peer.channel.send([encode(Pong(0.0, "ready", 0))])
            peer.read()
    assert set(pings.values()) <= {4, 5}
    assert len(pings) == NUM_PEERS
    assert counted.since()["heartbeat"] <= 4 * 4 + 4, "four slices of 64"
    assert len(scene.store.roles()) == NUM_PEERS + 1


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
    peers[0].exchange(messages.ReturnLeases([first.prompts[0].lease.id], "test"))
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
    settings = {"learner": {"prompts_per_step": 2, "max_steps": 1000}}
    scene = RouterScene(tmp_path, settings=settings, staleness={"max_lag": 100})
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
    members = [messages.Member(f"generator-{number:03}", "1") for number in range(NUM_PEERS - 1)]
    sent, send = [], scene.router._channel.send
    scene.router._channel.send = lambda identity, frames: sent.append(frames[0]) or send(identity, frames)
    learner.exchange(Update(messages.NO_EPOCH, members, 1, [], [], [], [], [], 1e-3, 60.0))
    updates = [frame for frame in sent if b"Update" in frame]
    assert len(updates) == NUM_PEERS - 1
    assert len({id(frame) for frame in updates}) == 1
    assert len(updates[0]) < 200
    received = [[each for each in peer.receive() if isinstance(each, Update)] for peer in peers]
    assert received == [[Update(messages.NO_EPOCH, [], 1, [], [], [], [], [], 1e-3, 60.0)]] * (NUM_PEERS - 1) + [[]]


def test_changes_of_many_members_share_a_message_and_none_is_forgotten(crowd):
    scene, _, peers = crowd
    learner = FakePeer(scene, "learner", "learner")
    scene.tick(0.1)
    learner.receive()
    for peer in peers:
        peer.send([encode(Pong(0.0, "updating", 0))])
    told = [each for each in learner.receive() if isinstance(each, messages.Members)]
    assert len(told) <= 1
    scene.tick(0.1)
    newest = learner.receive()[-1]
    assert {each.state for each in newest.generators} == {"updating"}
    scene.step()
    assert learner.receive() == [], "nothing has changed"
