import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slipstream.broker.errors import ChannelClosedError
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
from slipstream.broker.transport import endpoints
from slipstream.broker.transport.client import BrokerClient
from slipstream.broker.transport.endpoints import Interface, check_reach, collective_environment, find_interface
from slipstream.broker.transport.session import BrokerClients
from slipstream.broker.transport.zmq_channels import ZmqClientChannel, ZmqServerChannel, is_refused, listen
from slipstream.configs.base import ConfigError
from slipstream.configs.cluster import LOCAL, ClusterConfig
from tests.cases import cases
from tests.fakes import KEYS
from tests.threaded_broker import ThreadedBroker
from tests.unit.broker.transport.test_client import FakeBroker, make_welcome

BROKERS = {"broker": "ipc:///a", "broker-1": "ipc:///b"}
PORT = "tcp://10.0.0.1:20002"
G0, G1 = (MemberState(Member(name, "1"), "ready", 0) for name in ("g0", "g1"))
LOOPBACK = "127.0.0.0/8"
MACHINE = {"docker0": ["172.17.0.1"], "eth0": ["10.0.0.5"], "ib0": ["10.9.0.5", "10.9.0.6"], "lo": ["127.0.0.1"]}


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
        options = {"joins_all": True, "brokers": self.known, "is_reachable": self.reachable.__contains__}
        self.clients = BrokerClients(self._connect, on_message=self.received.append, **options)
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
    # Its port can still be reached, because another role took it.
    joined.reachable.add(PORT)
    joined.brokers["ipc:///a"].send(LivingBrokers("broker", BROKERS | {"broker-1": PORT}))
    joined.await_message(PORT, Hello)
    joined.await_message("ipc:///c", Bye)


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


@pytest.fixture
def ports() -> Iterator[str]:
    for first in range(20000, 30000, 3):
        with ExitStack() as stack:
            try:
                for port in range(first, first + 3):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
        yield f"{first}-{first + 2}"
        return


@pytest.fixture
def servers() -> Iterator[list[ZmqServerChannel]]:
    opened: list[ZmqServerChannel] = []
    yield opened
    for server in opened:
        server.close()


def port_of(server: ZmqServerChannel) -> int:
    return int(server.address.rpartition(":")[2])


@cases(
    "network, outcome",
    ("10.0.0.0/16", Interface("eth0", "10.0.0.5")),
    ("172.16.0.0/12", Interface("docker0", "172.17.0.1")),
    ("10.9.0.6/32", Interface("ib0", "10.9.0.6")),
    (LOOPBACK, Interface("lo", "127.0.0.1")),
    ("192.168.0.0/16", "none inside, of 172.17.0.1 (docker0), 10.0.0.5 (eth0), 10.9.0.5 (ib0), 10.9.0.6 (ib0), 12"),
    ("10.9.0.0/16", "2 inside: 10.9.0.5 (ib0), 10.9.0.6 (ib0):"),
    ("10.0.0.0/8", "3 inside: 10.0.0.5 (eth0), 10.9.0.5 (ib0), 10.9.0.6 (ib0):"),
    # The loopback address is not meant by a network of everything.
    ("0.0.0.0/0", "4 inside: 172.17.0.1 (docker0), 10.0.0.5 (eth0), 10.9.0.5 (ib0), 10.9.0.6 (ib0):"),
)
def test_the_one_address_inside_is_found_and_none_or_several_are_named(network, outcome, monkeypatch) -> None:
    monkeypatch.setattr(endpoints, "own_addresses", lambda: MACHINE)
    if isinstance(outcome, Interface):
        assert find_interface(ClusterConfig(interface=network)) == outcome
        return
    with pytest.raises(ConfigError, match=f"must hold exactly one address of .*, got {re.escape(outcome)}"):
        find_interface(ClusterConfig(interface=network))


def test_collectives_use_the_interface_of_a_trusted_network_alone() -> None:
    assert collective_environment(LOCAL) == collective_environment(ClusterConfig(interface=LOOPBACK)) == {}
    trusted = collective_environment(ClusterConfig(interface=LOOPBACK, trusted_network=True))
    assert trusted == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


def test_an_address_outside_the_network_is_refused() -> None:
    network = ClusterConfig(interface="10.0.0.0/8").network
    for inside in ("tcp://10.1.2.3:5757", "tcp://127.0.0.1:5757", "ipc:///tmp/broker.sock"):
        check_reach(inside, setting="broker.address", network=network)
    for outside in ("tcp://0.0.0.0:5757", "tcp://*:5757", "tcp://11.0.0.1:5757", "tcp://node-1:5757"):
        with pytest.raises(ChannelClosedError, match=r"must be .* cluster.interface \(10.0.0.0/8\), got tcp"):
            check_reach(outside, setting="broker.address", network=network)


def test_servers_take_the_ports_of_the_range_one_after_the_other_and_keep_them(tmp_path, ports, servers) -> None:
    cluster = ClusterConfig(interface=LOOPBACK, ports=ports)
    servers += [listen(f"ipc://{tmp_path}/{number}.sock", keys=KEYS, cluster=cluster) for number in range(3)]
    assert [port_of(server) for server in servers] == list(cluster.port_range)
    with pytest.raises(ChannelClosedError, match=f"must have a free port, got tcp://127.0.0.1:{ports[:5]}"):
        listen(f"ipc://{tmp_path}/last.sock", keys=KEYS, cluster=cluster)
    assert not (tmp_path / "last.sock").exists()


def test_a_server_that_is_started_again_takes_the_port_it_had(tmp_path, ports, servers) -> None:
    cluster = ClusterConfig(interface=LOOPBACK, ports=ports)
    previous = f"tcp://127.0.0.1:{cluster.port_range[-1]}"
    servers.append(listen(f"ipc://{tmp_path}/a.sock", keys=KEYS, cluster=cluster, previous=previous))
    assert servers[-1].address == previous
    # The previous port is in use, or belongs to another machine: take another one.
    servers.append(listen(f"ipc://{tmp_path}/b.sock", keys=KEYS, cluster=cluster, previous=previous))
    assert port_of(servers[-1]) == cluster.port_range[0]
    servers.append(listen(f"ipc://{tmp_path}/c.sock", keys=KEYS, cluster=cluster, previous="tcp://10.0.0.5:20000"))
    assert port_of(servers[-1]) == cluster.port_range[1]


def test_both_endpoints_hear_the_runs_own_and_the_port_refuses_strangers(tmp_path, ports, servers) -> None:
    socket_path = f"ipc://{tmp_path}/broker.sock"
    servers.append(listen(socket_path, keys=KEYS, cluster=ClusterConfig(interface=LOOPBACK, ports=ports)))
    for address in (socket_path, servers[0].address):
        client = ZmqClientChannel(address, keys=KEYS, max_message_bytes=2**20)
        try:
            client.send([address.encode()])
            assert client.receive(timeout_s=0.05) is None
            received = servers[0].receive(timeout_s=5)
            assert received is not None
            assert received[1] == [address.encode()]
        finally:
            client.close()
        strangers = KEYS.__class__(KEYS.server_public, KEYS.server_secret, KEYS.server_public, KEYS.server_secret)
        assert is_refused(address, strangers)
        assert not is_refused(address, KEYS)


def test_a_port_that_was_chosen_by_hand_stands_alone(tmp_path: Path, servers: list[ZmqServerChannel]) -> None:
    servers.append(listen("tcp://127.0.0.1:*", keys=KEYS, cluster=ClusterConfig(interface=LOOPBACK)))
    assert servers[0].address.startswith("tcp://127.0.0.1:")
    assert port_of(servers[0]) not in range(20000, 21000)
