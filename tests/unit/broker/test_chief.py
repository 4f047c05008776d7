"""Several routers on one store: the shared work, and messages to peers about other brokers."""

from pathlib import Path

import pytest

from slipstream.broker.chief import LEASE_S
from slipstream.broker.messages import Bye, Drain, Hello, LivingBrokers, Pong, Welcome
from slipstream.broker.router import Router
from slipstream.broker.transport.channels import MemoryBroker
from slipstream.buffer.codec import encode
from slipstream.buffer.errors import StaleFenceError
from tests.fakes import FakePeer, RouterScene


class Beside(RouterScene):
    """Another router of the same run, on the same store and clock."""

    def __init__(self, scene: RouterScene, name: str) -> None:
        self.hub, self.clock, self.run, self.store = MemoryBroker(), scene.clock, scene.run, scene.store
        self.router = Router(
            self.hub.server(),
            scene.store,
            run=scene.run,
            train=scene.data,
            heldout={each.name: scene.data for each in scene.run.data.eval_sets},
            name=name,
            address="tcp://10.0.0.1:20001",
            clock=scene.clock,
        )


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
    before.exchange(Bye(is_moving=True))
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


def test_a_request_to_drain_reaches_the_generator_of_another_broker(first, second):
    peers = FakePeer(first, "generator", "g0"), FakePeer(second, "generator", "g1")
    first.store.request("broker", "drain/g1", str(first.store.now() + 60))
    tick(first, second)
    drained = [[each for each in peer.receive() if isinstance(each, Drain)] for peer in peers]
    assert drained == [[], [Drain("drain requested")]]


def test_a_request_to_drain_outlives_the_broker_that_has_sent_the_order(first, second):
    FakePeer(second, "generator", "g0")
    first.store.request("broker", "drain/g0", str(first.store.now() + 60))
    tick(second)
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
