"""Handshake: decides from a Hello whether a peer may join.

The socket accepts only clients with the run's token or a guest's (slipstream/runtime/credentials.py).

Inspection: describes the run to a machine that has not joined, and tests the connection to it.

    machine -> broker       broker -> machine
    Inspect                 Inspected + bytes
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from slipstream.broker.messages import Frames, Hello, HelloHeader, HostName, LivingBrokers, Message, decode_header
from slipstream.broker.transport.endpoints import is_here, is_inside, is_listening
from slipstream.buffer.codec import encode
from slipstream.buffer.errors import RecordRefusedError
from slipstream.buffer.role_reports import LAUNCHER, LEARNER
from slipstream.buffer.trajectory import SCHEMA_VERSION, Name
from slipstream.configs.base import Record
from slipstream.configs.broker import BROKER_NAME
from slipstream.configs.run import RunConfig
from slipstream.runtime.model_files import ModelFingerprint
from slipstream.runtime.process import versions

_RESERVED_IDS = (LEARNER, "archiver", "store", LAUNCHER)


class Rejection(Record):
    """Reason to refuse a peer.

    Example: Rejection("schema", "schema version must be 2, got 1 from 'g-0': update the older side.")
    """

    kind: Literal["schema", "name", "network", "guest"]
    reason: str


def check_hello(
    hello: Hello,
    locate_duplicate: Callable[[Hello], str],
    *,
    guest: str,
    quarantined: Mapping[str, str],
    trusts_network: bool,
) -> Rejection | None:
    """Reason to reject a peer; None if it may join.

    `locate_duplicate` describes another live peer of the same name; empty if the name is unique. `guest`: owner of the
    peer's key; empty for the run's token. `quarantined`: guest -> reason.
    """
    if hello.schema_version != SCHEMA_VERSION:
        return _reject_schema(hello.peer_id, hello.schema_version)
    if hello.weight_transport == "collective" and not (trusts_network or is_here(hello.machine)):
        return Rejection(
            "network",
            "weights.transport=collective on another machine needs cluster.trusted_network=true, since broadcasts are "
            f"not encrypted, got false for {hello.peer_id!r} on {hello.host}: leave the transport out to fetch deltas.",
        )
    if guest and (reason := _check_guest(hello, guest, quarantined)):
        return Rejection("guest", reason)
    reason = _check_name(hello, locate_duplicate)
    return Rejection("name", reason) if reason else None


def _check_name(hello: Hello, locate_duplicate: Callable[[Hello], str]) -> str:
    # A fixed name, so that a second learner is refused as a duplicate.
    if hello.role == "learner" and hello.peer_id != LEARNER:
        return f"a run has one learner, whose id must be {LEARNER!r}, got {hello.peer_id!r}: stop that process."
    if hello.role == "generator" and (hello.peer_id in _RESERVED_IDS or BROKER_NAME.fullmatch(hello.peer_id)):
        return f"a generator's id must not be a role's name, got {hello.peer_id!r}: choose another with --id."
    if not (location := locate_duplicate(hello)):
        return ""
    if hello.role == "learner":
        return f"a run has one learner, but {location} has joined: stop that process, or choose another run."
    must = f"peer id {hello.peer_id!r} must be unique, but {location} has it"
    return f"{must}: choose another with --id, or stop that process."


def _check_guest(hello: Hello, guest: str, quarantined: Mapping[str, str]) -> str:
    if reason := quarantined.get(guest):
        return f"guest {guest!r} is quarantined and may not join again: {reason}"
    if hello.role != "generator" or hello.peer_id != guest:
        got = f"{hello.role} {hello.peer_id!r}"
        return f"a guest must be a generator named {guest!r}, got {got}: each guest needs a separate token."
    if hello.weight_transport == "collective":
        return f"a guest must not join broadcasts, got weights.transport=collective from {guest!r}: leave it out."
    return ""


def reject_unreadable(hello: HelloHeader, refusal: RecordRefusedError) -> Rejection:
    """Reject an undecodable Hello, most likely from another version."""
    if isinstance(hello.schema_version, int) and hello.schema_version != SCHEMA_VERSION:
        return _reject_schema(hello.sender, hello.schema_version)
    return Rejection("schema", f"a Hello must match this version of Slipstream, got {refusal}: update both sides.")


def _reject_schema(peer_id: str, version: int) -> Rejection:
    got = f"got {version} from {peer_id!r}"
    return Rejection("schema", f"schema version must be {SCHEMA_VERSION}, {got}: update the older side.")


MAX_BYTES = 256 * 1024
"""Largest answer, small enough that other peers are served in between."""
_MAX_PROBES = 8
"""Concurrent connection tests; further machines are answered without one."""


class Inspect(Message):
    """Query from a machine that may join. Example: Inspect(listens_at="tcp://10.0.0.7:20000", num_bytes=262144)."""

    listens_at: Name = ""
    """Endpoint to test, if inside `cluster.interface`; empty: none."""
    num_bytes: Annotated[int, Meta(ge=0, le=MAX_BYTES)] = 0
    """Length of the answer's second frame, for measuring the link."""
    machine: HostName = ""
    """As in Hello; selects the brokers' addresses in the answer."""


class Inspected(Message):
    """The run, settings, versions, and model of the broker, in reply to Inspect."""

    run_id: str
    config_json: str
    """The resolved RunConfig; empty in an answer with bytes."""
    versions: dict[str, str]
    """Library -> version on the broker's machine."""
    model: ModelFingerprint | None
    """Weights of the model, as in Welcome."""
    schema_version: int = SCHEMA_VERSION
    time: float = 0.0
    """Broker's clock, seconds since 1970."""
    weights_at: str = ""
    """The learner's endpoint for fetching weights; empty if none."""
    living: LivingBrokers | None = None
    is_reached: bool | None = None
    """Whether the broker could connect to `listens_at`; None: not tested."""


class Inspection:
    """Answers Inspect. Belongs to the router's thread; tests connections on its own thread."""

    def __init__(
        self,
        run: RunConfig,
        send: Callable[[bytes, Frames], object],
        find_weights: Callable[[], str],
        find_living: Callable[[str], LivingBrokers | None],
        *,
        model: ModelFingerprint | None,
    ) -> None:
        self._run = run
        self._config_json = msgspec.json.encode(run).decode()
        self._model = model
        self._send = send
        self._find_weights = find_weights
        self._find_living = find_living
        self._probing: dict[bytes, Future[bool]] = {}
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="inspection")

    def accept(self, identity: bytes, frames: Frames) -> bool:
        """Answer an Inspect, now or in `send_due`; False for any other message."""
        if (question := decode_header(frames, Inspect)) is None:
            return False
        # Only in the cluster's network, so that the broker cannot scan other hosts.
        host = question.listens_at.removeprefix("tcp://").rpartition(":")[0]
        if is_inside(host, self._run.cluster.network) and len(self._probing) < _MAX_PROBES:
            self._probing[identity] = self._threads.submit(is_listening, question.listens_at)
        else:
            self._reply(identity, num_bytes=question.num_bytes, machine=question.machine)
        return True

    def send_due(self) -> None:
        for identity in [identity for identity, tried in self._probing.items() if tried.done()]:
            self._reply(identity, is_reached=self._probing.pop(identity).result())

    def _reply(self, identity: bytes, *, num_bytes: int = 0, machine: str = "", is_reached: bool | None = None) -> None:
        answer = Inspected(
            self._run.name,
            # Omitted from a measurement, which it would distort.
            "" if num_bytes else self._config_json,
            versions(),
            self._model,
            time=time.time(),
            weights_at=self._find_weights(),
            living=self._find_living(machine),
            is_reached=is_reached,
        )
        self._send(identity, [encode(answer), bytes(num_bytes)] if num_bytes else [encode(answer)])
