"""The learner's clients: one for each broker, and one list of members."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from slipstream.broker.messages import (
    NO_EPOCH,
    Bye,
    Hello,
    LivingBrokers,
    Member,
    Members,
    MemberState,
    Pong,
    Profile,
    Update,
)
from slipstream.broker.transport.client import BrokerClient
from slipstream.broker.transport.session import BrokerClients
from tests.cases import cases
from tests.threaded_broker import ThreadedBroker
from tests.unit.broker.transport.test_client import FakeBroker, make_welcome

BROKERS = {"broker": "ipc:///a", "broker-1": "ipc:///b"}
PORT = "tcp://10.0.0.1:20002"
G0, G1 = (MemberState(Member(name, "1"), "ready", 0) for name in ("g0", "g1"))


def until(is_met: Callable[[], Any]) -> Any:
    ends_at = time.monotonic() + 30
    while not (met := is_met()):
        assert time.monotonic() < ends_at
        time.sleep(0.001)
    return met


class Scene:
    """Two brokers that the test drives, and a learner that knows the address of the first."""

    def __init__(self) -> None:
        self.hubs = {address: ThreadedBroker() for address in (*BROKERS.values(), "ipc:///c", PORT)}
        self.brokers = {address: FakeBroker(hub.server()) for address, hub in self.hubs.items()}
        self.received: list = []
        self.reachable = set(BROKERS.values())
        self.known: dict[str, str] = {}
        self.clients = BrokerClients(
            self._connect,
            on_message=self.received.append,
            joins_all=True,
            brokers=self.known,
            is_reachable=self.reachable.__contains__,
        )
        self.clients.open("ipc:///a")

    def _connect(self, address: str, on_message: Callable) -> BrokerClient:
        hello = Hello("learner", "learner", "1", "here", 1)
        status = lambda: Pong(-1.0, "ready", -1)  # noqa: E731
        return BrokerClient(self.hubs[address].client(), hello=hello, status=status, on_message=on_message)

    def welcome(self, broker: str, brokers: dict[str, str], *, address: str = "") -> None:
        at = address or BROKERS[broker]
        self.await_message(at, Hello)
        living = LivingBrokers(broker, brokers) if brokers else None
        welcome = msgspec.structs.replace(make_welcome(f"of {broker}"), living=living)
        self.brokers[at].send(welcome)
        until(lambda: welcome in self.received)

    def await_message(self, address: str, kind: type) -> Any:
        return until(lambda: [each for each in self.brokers[address].receive() if isinstance(each, kind)])

    def report(self, address: str, *states: MemberState) -> list[MemberState]:
        """Let a broker report its members; returns the list that the learner receives."""
        del self.received[:]
        self.brokers[address].send(Members(list(states)))
        return until(lambda: [each for each in self.received if isinstance(each, Members)])[-1].generators


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.clients.stop()


@pytest.fixture
def joined(scene: Scene) -> Scene:
    """The learner has joined both brokers."""
    for broker in BROKERS:
        scene.welcome(broker, BROKERS)
    return scene


def test_the_only_broker_is_joined_alone(scene: Scene):
    scene.welcome("broker", {})
    assert scene.report("ipc:///a", G0) == [G0]
    assert scene.brokers["ipc:///b"].receive() == []


def test_every_living_broker_is_joined_and_left_and_their_members_are_one_list(joined: Scene):
    assert joined.report("ipc:///a", G1) == [G1]
    assert joined.report("ipc:///b", G0) == [G0, G1]
    assert joined.report("ipc:///b") == [G1]
    joined.clients.send(Profile("events"))
    for address in BROKERS.values():
        joined.await_message(address, Profile)
    joined.clients.stop(reason="out of memory")
    for address in BROKERS.values():
        assert joined.await_message(address, Bye) == [Bye("out of memory")]


def test_a_broker_that_is_back_at_another_address_is_joined_there(joined: Scene):
    moved = BROKERS | {"broker-1": "ipc:///c"}
    joined.reachable ^= {"ipc:///b", "ipc:///c"}
    joined.brokers["ipc:///a"].send(LivingBrokers("broker", moved))
    joined.welcome("broker-1", moved, address="ipc:///c")
    joined.await_message("ipc:///b", Bye)


def test_a_broker_that_is_back_at_another_port_is_joined_there_though_another_role_took_its_own(joined: Scene):
    joined.reachable.add(PORT)
    joined.brokers["ipc:///a"].send(LivingBrokers("broker", BROKERS | {"broker-1": PORT}))
    joined.await_message(PORT, Hello)
    joined.await_message("ipc:///b", Bye)


@cases("announced, is_reachable", ("tcp://10.0.0.1:20000", False), ("tcp://127.0.0.1:5757", True))
def test_a_tunnel_is_not_left_for_an_unreachable_address_or_anothers_loopback(scene, announced, is_reachable):
    scene.reachable |= {announced} if is_reachable else set()
    there = {"broker": announced, "broker-1": "ipc:///b"}
    scene.welcome("broker", there)
    scene.welcome("broker-1", there)
    scene.brokers["ipc:///b"].send(LivingBrokers("broker-1", there))
    assert scene.report("ipc:///b", G0) == [G0]
    assert scene.report("ipc:///a", G1) == [G0, G1]
    assert [link.address for link in scene.clients._links] == ["ipc:///a", "ipc:///b"]


def test_a_broker_that_cannot_be_reached_where_it_says_is_joined_where_it_is_known_to_be(scene: Scene):
    scene.known["broker-1"] = "ipc:///b"
    scene.welcome("broker", {"broker": "ipc:///a", "broker-1": "tcp://10.0.0.1:20001"})
    scene.await_message("ipc:///b", Hello)


def test_of_two_links_to_one_broker_the_newer_stays(scene: Scene):
    (left,) = scene.clients._links
    scene.welcome("broker", BROKERS)
    # The address assumed for the second broker leads to the first.
    scene.welcome("broker", BROKERS, address="ipc:///b")
    scene.await_message("ipc:///a", Bye)
    until(lambda: left not in scene.clients._links)
    # Both were welcomed concurrently: the welcome of the link that was left is handled last.
    scene.clients._receive(left, msgspec.structs.replace(make_welcome(), living=LivingBrokers("broker", BROKERS)))
    assert [link.address for link in scene.clients._links if link.broker == "broker"] == ["ipc:///b"]


def test_members_of_a_broker_that_is_back_count_again_though_it_has_nothing_new_to_report(joined: Scene):
    joined.report("ipc:///a", G0)
    joined.report("ipc:///b", G1)
    for living, members in (({"broker": "ipc:///a"}, [G0]), (BROKERS, [G0, G1])):
        del joined.received[:]
        joined.brokers["ipc:///a"].send(LivingBrokers("broker", living))
        assert until(lambda: joined.received) == [Members(members)]


def test_an_order_reaches_the_members_of_a_broker_that_is_found_after_it(scene: Scene):
    scene.welcome("broker", {"broker": "ipc:///a"})
    order = Update(NO_EPOCH, [G0.member, G1.member], 1, [], [], [], [], [], 1.0, 1.0)
    scene.clients.send(order)
    scene.await_message("ipc:///a", Update)
    scene.brokers["ipc:///a"].send(LivingBrokers("broker", BROKERS))
    scene.welcome("broker-1", BROKERS)
    scene.report("ipc:///b", G1)
    assert scene.await_message("ipc:///b", Update) == [order]


def test_no_broker_is_joined_once_the_learner_leaves(scene: Scene):
    scene.welcome("broker", {"broker": "ipc:///a"})
    scene.clients.stop()
    (link,) = scene.clients._links
    scene.clients._receive(link, LivingBrokers("broker", BROKERS))
    assert scene.clients._links == [link]
