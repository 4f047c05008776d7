"""Session: a process's membership in a run, from connecting to the broker's address until its Bye.

Links: the clients of a process, one for each broker that it has joined.

A generator has one client, which goes from broker to broker by itself. The learner has one for every broker.

Consumes: messages of all brokers.
Produces: the learner's messages, to all brokers; their members as one list.
Invariant: the learner has a client for every broker that another one calls alive.
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
    Refuse,
    Update,
    Welcome,
)
from slipstream.broker.transport.client import BrokerClient, BrokerClientThread, PeerStatus, Route
from slipstream.broker.transport.endpoints import is_listening, is_own_machine, machine_id
from slipstream.broker.transport.zmq_channels import ZmqClientChannel, is_refused
from slipstream.configs.broker import FIRST_BROKER
from slipstream.runtime.clock import Deadline
from slipstream.runtime.credentials import TOKEN_REMEDY, Keys

log = structlog.get_logger(__name__)

Connect = Callable[[str, Callable[[Message], None]], BrokerClient]
"""Address, and a function for the messages from there -> a client."""


@dataclass
class _Link:
    address: str
    broker: str = ""
    """Empty before the first Welcome."""
    client: BrokerClient | None = None
    thread: BrokerClientThread | None = None


class Links:
    """Fulfils Sender; thread-safe. Life: open -> send* -> stop."""

    def __init__(
        self,
        connect: Connect,
        *,
        on_message: Callable[[Message], None],
        joins_all: bool,
        brokers: Mapping[str, str],
        is_reachable: Callable[[str], bool] = is_listening,
    ) -> None:
        """`on_message` gets all messages for the role, on the threads of the clients; `joins_all`: of a learner.

        `brokers`: name -> address, as far as this process knows, for those it cannot reach where they say they are.
        """
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
        """Newest report of each broker, the last to report at the end."""
        self._living: set[str] | None = None
        """Brokers whose members count; None: all."""

    def open(self, address: str, *, broker: str = "") -> tuple[BrokerClient, BrokerClientThread]:
        """Start a client to an address; those to the other brokers follow by themselves once it has joined."""
        link = _Link(address, broker)
        with self._lock:
            self._links.append(link)
        client = link.client = self._connect(address, lambda message: self._receive(link, message))
        # Its members may have missed it on their way from another broker.
        client.order = self._order
        link.thread = BrokerClientThread(client)
        link.thread.start()
        return client, link.thread

    def send(self, message: Message) -> None:
        """Queue a message for every broker: each passes a weight order on to those of its members that it serves."""
        with self._lock:
            if isinstance(message, OpenEpoch | Update):
                self._order = message
            for client in [link.client for link in self._links if link.client]:
                client.send(message)

    def stop(self, *, flush_s: float = 0.0, reason: str = "") -> None:
        """Leave the run at every broker; arguments as for BrokerClientThread.stop."""
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
                    # A broker serves one connection of a learner: two would take turns for ever. One that was left for
                    # its twin leaves none.
                    twins = [each for each in self._links if each.broker == link.broker and each is not link]
                    for twin in twins if link in self._links else ():
                        self._leave(twin)
                self._follow(living)
                self._on_message(message)
            case LivingBrokers():
                self._follow(message)
            case Members(generators=generators):
                with self._lock:
                    self._members.pop(link.broker, None)
                    self._members[link.broker] = generators
                    self._on_message(self._joined())
            case _:
                self._on_message(message)

    def _follow(self, living: LivingBrokers | None) -> None:
        """Open clients to brokers that have none, and leave out the members of those that are gone."""
        with self._lock:
            if not (self._joins_all and living) or self._is_stopped:
                return
            known = {link.broker: link for link in self._links}
            for name in living.brokers.keys() - {living.broker}:
                link = known.get(name)
                address = self._choose(name, living.brokers[name], link)
                if address and (link is None or link.address != address):
                    self._replace(link, name, address)
            before, self._living = self._joined(), set(living.brokers)
            # Generators go on to other brokers, which report them then; or theirs is back, with nothing new to report.
            if (joined := self._joined()) != before:
                self._on_message(joined)

    def _choose(self, broker: str, announced: str, link: _Link | None) -> str:
        """Return the address at which this process joins a broker; empty without one."""
        # Which of the addresses that this process knows is whose, only a Welcome tells.
        taken = {each.address for each in self._links}
        own = [link.address] if link else [address for address in self._brokers.values() if address not in taken]
        # The announced one first, for another role may have taken the port that a broker had. But as seen from here it
        # may be out of reach, where a tunnel is not, and a loopback address that of another process.
        both = [*own, announced] if link and is_own_machine(announced) else [announced, *own]
        addresses = [*filter(None, dict.fromkeys(both))]
        if len(addresses) < 2:
            return "".join(addresses)
        return next(filter(self._is_reachable, addresses), announced)

    def _replace(self, link: _Link | None, broker: str, address: str) -> None:
        if self._is_reachable(address):
            log.info("broker_found", broker=broker, address=address)
        else:
            reason = "nobody listens there, as seen from here: its generators get no weights until it is reached"
            log.warning("broker_not_reached", broker=broker, address=address, reason=reason)
        if link:
            self._leave(link)
        self.open(address, broker=broker)

    def _leave(self, link: _Link) -> None:
        self._links.remove(link)
        if link.thread:
            # It may wait for this lock: it is left to end by itself.
            threading.Thread(target=link.thread.stop, name="leave-broker", daemon=True).start()

    def _joined(self) -> Members:
        # Of two brokers that both have a generator, one hangs or is about to hear of its move: the last one knows more.
        counted = [states for name, states in self._members.items() if self._living is None or name in self._living]
        by_member = {state.member: state for states in counted for state in states}
        return Members(sorted(by_member.values(), key=lambda state: state.member.peer_id))


class Inbox(Protocol):
    """Source of messages for a synchronous role."""

    def get(self, *, timeout_s: float) -> Message | None:
        """Return the next message; None after `timeout_s`.

        Raises RefusedByBrokerError once the broker has rejected this peer, ClientDiedError if the client's thread died.
        """
        ...


class Sender(Protocol):
    """Way out for the messages of a role, to one broker or to all."""

    def send(self, message: Message) -> None:
        """Queue a message; any thread."""
        ...


class QueueInbox:
    """Filled by the client's thread; read by `get`, or forwarded to a listener once there is one."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Message | ClientDiedError] = queue.SimpleQueue()
        self._listener: Callable[[Message | ClientDiedError], None] = self._queue.put
        # Between the queue and a new listener no message may be left behind, or overtake another.
        self._lock = threading.Lock()

    def put(self, message: Message | ClientDiedError) -> None:
        """Add a message, or the error that ended the client: its `on_message` and `on_end`."""
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
        """Pass all queued messages to `listener`, and every later one, on the client's thread."""
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
    """Schedule `call(argument)` on `loop`, from any thread or signal handler; does nothing on a closed loop.

    Messages and signals still arrive while a role empties its outbox, after its loop has ended.
    """
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call, argument)


_REPORT_INTERVAL_S = 5.0
_FIRST_REPORT_S = 1.0


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
