"""Session: a process's membership in a run, from connecting to the broker's address until its Bye."""

import os
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import structlog

from slipstream.broker.credentials import TOKEN_REMEDY, Keys
from slipstream.broker.errors import RefusedByBrokerError
from slipstream.broker.messages import Hello, Member, Message, Welcome
from slipstream.broker.transport.client import BrokerClient, BrokerClientThread, PeerStatus
from slipstream.broker.transport.endpoints import is_listening, machine_id
from slipstream.broker.transport.inbox import QueueInbox
from slipstream.broker.transport.links import Links
from slipstream.broker.transport.route import Route
from slipstream.broker.transport.zmq_channels import ZmqClientChannel, is_refused
from slipstream.configs.broker import FIRST_BROKER
from slipstream.runtime.clock import Deadline

_REPORT_INTERVAL_S = 5.0
_FIRST_REPORT_S = 1.0

log = structlog.get_logger(__name__)


@dataclass
class Session:
    """A joined peer: its client, the thread that runs it, and the messages it receives."""

    client: BrokerClient
    thread: BrokerClientThread
    links: Links
    """Clients of all brokers that this process has joined; `client` is the first, and a generator's only one."""
    inbox: QueueInbox
    welcome: Welcome
    """The Welcome of the join; later ones arrive in the inbox."""
    member: Member
    """This process in membership epochs."""

    @contextmanager
    def leave_at_exit(self, *, flush_s: float = 0.0) -> Iterator[None]:
        """Leave the run after the block: flush the outbox for at most `flush_s`, then send Bye with any error."""
        reason = ""
        try:
            yield
        except Exception as error:
            reason = str(error).strip() or type(error).__name__
            raise
        finally:
            self.links.stop(flush_s=flush_s, reason=reason)


class StatusBoard:
    """Status for a role's Pongs. The client's thread reads it; the role sets its source once it has loaded."""

    def __init__(self) -> None:
        self._read: Callable[[], PeerStatus] = lambda: PeerStatus("starting", reason="loading")

    def __call__(self) -> PeerStatus:
        return self._read()

    def set_source(self, read: Callable[[], PeerStatus]) -> None:
        self._read = read


def join(
    role: Literal["generator", "learner"],
    *,
    address: str,
    keys: Keys,
    max_message_bytes: int,
    peer_id: str,
    status: StatusBoard,
    timeout_s: float,
    weight_transport: Literal["", "collective", "snapshot", "delta"] = "",
    brokers: Mapping[str, str] | None = None,
) -> Session:
    """Connect and wait for the Welcome, logging every few seconds what is missing.

    Of several brokers a generator goes to the one that its hash gives it, the learner to all. `brokers`: those that are
    known here, by name, `address` among them; whichever welcomes this process tells the others.

    Raises RefusedByBrokerError if the broker rejects this peer, WaitTimeoutError after `timeout_s`.
    """
    hello = Hello(
        role,
        peer_id,
        uuid.uuid4().hex,
        socket.gethostname(),
        os.getpid(),
        weight_transport=weight_transport,
        machine=machine_id(),
    )
    inbox = QueueInbox()
    known = brokers or {FIRST_BROKER: address}
    route = Route(peer_id, known, is_reachable=is_listening) if role == "generator" else None
    address = route.address if route else next(filter(is_listening, known.values()), address)

    def connect(to: str, on_message: Callable[[Message], None]) -> BrokerClient:
        channel = ZmqClientChannel(to, keys=keys, max_message_bytes=max_message_bytes)
        return BrokerClient(channel, hello=hello, status=status, on_message=on_message, on_end=inbox.put, route=route)

    links = Links(connect, on_message=inbox.put, joins_all=route is None, brokers=known)
    client, thread = links.open(address)
    try:
        welcome = _wait_for_welcome(thread, inbox, address=address, keys=keys, timeout_s=timeout_s)
    except BaseException:
        links.stop()
        raise
    return Session(client, thread, links, inbox, welcome, Member(peer_id, hello.incarnation))


def _wait_for_welcome(
    thread: BrokerClientThread, inbox: QueueInbox, *, address: str, keys: Keys, timeout_s: float
) -> Welcome:
    deadline = Deadline(timeout_s, what=f"the welcome of the broker at {address}")
    # Soon at first: another token ends the wait.
    interval_s = _FIRST_REPORT_S
    while True:
        message = inbox.get(timeout_s=min(interval_s, max(0.1, deadline.left_s)))
        if isinstance(message, Welcome):
            return message
        if thread.error:
            raise thread.error
        interval_s = _REPORT_INTERVAL_S
        missing = _diagnose(address, keys)
        deadline.check(missing=missing)
        log.info("waiting", for_=f"the broker at {address}: {missing}")


def _diagnose(address: str, keys: Keys) -> str:
    """Return what a wait for the broker lacks. Raises RefusedByBrokerError if it has another token."""
    if not is_listening(address):
        return "no process listens there; start a broker with `python -m broker`, or correct broker.address"
    if is_refused(address, keys):
        raise RefusedByBrokerError(
            f"the token must be that of the broker at {address}, got another one: {TOKEN_REMEDY}"
        )
    return (
        "a process listens there but does not answer: a broker that waits for its store, or another program; "
        "see that process's log, or correct broker.address"
    )
