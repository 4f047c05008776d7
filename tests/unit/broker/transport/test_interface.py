"""The address of a machine in the network of its cluster, and servers that listen there."""

import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from slipstream.broker.errors import ChannelClosedError
from slipstream.broker.transport import endpoints
from slipstream.broker.transport.endpoints import Interface, check_reach, collective_environment, find_interface
from slipstream.broker.transport.zmq_channels import ZmqClientChannel, ZmqServerChannel, is_refused, listen
from slipstream.configs.base import ConfigError
from slipstream.configs.cluster import LOCAL, ClusterConfig
from tests.cases import cases
from tests.fakes import KEYS

LOOPBACK = "127.0.0.0/8"
MACHINE = {"docker0": ["172.17.0.1"], "eth0": ["10.0.0.5"], "ib0": ["10.9.0.5", "10.9.0.6"], "lo": ["127.0.0.1"]}


@pytest.fixture
def ports() -> Iterator[str]:
    """Three ports in a row that are free."""
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
