"""Endpoints: validation and choice of addresses, and probes with plain sockets."""

import ipaddress
import re
import socket
from contextlib import suppress
from functools import cache
from ipaddress import IPv4Address
from pathlib import Path
from typing import NamedTuple

import psutil

from slipstream.broker.errors import ChannelClosedError
from slipstream.configs.base import ConfigError
from slipstream.configs.cluster import ClusterConfig
from slipstream.runtime.credentials import is_loopback

PROBE_TIMEOUT_S = 1.0
_MAX_PATH_BYTES = 107
"""The kernel's limit for a unix socket's path."""


def check_reach(address: str, *, setting: str, network: ipaddress.IPv4Network | None = None) -> None:
    """Raise ChannelClosedError unless `address`, the value of `setting`, is ipc, on loopback, or in `network`."""
    transport, _, endpoint = address.partition("://")
    if transport == "ipc" and len(endpoint.encode()) > _MAX_PATH_BYTES:
        raise ChannelClosedError(
            f"{setting} must be a path of at most {_MAX_PATH_BYTES} bytes, got {len(endpoint.encode())}: {address}; "
            "choose a shorter one, or leave it out for the run's default socket."
        )
    host = endpoint.rpartition(":")[0]
    if transport == "ipc" or (transport == "tcp" and (is_loopback(host) or is_inside(host, network))):
        return
    raise ChannelClosedError(
        f"{setting} must be a loopback or ipc endpoint (like tcp://127.0.0.1:5757 or ipc:///tmp/broker.sock), or an "
        f"address of this machine in cluster.interface ({network or 'not set'}), got {address}: for other machines, "
        "name their network with cluster.interface (docs/cluster.md), or use a tunnel (docs/scaling.md)"
    )


@cache
def machine_id() -> str:
    """Id shared by all processes with the same loopback interface; host names may repeat.

    Example: `node7-1f0c33a9-4026531840`.
    """
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
        return f"{host}-{boot}-{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return host


def is_here(machine: str) -> bool:
    """Whether a `machine_id` is this machine's; True for an empty one."""
    return machine in ("", machine_id())


def is_own_machine(address: str) -> bool:
    """Whether an endpoint can be reached only from its machine."""
    transport, _, endpoint = address.partition("://")
    return transport != "tcp" or is_loopback(endpoint.rpartition(":")[0])


def check_unused(address: str, *, setting: str) -> None:
    """Raise ChannelClosedError if a process listens at an ipc path: unlike a port, binding would take it silently."""
    transport, _, path = address.partition("://")
    if transport == "ipc" and path != "*" and is_listening(address):
        raise bind_error(address, "another process listens there", setting=setting)


def remove_path(address: str) -> None:
    """Delete an ipc endpoint's path, which libzmq leaves behind. Idempotent."""
    transport, _, path = address.partition("://")
    if transport == "ipc":
        Path(path).unlink(missing_ok=True)


def is_listening(address: str) -> bool:
    """Whether a process listens at a tcp or ipc endpoint; blocks at most one second."""
    transport, _, endpoint = address.partition("://")
    try:
        with _connected(transport, endpoint):
            return True
    except (OSError, ValueError):
        return False


def _connected(transport: str, endpoint: str) -> socket.socket:
    if transport == "tcp":
        host, _, port = endpoint.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=PROBE_TIMEOUT_S)
    probe = socket.socket(socket.AF_UNIX)
    try:
        probe.settimeout(PROBE_TIMEOUT_S)
        # Names in the abstract namespace start with @ for ZeroMQ, with a zero byte for the kernel.
        probe.connect(endpoint.replace("@", "\0", 1) if endpoint.startswith("@") else endpoint)
    except OSError:
        probe.close()
        raise
    return probe


CURVE_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""ZMTP 3.1 greeting: signature, version, security mechanism, role and filler."""


def speaks_curve(address: str) -> bool:
    """Whether a CURVE server listens at an endpoint; takes up to two seconds."""
    transport, _, endpoint = address.partition("://")
    try:
        with _connected(transport, endpoint) as probe:
            probe.settimeout(PROBE_TIMEOUT_S)
            probe.sendall(CURVE_GREETING)
            greeting = b""
            while len(greeting) < len(CURVE_GREETING) and (received := probe.recv(len(CURVE_GREETING) - len(greeting))):
                greeting += received
    except (OSError, ValueError):
        return False
    return greeting[12:32] == CURVE_GREETING[12:32]


def bind_error(address: str, reason: object, *, setting: str) -> ChannelClosedError:
    """Build the error for an address that cannot be bound."""
    role = setting.partition(".")[0].replace("weights", "learner")
    remedy = f"stop the {role} that runs there, or choose another with {setting}=..."
    return ChannelClosedError(f"{setting} must be free to bind, got {address}: {reason}; {remedy}")


def is_inside(host: str, network: ipaddress.IPv4Network | None) -> bool:
    """Whether a host is an address in the network."""
    try:
        return network is not None and ipaddress.IPv4Address(host) in network
    except ValueError:
        return False


class Interface(NamedTuple):
    """One address of this machine. Example: Interface(name="eth0", address="10.0.0.5")."""

    name: str
    address: str


def own_addresses() -> dict[str, list[str]]:
    """This machine's IPv4 addresses by interface."""
    found = psutil.net_if_addrs()
    return {name: [each.address for each in found[name] if each.family == socket.AF_INET] for name in sorted(found)}


def find_interface(cluster: ClusterConfig) -> Interface:
    """The one address of this machine in `cluster.interface`. Raises ConfigError listing the available ones."""
    network = cluster.network
    assert network is not None, "cluster.interface is set"
    candidates = [Interface(name, each) for name, found in own_addresses().items() for each in found]
    inside = [each for each in candidates if IPv4Address(each.address) in network]
    # Exclude loopback from a wide network such as 0.0.0.0/0.
    chosen = [each for each in inside if network.is_loopback or not IPv4Address(each.address).is_loopback]
    if len(chosen) == 1:
        return chosen[0]
    shown = ", ".join(f"{each.address} ({each.name})" for each in (chosen or candidates)) or "none"
    got = f"{len(chosen)} inside: {shown}" if chosen else f"none inside, of {shown}"
    raise ConfigError(
        f"cluster.interface ({cluster.interface}) must hold exactly one address of {socket.gethostname()}, got {got}: "
        "name the network of the interface that the machines share."
    )


def is_free(host: str, port: int) -> bool:
    """Whether a role can listen at a port now."""
    # Like for ZeroMQ, a port with connections in TIME_WAIT counts as free.
    with suppress(OSError), socket.create_server((host, port)):
        return True
    return False


def find_last_port(cluster: ClusterConfig) -> tuple[str, int]:
    """This machine's address and the last free port of `cluster.ports`. Raises ConfigError.

    For programs that take a port number; roles take the first.
    """
    host = find_interface(cluster).address
    if port := next((port for port in reversed(cluster.port_range) if is_free(host, port)), 0):
        return host, port
    raise ConfigError(f"cluster.ports must have a free port on {host}, got {cluster.ports}: name a wider range.")


def tcp_endpoints(cluster: ClusterConfig, *, previous: str = "") -> list[str]:
    """Endpoints that a role may bind here; `previous` first if it is one of them. Raises ConfigError."""
    host = find_interface(cluster).address
    endpoints = [f"tcp://{host}:{port}" for port in cluster.port_range]
    # Other machines find a restarted role at its previous address.
    return [previous, *endpoints] if previous in endpoints else endpoints


def collective_environment(cluster: ClusterConfig) -> dict[str, str]:
    """Environment variables that select Gloo's and NCCL's interface; empty without trust. Raises ConfigError."""
    if not cluster.trusted_network:
        return {}
    name = find_interface(cluster).name
    # The = makes NCCL match the whole name, not a prefix.
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
