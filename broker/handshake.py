"""Handshake: decides whether a peer may join, from the schema version and name in its Hello.

Only peers that have the run's token come this far: the socket hears no others (broker/credentials.py).
"""

from collections.abc import Callable, Mapping
from typing import Literal

from slipstream.broker.messages import Hello
from slipstream.broker.partial_decode import HelloHeader
from slipstream.broker.status.role_status import LAUNCHER
from slipstream.broker.transport.endpoints import is_here
from slipstream.buffer.errors import RecordRefusedError
from slipstream.buffer.trajectory import SCHEMA_VERSION, Record
from slipstream.configs.broker import BROKER_NAME

LEARNER = "learner"
"""Id of the learner."""
_RESERVED_IDS = (LEARNER, "archiver", "store", LAUNCHER)


class Rejection(Record):
    """Reason why a peer may not join.

    Example: Rejection("schema", "schema version must be 2, got 1 from 'g-0': update the older side.")
    """

    kind: Literal["schema", "name", "network", "guest"]
    reason: str
    """One sentence: what must hold, what was got, what to do."""


class Handshake:
    """Admits a peer, or refuses it with the reason, by what its Hello says."""

    def __init__(self, *, locate_duplicate: Callable[[Hello], str], trusts_network: bool = False) -> None:
        """`locate_duplicate` describes another living peer of the same name; empty if there is none."""
        self._locate_duplicate = locate_duplicate
        self._trusts_network = trusts_network

    def check(self, hello: Hello, *, guest: str = "", quarantined: Mapping[str, str]) -> Rejection | None:
        """Return the reason to reject a peer; None if it may join.

        `guest`: the one that its key is of. `quarantined`: guests that may not join again, and why.
        """
        if hello.schema_version != SCHEMA_VERSION:
            return _reject_schema(hello.peer_id, hello.schema_version)
        if hello.weight_transport == "collective" and not (self._trusts_network or is_here(hello.machine)):
            return Rejection(
                "network",
                "weights.transport=collective on another machine needs cluster.trusted_network=true, got it from "
                f"{hello.peer_id!r} on {hello.host} without: broadcasts are not encrypted. Leave it out, and this "
                "generator fetches deltas.",
            )
        if guest and (reason := _check_guest(hello, guest, quarantined)):
            return Rejection("guest", reason)
        reason = self._check_name(hello)
        return Rejection("name", reason) if reason else None

    def _check_name(self, hello: Hello) -> str:
        # One name for the one learner: a second one is then refused as any other duplicate is.
        if hello.role == "learner" and hello.peer_id != LEARNER:
            return f"a run has one learner, whose id must be {LEARNER!r}, got {hello.peer_id!r}: stop that process."
        if hello.role == "generator" and (hello.peer_id in _RESERVED_IDS or BROKER_NAME.fullmatch(hello.peer_id)):
            return f"a generator's id must not be a role's name, got {hello.peer_id!r}: choose another with --id."
        location = self._locate_duplicate(hello)
        if location and hello.role == "learner":
            return (
                f"a run has one learner, but {location} is that of this run: stop that process, or choose another run."
            )
        if location:
            return (
                f"peer id {hello.peer_id!r} must be unique, but {location} has it: "
                "choose another with --id, or stop that process."
            )
        return ""


def _check_guest(hello: Hello, guest: str, quarantined: Mapping[str, str]) -> str:
    if reason := quarantined.get(guest):
        return f"guest {guest!r} is quarantined and may not join again: {reason}"
    if hello.role != "generator" or hello.peer_id != guest:
        got = f"{hello.role} {hello.peer_id!r}"
        return f"a guest is one generator with its own name, {guest!r}, got {got}: it needs a token of its own."
    if hello.weight_transport == "collective":
        return f"a guest takes part in no broadcast, got weights.transport=collective from {guest!r}: leave it out."
    return ""


def reject_unreadable(hello: HelloHeader, refusal: RecordRefusedError) -> Rejection:
    """Build the rejection of a Hello that cannot be decoded: most likely its sender is of another version."""
    if isinstance(hello.schema_version, int) and hello.schema_version != SCHEMA_VERSION:
        return _reject_schema(hello.sender, hello.schema_version)
    return Rejection("schema", f"a Hello must match this version of Slipstream, got {refusal}: update both sides.")


def _reject_schema(peer_id: str, version: int) -> Rejection:
    got = f"got {version} from {peer_id!r}"
    return Rejection("schema", f"schema version must be {SCHEMA_VERSION}, {got}: update the older side.")
