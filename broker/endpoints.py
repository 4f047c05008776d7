"""Endpoints a broker may bind: on this machine only, and not in use."""

import ipaddress
import socket

from broker.errors import ChannelClosed

LOOPBACK_NAMES = ("localhost",)
_CALL_TIMEOUT_S = 1.0


def check_local(address: str) -> None:
    """Raises ChannelClosed unless the address is ipc or a loopback port."""
    transport, _, place = address.partition("://")
    if transport == "ipc" or (transport == "tcp" and _is_loopback(place.rpartition(":")[0])):
        return
    raise ChannelClosed(
        "broker.address must be a loopback or ipc endpoint (like tcp://127.0.0.1:5757 or ipc:///tmp/broker.sock), "
        f"got {address}: nothing that travels is encrypted; other machines come through a tunnel (docs/scaling.md)"
    )


def check_unused(address: str) -> None:
    """Raises ChannelClosed when somebody answers at an ipc path.

    For ipc alone, because binding takes the path from whoever has it; a port refuses by itself. A path left behind by a
    dead broker answers nobody and is free.
    """
    transport, _, path = address.partition("://")
    if transport == "ipc" and path != "*" and somebody_listens(address):
        raise cannot_bind(address, "somebody answers there")


def somebody_listens(address: str) -> bool:
    """Whether a connection to a tcp or ipc endpoint is taken, by whomever; blocks at most a second."""
    transport, _, place = address.partition("://")
    try:
        with _connected(transport, place):
            return True
    except (OSError, ValueError):
        return False


def _connected(transport: str, place: str) -> socket.socket:
    """Raises OSError, ValueError."""
    if transport == "tcp":
        host, _, port = place.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=_CALL_TIMEOUT_S)
    caller = socket.socket(socket.AF_UNIX)
    try:
        caller.settimeout(_CALL_TIMEOUT_S)
        # ZeroMQ writes a name in the abstract namespace with an @, the kernel with a zero byte.
        caller.connect(place.replace("@", "\0", 1) if place.startswith("@") else place)
    except OSError:
        caller.close()
        raise
    return caller


def cannot_bind(address: str, reason: object) -> ChannelClosed:
    """The error for an address that is taken."""
    return ChannelClosed(
        f"broker.address must be free to bind, got {address}: {reason}; "
        "stop the broker that runs there, or choose another with broker.address=..."
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in LOOPBACK_NAMES
