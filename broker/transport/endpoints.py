"""Endpoints: checks of an address, and probes of who listens there, with plain sockets."""

import ipaddress
import re
import socket
from functools import cache
from pathlib import Path

from slipstream.broker.errors import ChannelClosedError

PROBE_TIMEOUT_S = 1.0
_MAX_PATH_BYTES = 107
"""Length of a unix socket's path that the kernel takes."""


def check_reach(address: str, *, setting: str, network: ipaddress.IPv4Network | None = None) -> None:
    """Raise ChannelClosedError unless the address, which `setting` names, may be listened at.

    That is an ipc path, a loopback port, or a port of an address in `network`, that of `cluster.interface`.
    """
    transport, _, endpoint = address.partition("://")
    if transport == "ipc" and len(endpoint.encode()) > _MAX_PATH_BYTES:
        raise ChannelClosedError(
            f"{setting} must be a path of at most {_MAX_PATH_BYTES} bytes, got {len(endpoint.encode())}: {address}; "
            "choose a shorter one, or none, for a socket of the run's own."
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
    """Return a name of this machine and its network namespace, alike in all processes that share a loopback interface.

    Example: `node7-1f0c33a9-4026531840`. The name alone may be that of several machines, or of all their containers.
    """
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
        return f"{host}-{boot}-{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return host


def is_here(machine: str) -> bool:
    """Return whether a `machine_id` is that of this machine; of an unknown one it is assumed."""
    return machine in ("", machine_id())


def is_own_machine(address: str) -> bool:
    """Return whether an endpoint can be reached from its own machine alone."""
    transport, _, endpoint = address.partition("://")
    return transport != "tcp" or is_loopback(endpoint.rpartition(":")[0])


def check_unused(address: str, *, setting: str) -> None:
    """Raise ChannelClosedError if a process listens at an ipc path.

    Needed for ipc only: binding an ipc path silently takes it from its owner, while a port in use refuses by itself. A
    path left behind by a dead broker accepts no connection and counts as free.
    """
    transport, _, path = address.partition("://")
    if transport == "ipc" and path != "*" and is_listening(address):
        raise bind_error(address, "another process listens there", setting=setting)


def remove_path(address: str) -> None:
    """Delete the path of an ipc endpoint, which libzmq leaves behind; nothing for another. Idempotent."""
    transport, _, path = address.partition("://")
    if transport == "ipc":
        Path(path).unlink(missing_ok=True)


def is_listening(address: str) -> bool:
    """Return whether any process accepts a connection at a tcp or ipc endpoint; blocks at most a second."""
    transport, _, endpoint = address.partition("://")
    try:
        with _connected(transport, endpoint):
            return True
    except (OSError, ValueError):
        return False


def _connected(transport: str, endpoint: str) -> socket.socket:
    """Open a plain socket to an endpoint. Raises OSError, ValueError."""
    if transport == "tcp":
        host, _, port = endpoint.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=PROBE_TIMEOUT_S)
    probe = socket.socket(socket.AF_UNIX)
    try:
        probe.settimeout(PROBE_TIMEOUT_S)
        # ZeroMQ writes a name of the abstract namespace with a leading @, the kernel with a zero byte.
        probe.connect(endpoint.replace("@", "\0", 1) if endpoint.startswith("@") else endpoint)
    except OSError:
        probe.close()
        raise
    return probe


CURVE_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""Greeting of ZMTP 3.1: signature, version, security mechanism, role and filler."""


def speaks_curve(address: str) -> bool:
    """Return whether a server with encryption listens at an endpoint; blocks at most two seconds."""
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
    return ChannelClosedError(
        f"{setting} must be free to bind, got {address}: {reason}; "
        f"stop the {role} that runs there, or choose another with {setting}=..."
    )


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_inside(host: str, network: ipaddress.IPv4Network | None) -> bool:
    """Return whether a host is an address in this network."""
    try:
        return network is not None and ipaddress.IPv4Address(host) in network
    except ValueError:
        return False
