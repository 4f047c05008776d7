"""Handshake: decides whether a peer may join, from the schema version and name in its Hello.

Only peers that have the run's token come this far: the socket hears no others (slipstream/runtime/credentials.py).

Inspection: what a machine learns of a run before it joins, and whether the broker reaches it.

    machine -> broker       broker -> machine
    Inspect                 Inspected + bytes
These are no messages of peers: a machine asks without having joined. It must have the run's token, as every client.
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


MAX_BYTES = 256 * 1024
"""Bytes of one answer: like a chunk of weights, few enough that other peers are served in between."""
_MAX_PROBES = 8
"""Machines that are tried at a time; others learn nothing of whether they are reached."""


class Inspect(Message):
    """Question of a machine that may join. Example: Inspect(listens_at="tcp://10.0.0.7:20000", num_bytes=262144)."""

    listens_at: Name = ""
    """Port of the machine for the broker to connect to; empty: none. Tried only inside `cluster.interface`."""
    num_bytes: Annotated[int, Meta(ge=0, le=MAX_BYTES)] = 0
    """Length of the answer's second frame, which measures the link."""
    machine: HostName = ""
    """As in Hello: which of their addresses the other brokers are named by."""


class Inspected(Message):
    """The broker's run, versions, model and clock, or bytes that measure the link: its answer to Inspect."""

    run_id: str
    config_json: str
    """The resolved RunConfig, as JSON; empty in an answer with bytes."""
    versions: dict[str, str]
    """Versions on the broker's machine, by library."""
    model: ModelFingerprint | None
    """Fingerprint of `model.path` there; None if there is no such folder."""
    schema_version: int = SCHEMA_VERSION
    time: float = 0.0
    """Seconds since 1970 by the broker's clock."""
    weights_at: str = ""
    """Port of the learner from which generators fetch weights; empty without a learner, or a port."""
    living: LivingBrokers | None = None
    """The brokers that live; None for a run of one."""
    is_reached: bool | None = None
    """Whether the broker could connect to `listens_at`; None: not tried."""


class Inspection:
    """Answers machines that have not joined. Belongs to the router's thread, and connects in one of its own."""

    def __init__(
        self,
        run: RunConfig,
        send: Callable[[bytes, Frames], object],
        find_weights: Callable[[], str],
        find_living: Callable[[str], LivingBrokers | None],
        *,
        model: ModelFingerprint | None,
    ) -> None:
        """`find_weights` returns the port of the learner for weights, empty without one; `find_living` the brokers
        that live, with their addresses for a machine."""
        self._run = run
        self._config_json = msgspec.json.encode(run).decode()
        self._model = model
        self._send = send
        self._find_weights = find_weights
        self._find_living = find_living
        self._probing: dict[bytes, Future[bool]] = {}
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="inspection")

    def accept(self, identity: bytes, frames: Frames) -> bool:
        """Answer a question, now or once the machine was tried; False for any other message."""
        question = decode_header(frames, Inspect)
        if question is None:
            return False
        if self._may_try(question.listens_at):
            self._probing[identity] = self._threads.submit(is_listening, question.listens_at)
        else:
            self._answer(identity, num_bytes=question.num_bytes, machine=question.machine)
        return True

    def send_due(self) -> None:
        """Answer the machines that have been tried."""
        for identity in [identity for identity, tried in self._probing.items() if tried.done()]:
            self._answer(identity, is_reached=self._probing.pop(identity).result())

    def _may_try(self, address: str) -> bool:
        # Inside that network alone: the broker is no means to look into others.
        host = address.removeprefix("tcp://").rpartition(":")[0]
        return is_inside(host, self._run.cluster.network) and len(self._probing) < _MAX_PROBES

    def _answer(
        self, identity: bytes, *, num_bytes: int = 0, machine: str = "", is_reached: bool | None = None
    ) -> None:
        answer = Inspected(
            self._run.name,
            # Left out of a measurement, to which it would add.
            "" if num_bytes else self._config_json,
            versions(),
            self._model,
            time=time.time(),
            weights_at=self._find_weights(),
            living=self._find_living(machine),
            is_reached=is_reached,
        )
        self._send(identity, [encode(answer), bytes(num_bytes)] if num_bytes else [encode(answer)])
