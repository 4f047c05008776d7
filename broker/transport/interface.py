"""Interface: the address of this machine in the network of `cluster.interface`, and the ports that a role may take."""

import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ipaddress import IPv4Address
from typing import NamedTuple

import psutil

from slipstream.broker.credentials import Keys
from slipstream.broker.errors import ChannelClosedError
from slipstream.broker.transport.zmq_channels import BROKER_ADDRESS, ZmqServerChannel
from slipstream.configs.base import ConfigError
from slipstream.configs.cluster import ClusterConfig

Addresses = Mapping[str, Sequence[str]]
"""Name of an interface -> its IPv4 addresses."""


class Interface(NamedTuple):
    """One address of this machine. Example: Interface(name="eth0", address="10.0.0.5")."""

    name: str
    address: str


def own_addresses() -> dict[str, list[str]]:
    """Return the IPv4 addresses of this machine by interface."""
    found = psutil.net_if_addrs()
    return {name: [each.address for each in found[name] if each.family == socket.AF_INET] for name in sorted(found)}


def find_interface(cluster: ClusterConfig, *, addresses: Addresses | None = None) -> Interface:
    """Return the one address in `cluster.interface`, out of `addresses`, by default this machine's.

    Raises ConfigError, with the addresses that there are.
    """
    network = cluster.network
    assert network is not None, "cluster.interface is set"
    there = [Interface(name, each) for name, own in (addresses or own_addresses()).items() for each in own]
    inside = [each for each in there if IPv4Address(each.address) in network]
    # A wide network, such as 0.0.0.0/0, is not meant to hold this machine's loopback address.
    reachable = [each for each in inside if not IPv4Address(each.address).is_loopback]
    chosen = inside if network.is_loopback else reachable
    if len(chosen) == 1:
        return chosen[0]
    shown = ", ".join(f"{each.address} ({each.name})" for each in (chosen or there)) or "none"
    got = f"{len(chosen)} inside: {shown}" if chosen else f"none inside, of {shown}"
    raise ConfigError(
        f"cluster.interface ({cluster.interface}) must hold exactly one address of {socket.gethostname()}, got {got}: "
        "name the network of the interface that the machines share."
    )


def is_free(host: str, port: int) -> bool:
    """Return whether a role could listen at a port now."""
    with socket.socket() as tried, suppress(OSError):
        # As ZeroMQ does: a port whose last connections still fade out is free.
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tried.bind((host, port))
        return True
    return False


def find_last_port(cluster: ClusterConfig) -> tuple[str, int]:
    """Return this machine's address and the last free port of `cluster.ports`: roles that keep one take the first.

    For a program that can only be told a port, not given an open socket. Raises ConfigError.
    """
    host = find_interface(cluster).address
    for port in reversed(cluster.port_range):
        if is_free(host, port):
            return host, port
    raise ConfigError(f"cluster.ports must have a free port on {host}, got {cluster.ports}: name a wider range.")


def tcp_endpoints(cluster: ClusterConfig, *, before: str = "") -> list[str]:
    """Return the endpoints that a role may bind here, in order; `before` first, if it is one of them.

    Raises ConfigError.
    """
    host = find_interface(cluster).address
    endpoints = [f"tcp://{host}:{port}" for port in cluster.port_range]
    # Machines that know the address of before find a restarted role there.
    return [before, *endpoints] if before in endpoints else endpoints


def listen(
    address: str, *, keys: Keys, cluster: ClusterConfig, setting: str = BROKER_ADDRESS, before: str = ""
) -> ZmqServerChannel:
    """Open a server at the address, which `setting` names; beside an ipc one also at a port for other machines, if
    `cluster` has an interface: the first of `tcp_endpoints` that is free.

    Raises ConfigError, ChannelClosedError.
    """
    is_local = cluster.network is None or not address.startswith("ipc://")
    endpoints = [] if is_local else tcp_endpoints(cluster, before=before)
    channel = ZmqServerChannel(address, keys=keys, setting=setting, network=cluster.network)
    try:
        if endpoints and not any(map(channel.bind, endpoints)):
            raise ChannelClosedError(
                f"cluster.ports must have a free port, got {endpoints[0]} to {endpoints[-1]}, all of them in use: name "
                "a wider range."
            )
    except ChannelClosedError:
        channel.close()
        raise
    return channel


def collective_environment(cluster: ClusterConfig) -> dict[str, str]:
    """Return the variables that have Gloo and NCCL use this machine's interface; empty unless the network is trusted.

    Raises ConfigError.
    """
    if not cluster.trusted_network:
        return {}
    name = find_interface(cluster).name
    # With =, NCCL takes the interface of exactly this name, not the first that begins with it.
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
