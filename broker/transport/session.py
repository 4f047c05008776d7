"""Session: a process's membership in a run.

A generator has one client, which moves between brokers; the learner has one per broker.

Consumes: messages from all brokers.
Produces: the learner's messages, sent to all brokers; the brokers' members, merged into one list.
Invariant: the learner has a client for every broker reported as alive.
"""

import asyncio
import os
import queue
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import structlog

from slipstream.broker.errors import ClientDiedError, RefusedByBrokerError
from slipstream.broker.messages import (
    Hello,
    LivingBrokers,
    Member,
    Members,
    MemberState,
    Message,
    OpenEpoch,
    Pong,
    Refuse,
    Update,
    Welcome,
)
from slipstream.broker.transport.client import BrokerClient, BrokerClientThread, Route
from slipstream.broker.transport.endpoints import is_listening, is_own_machine, machine_id
from slipstream.broker.transport.zmq_channels import ZmqClientChannel, is_refused
from slipstream.configs.broker import FIRST_BROKER
from slipstream.runtime.clock import Deadline
from slipstream.runtime.credentials import TOKEN_REMEDY, Keys

log = structlog.get_logger(__name__)

Connect = Callable[[str, Callable[[Message], None]], BrokerClient]
"""(address, handler for messages from that broker) -> client."""


@dataclass
class _Link:
    address: str
    broker: str = ""
    """Empty before the first Welcome."""
    client: BrokerClient | None = None
    thread: BrokerClientThread | None = None


class BrokerClients:
    """A process's clients. Implements Sender; thread-safe. Life: open -> send* -> stop."""

    def __init__(
        self,
        connect: Connect,
        *,
        on_message: Callable[[Message], None],
        joins_all: bool,
        brokers: Mapping[str, str],
        is_reachable: Callable[[str], bool] = is_listening,
    ) -> None:
        """`on_message` runs on the clients' threads. `joins_all`: for a learner. `brokers`: name -> address, in case an
        announced one is unreachable."""
        self._connect = connect
        self._on_message = on_message
        self._joins_all = joins_all
        self._brokers = brokers
        self._is_reachable = is_reachable
        self._lock = threading.RLock()
        self._links: list[_Link] = []
        self._is_stopped = False
        self._order: OpenEpoch | Update | None = None
        self._members: dict[str, list[MemberState]] = {}
        """Broker -> its newest members, oldest report first."""
        self._living: set[str] | None = None
        """Live brokers; only their members count. None: all count."""

    def open(self, address: str, *, broker: str = "") -> tuple[BrokerClient, BrokerClientThread]:
        """Start a client; after its Welcome, a learner opens the others."""
        link = _Link(address, broker)
        with self._lock:
            self._links.append(link)
        client = link.client = self._connect(address, lambda message: self._receive(link, message))
        # Members that were moving may have missed the order.
        client.order = self._order
        link.thread = BrokerClientThread(client)
        link.thread.start()
        return client, link.thread

    def send(self, message: Message) -> None:
        """Queue a message for every broker; each relays weight orders to its members."""
        with self._lock:
            if isinstance(message, OpenEpoch | Update):
                self._order = message
            for client in [link.client for link in self._links if link.client]:
                client.send(message)

    def stop(self, *, flush_s: float = 0.0, reason: str = "") -> None:
        with self._lock:
            self._is_stopped = True
            threads = [link.thread for link in self._links if link.thread]
        for thread in threads:
            thread.stop(flush_s=flush_s, reason=reason)

    def _receive(self, link: _Link, message: Message) -> None:
        match message:
            case Welcome(living=living):
                with self._lock:
                    link.broker = living.broker if living else ""
                    # Two connections to one broker would replace each other forever. A link that was left does not end
                    # its replacement.
                    twins = [each for each in self._links if each.broker == link.broker and each is not link]
                    for twin in twins if link in self._links else ():
                        self._leave(twin)
                self._update_brokers(living)
                self._on_message(message)
            case LivingBrokers():
                self._update_brokers(message)
            case Members(generators=generators):
                with self._lock:
                    self._members.pop(link.broker, None)
                    self._members[link.broker] = generators
                    self._on_message(self._merged_members())
            case _:
                self._on_message(message)

    def _update_brokers(self, living: LivingBrokers | None) -> None:
        with self._lock:
            if not (self._joins_all and living) or self._is_stopped:
                return
            known = {link.broker: link for link in self._links}
            for name in living.brokers.keys() - {living.broker}:
                link = known.get(name)
                address = self._choose_address(name, living.brokers[name], link)
                if address and (link is None or link.address != address):
                    self._replace(link, name, address)
            before, self._living = self._merged_members(), set(living.brokers)
            # The next Members may come late or never.
            if (merged := self._merged_members()) != before:
                self._on_message(merged)

    def _choose_address(self, broker: str, announced: str, link: _Link | None) -> str:
        # Until its Welcome, a known address may be any broker's: exclude those in use.
        taken = {each.address for each in self._links}
        own = [link.address] if link else [address for address in self._brokers.values() if address not in taken]
        # Prefer the announced address, since the old port may be reused. But it may need a tunnel, and a loopback
        # address may belong to another process.
        both = [*own, announced] if link and is_own_machine(announced) else [announced, *own]
        addresses = [*filter(None, dict.fromkeys(both))]
        if len(addresses) < 2:
            return "".join(addresses)
        return next(filter(self._is_reachable, addresses), announced)

    def _replace(self, link: _Link | None, broker: str, address: str) -> None:
        if self._is_reachable(address):
            log.info("broker_found", broker=broker, address=address)
        else:
            reason = "unreachable from this machine: its generators get no weights until the learner reaches it"
            log.warning("broker_not_reached", broker=broker, address=address, reason=reason)
        if link:
            self._leave(link)
        self.open(address, broker=broker)

    def _leave(self, link: _Link) -> None:
        self._links.remove(link)
        if link.thread:
            # The client's thread may be waiting for this lock.
            threading.Thread(target=link.thread.stop, name="leave-broker", daemon=True).start()

    def _merged_members(self) -> Members:
        # If two brokers report a generator, one hangs or has not noticed its move: the newest report wins.
        counted = [states for name, states in self._members.items() if self._living is None or name in self._living]
        by_member = {state.member: state for states in counted for state in states}
        return Members(sorted(by_member.values(), key=lambda state: state.member.peer_id))


class Inbox(Protocol):
    """Source of messages for a synchronous role."""

    def get(self, *, timeout_s: float) -> Message | None:
        """Next message; None after `timeout_s`. Raises RefusedByBrokerError, ClientDiedError."""


class Sender(Protocol):
    """Sends a role's messages: a BrokerClient to one broker, BrokerClients to all."""

    def send(self, message: Message) -> None: ...


class QueueInbox:
    """Queue from the client's thread to `get` or a listener."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Message | ClientDiedError] = queue.SimpleQueue()
        self._listener: Callable[[Message | ClientDiedError], None] = self._queue.put
        # Keeps messages in order when a listener replaces the queue.
        self._lock = threading.Lock()

    def put(self, message: Message | ClientDiedError) -> None:
        with self._lock:
            self._listener(message)

    def get(self, *, timeout_s: float) -> Message | None:
        message = self._pop(timeout_s=timeout_s)
        if isinstance(message, Refuse):
            raise RefusedByBrokerError(message.reason)
        if isinstance(message, ClientDiedError):
            raise message
        return message

    def forward_to(self, listener: Callable[[Message | ClientDiedError], None]) -> None:
        """Pass all queued and later messages to `listener`, on the client's thread."""
        with self._lock:
            while (message := self._pop(timeout_s=0)) is not None:
                listener(message)
            self._listener = listener

    def _pop(self, *, timeout_s: float) -> Message | ClientDiedError | None:
        try:
            return self._queue.get(timeout=timeout_s) if timeout_s > 0 else self._queue.get_nowait()
        except queue.Empty:
            return None


def call_threadsafe(loop: asyncio.AbstractEventLoop, call: Callable[[Any], object], argument: object) -> None:
    """Schedule `call(argument)` on `loop` from any thread or signal handler; a no-op on a closed loop."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call, argument)


_REPORT_INTERVAL_S = 5.0
_FIRST_REPORT_S = 1.0


@dataclass
class Session:
    """Connections of this peer to the run that it joined."""

    client: BrokerClient
    thread: BrokerClientThread
    clients: BrokerClients
    """All clients; `client` is the first, and a generator's only one."""
    inbox: QueueInbox
    welcome: Welcome
    """The first Welcome; later ones arrive in the inbox."""
    member: Member
    """This process as a member of epochs."""

    @contextmanager
    def leave_at_exit(self, *, flush_s: float = 0.0) -> Iterator[None]:
        """Leave the run after the block: flush the outbox, then send Bye with any error."""
        reason = ""
        try:
            yield
        except Exception as error:
            reason = str(error).strip() or type(error).__name__
            raise
        finally:
            self.clients.stop(flush_s=flush_s, reason=reason)


class StatusBoard:
    """Status for Pongs. The role sets the source after loading."""

    def __init__(self) -> None:
        self._read: Callable[[], Pong] = lambda: Pong(-1.0, "starting", -1, reason="loading")

    def __call__(self) -> Pong:
        return self._read()

    def set_source(self, read: Callable[[], Pong]) -> None:
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
    """Connect and wait for the Welcome, logging what is missing.

    With several brokers, a generator joins the one its hash selects, and the learner joins all. `brokers`: known ones,
    name -> address, including `address`. Raises RefusedByBrokerError, WaitTimeoutError after `timeout_s`.
    """
    incarnation, host, machine = uuid.uuid4().hex, socket.gethostname(), machine_id()
    hello = Hello(role, peer_id, incarnation, host, os.getpid(), weight_transport=weight_transport, machine=machine)
    inbox = QueueInbox()
    known = brokers or {FIRST_BROKER: address}
    route = Route(peer_id, known, is_reachable=is_listening) if role == "generator" else None
    address = route.address if route else next(filter(is_listening, known.values()), address)

    def connect(to: str, on_message: Callable[[Message], None]) -> BrokerClient:
        channel = ZmqClientChannel(to, keys=keys, max_message_bytes=max_message_bytes)
        return BrokerClient(channel, hello=hello, status=status, on_message=on_message, on_end=inbox.put, route=route)

    clients = BrokerClients(connect, on_message=inbox.put, joins_all=route is None, brokers=known)
    client, thread = clients.open(address)
    try:
        welcome = _wait_for_welcome(thread, inbox, address=address, keys=keys, timeout_s=timeout_s)
    except BaseException:
        clients.stop()
        raise
    return Session(client, thread, clients, inbox, welcome, Member(peer_id, incarnation))


def _wait_for_welcome(
    thread: BrokerClientThread, inbox: QueueInbox, *, address: str, keys: Keys, timeout_s: float
) -> Welcome:
    deadline = Deadline(timeout_s, what=f"the welcome of the broker at {address}")
    # Diagnose early, since a wrong token ends the wait.
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
    if not is_listening(address):
        return "no process listens there; start a broker with `python -m slipstream.broker`, or correct broker.address"
    if is_refused(address, keys):
        must = f"the token must be that of the broker at {address}"
        raise RefusedByBrokerError(f"{must}, got another one: {TOKEN_REMEDY}")
    return (
        "a process listens there but does not answer: a broker that waits for its store, or another program; "
        "see that process's log, or correct broker.address"
    )
