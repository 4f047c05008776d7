"""BrokerClient: a peer's end of the protocol; after a loss of the broker it rejoins by itself, there or at another.

Consumes: messages from the broker; messages and trajectories from its own role.
Produces: Hello until Welcome, a Pong for every Ping, each trajectory until its Ack.
Waits for: nothing; `step` returns within its timeout.
Invariant: a trajectory leaves the outbox only by Ack or fatal Nack.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
import structlog
import xxhash

from slipstream.broker.errors import ChannelClosedError, ClientDiedError, RefusedByBrokerError
from slipstream.broker.messages import (
    Ack,
    AnyMessage,
    Bye,
    Frames,
    Hello,
    LivingBrokers,
    Member,
    Members,
    Message,
    Nack,
    OpenEpoch,
    Ping,
    Pong,
    Put,
    Refuse,
    RefuseHeader,
    Update,
    Welcome,
    decode_header,
)
from slipstream.broker.transport.channels import ClientChannel
from slipstream.broker.transport.outbox import Outbox
from slipstream.buffer.codec import chunks, decode, encode
from slipstream.buffer.errors import RecordRefusedError
from slipstream.buffer.trajectory import TrajectoryHeader
from slipstream.configs.base import Record
from slipstream.configs.broker import BROKER_SILENCE_S
from slipstream.runtime.clock import Clock

_MAX_PROBES = 4
"""Brokers whose reachability is tried at a time, for the peer answers no ping meanwhile: each address at which nobody
answers takes a second."""


def preferred(peer_id: str, brokers: Iterable[str]) -> list[str]:
    """Return the brokers in the order in which this peer joins them: by the hash of both names, the greatest first.

    Every peer has an order of its own, so that brokers have about equally many. Without one of them, its peers are
    divided among the others, and nobody else moves.

    Source: rendezvous hashing (highest random weight), Thaler and Ravishankar, IEEE/ACM Trans. Networking 6(1), 1998.
    """
    return sorted(brokers, key=lambda name: xxhash.xxh3_64_intdigest(f"{name}\0{peer_id}".encode()), reverse=True)


class Route:
    """Belongs to the thread of the peer's client. Life: (next | follow)*."""

    def __init__(self, peer_id: str, brokers: Mapping[str, str], *, is_reachable: Callable[[str], bool]) -> None:
        """`brokers`: name -> address, as far as this peer knows; `is_reachable` tells whether anybody listens there."""
        self._peer_id = peer_id
        self._given = dict(brokers)
        """Addresses such as those of tunnels. Their names are assumed: only a Welcome tells whose one is."""
        self._own: dict[str, str] = {}
        """Broker -> address at which it has welcomed this peer."""
        self._failed: dict[str, str] = {}
        """Address that did not answer, though somebody listens there -> broker that it was taken for, until that dies.
        """
        self._brokers = {name: [address] for name, address in brokers.items()}
        self._is_reachable = is_reachable
        self._at = preferred(peer_id, brokers)[0]
        self.address = brokers[self._at]
        """Address of the broker that the peer is at, or tries."""

    @property
    def has_others(self) -> bool:
        return len(self._brokers) > 1

    def next(self) -> str:
        """Go on to the next broker that can be reached, after the last to the first; returns its address."""
        self._failed[self.address] = self._at
        order = preferred(self._peer_id, self._brokers)
        following = order.index(self._at) + 1
        others = [*order[following:], *order[:following]]
        if not self._go_to_first(others[:_MAX_PROBES]):
            # From the beginning: one may be back.
            self._failed = {self.address: self._at}
            if not self._go_to_first(others[:_MAX_PROBES]):
                self._at, self.address = others[0], self._brokers[others[0]][0]
        return self.address

    def follow(self, living: Mapping[str, str], *, at: str) -> bool:
        """Take the living brokers from the one that the peer is `at`; returns whether to go on to another.

        A broker that cannot be reached from here, as one at the other end of a tunnel, is left to others.
        """
        # It has this name and no other, whatever was assumed.
        self._own = {name: address for name, address in self._own.items() if address != self.address}
        self._own[at], self._at = self.address, at
        self._brokers = {name: found for name in (at, *living) if (found := self._addresses_of(name, living))}
        failed = self._failed.items()
        self._failed = {address: name for address, name in failed if name in living and address != self.address}
        order = preferred(self._peer_id, self._brokers)
        return self._go_to_first(order[: min(order.index(at), _MAX_PROBES)])

    def _addresses_of(self, broker: str, living: Mapping[str, str]) -> list[str]:
        """Return where a broker may be reached: where it says, where it was, then wherever no other one is."""
        others = {address for each in (living, self._own) for name, address in each.items() if name != broker}
        known = (self._own.get(broker), self._given.get(broker), *self._given.values())
        found = (living.get(broker), *(address for address in known if address not in others))
        return [address for address in dict.fromkeys(found) if address]

    def _go_to_first(self, names: Iterable[str]) -> bool:
        """Take the first of these brokers that can be reached, at any of its addresses; False without one."""
        for name in names:
            for address in self._brokers[name]:
                if address not in self._failed and self._is_reachable(address):
                    self._at, self.address = name, address
                    return True
        return False


_HELLO_INTERVAL_S = 1.0
_MAX_REASON_LENGTH = 1000

log = structlog.get_logger(__name__)


class PeerStatus(Record):
    """Contents of the next Pong; the fields are those of Pong."""

    state: str
    version: int = -1
    reason: str = ""
    gauges: dict[str, Any] = {}
    lease_ids: list[str] = []
    lends_at: str = ""


class BrokerClient:
    """`step` and `close` belong to one thread (BrokerClientThread, or the serial run's); the rest may be called by any.

    Life: (Hello -> Welcome -> traffic -> silence or Bye)* -> close. After `BROKER_SILENCE_S` without a message it
    reconnects, and goes on to the next broker of its route if there are several; once its own is alive again it goes
    back. Each new Welcome resends the outbox, which is safe because the store's insert is idempotent.
    """

    def __init__(
        self,
        channel: ClientChannel,
        *,
        hello: Hello,
        status: Callable[[], PeerStatus],
        on_message: Callable[[Message], None],
        on_end: Callable[[ClientDiedError], None] = lambda _: None,
        route: Route | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`on_end` is called if the thread that steps this client dies. `route`: of a peer that any broker serves."""
        self._channel = channel
        self._hello = hello
        self._status = status
        self._on_message = on_message
        self.on_end = on_end
        self._route = route
        self._clock = clock
        self._heard_at = clock()
        self._next_hello_at = clock()
        self._welcomed = threading.Event()
        self.order: OpenEpoch | Update | None = None
        """Newest weight order, which is sent again to members that join later."""
        self._connected: set[Member] = set()
        self.outbox = Outbox(clock=clock)
        self.welcome: Welcome | None = None
        """Newest Welcome; None before the first."""
        self.refusal: str = ""
        """Reason of the broker's rejection; empty without one."""

    @property
    def is_joined(self) -> bool:
        """Whether a Welcome was received and the connection has not been lost since."""
        return self._welcomed.is_set()

    def send(self, message: Message) -> None:
        """Queue a message. Weight orders are resent to members that join later; others are lost with a broker."""
        # A new order supersedes the one that may have to be resent.
        if isinstance(message, OpenEpoch | Update):
            self.order = message
        # To a broker that is gone the learner's would pile up. A generator has few then, which must arrive once it is
        # joined again: its answer to a weight order, leases that it gives back.
        if self.is_joined or self._route:
            self._channel.send([encode(message)])
            self._channel.wake()

    def put(self, header: TrajectoryHeader, payload: bytes) -> None:
        """Add a finished trajectory to the outbox, which sends it within the credit, and again until acknowledged."""
        self.outbox.add(header, payload)
        self._channel.wake()

    def send_status(self) -> None:
        """Send a Pong now, without waiting for a Ping."""
        if self.is_joined:
            self.send(self._pong(sent_at=-1.0))

    def step(self, *, timeout_s: float) -> None:
        """Send Hello if due and the outbox within its credit, handle received messages; blocks at most `timeout_s`."""
        self._stay_joined()
        self._send_outbox()
        frames = self._channel.receive(timeout_s=timeout_s)
        while frames is not None:
            self._heard_at = self._clock()
            self._handle(frames)
            frames = self._channel.receive(timeout_s=0)
        # Acks among the messages have freed credit.
        self._send_outbox()

    def close(self, *, reason: str = "") -> None:
        """Send Bye, with the error that ends the role if there is one, and close the channel."""
        try:
            if self.is_joined:
                self._channel.send([encode(Bye(reason[:_MAX_REASON_LENGTH]))])
                # Queued frames leave with a `receive`.
                self._channel.receive(timeout_s=0)
        finally:
            self._channel.close()

    def handle_refusal(self, refuse: Refuse) -> None:
        """Stop joining and pass the refusal to the role, which ends with it."""
        self.refusal = refuse.reason
        self._on_message(refuse)

    def _stay_joined(self) -> None:
        now = self._clock()
        has_others = self._route is not None and self._route.has_others
        if (self.is_joined or has_others) and now - self._heard_at > BROKER_SILENCE_S:
            # A fresh connection, because ZeroMQ may keep a half-open one for a long time.
            self._welcomed.clear()
            self._connected.clear()
            self._heard_at = now
            self._channel.reconnect(self._route.next() if self._route and has_others else "")
        if not self.is_joined and not self.refusal and now >= self._next_hello_at:
            self._next_hello_at = now + _HELLO_INTERVAL_S
            self._channel.send([encode(self._hello)])

    def _send_outbox(self) -> None:
        if self.is_joined:
            for chunk in chunks(self.outbox.pop_sendable()):
                put = Put([header for header, _ in chunk])
                self._channel.send([encode(put), *(payload for _, payload in chunk)])

    def _handle(self, frames: Frames) -> None:
        message = _decode(frames)
        match message:
            case Ping(sent_at=sent_at):
                self._channel.send([encode(self._pong(sent_at=sent_at))])
            case Ack(ids=ids):
                self.outbox.acknowledge(ids)
            case Welcome():
                self._accept_welcome(message)
            case Bye() if self.is_joined:
                # The broker restarted and does not know this peer: say Hello at once.
                self._welcomed.clear()
                self._next_hello_at = self._clock()
            case Refuse():
                self.handle_refusal(message)
            case Nack():
                self.outbox.reject(message)
                self._on_message(message)
            case Members(generators=generators):
                self._resend_order({each.member for each in generators})
                self._on_message(message)
            case LivingBrokers():
                if not self._moves(message) and self._route is None:
                    self._on_message(message)
            case Bye():
                return  # repeated: Hello is under way
            case _:
                self._on_message(message)

    def _accept_welcome(self, welcome: Welcome) -> None:
        # Several Hellos were queued while the broker was away: only the first answer to them starts anything.
        if self.is_joined and self.welcome and self.welcome.broker_incarnation == welcome.broker_incarnation:
            return
        if self._moves(welcome.living):
            return
        self._connected.clear()
        self.welcome = welcome
        self.outbox.set_credit(messages=welcome.credit_messages, size_bytes=welcome.credit_bytes)
        self.outbox.resend_all()
        self._welcomed.set()
        self._on_message(welcome)
        self._channel.send([encode(self._pong(sent_at=-1.0))])

    def _moves(self, living: LivingBrokers | None) -> bool:
        """Go to another broker if the living ones say so; returns whether this peer does."""
        if not (self._route and living and self._route.follow(living.brokers, at=living.broker)):
            return False
        log.info("moving", broker=living.broker, to=self._route.address)
        self._welcomed.clear()
        self._channel.send([encode(Bye(is_moving=True))])
        # Queued frames leave with a `receive`; what comes in answer is of no use any more.
        self._channel.receive(timeout_s=0)
        self._channel.reconnect(self._route.address)
        self._heard_at = self._next_hello_at = self._clock()
        return True

    def _resend_order(self, connected: set[Member]) -> None:
        """Repeat the newest order if the broker has members of it that it did not have before.

        It may have died with the broker of before, or missed a generator on its way from another one. The learner's own
        thread cannot do that: it is blocked in the broadcast. A generator that has handled it only repeats its answer.
        """
        joined, self._connected = connected - self._connected, connected
        if self.order and not joined.isdisjoint(self.order.members):
            self._channel.send([encode(self.order)])

    def _pong(self, *, sent_at: float) -> Pong:
        return Pong(sent_at=sent_at, **msgspec.structs.asdict(self._status()))


def _decode(frames: Frames) -> Message:
    """Decode a message of the broker. Raises RefusedByBrokerError."""
    try:
        message: Message = decode(frames[0], AnyMessage)  # type: ignore[arg-type]
    except RecordRefusedError as refusal:
        # A newer broker's Refuse may have unknown fields; its reason is worth showing all the same.
        if refuse := decode_header(frames, RefuseHeader):
            return Refuse(refuse.reason)
        raise RefusedByBrokerError(
            f"the broker must speak this version's protocol, got a message that is {refusal}: run the same version of "
            "Slipstream on both sides, and check which program listens at broker.address."
        ) from refusal
    return message


class BrokerClientThread:
    """Steps a BrokerClient on a thread of its own, so that a busy role still answers pings."""

    def __init__(self, client: BrokerClient) -> None:
        self._client = client
        self._reason = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="broker-client", daemon=True)
        self.error: BaseException | None = None
        """Error that ended the thread; None while it runs or after `stop`."""

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, flush_s: float = 0.0, reason: str = "") -> None:
        """Flush the outbox for at most `flush_s`, send Bye and end the thread; blocks at most one second longer.

        `reason`: the error that ends the role, for the broker; empty for a regular departure.
        """
        self._reason = reason
        deadline = time.monotonic() + flush_s
        while (
            self._thread.is_alive()
            and self._client.is_joined
            and len(self._client.outbox)
            and time.monotonic() < deadline
        ):
            self._thread.join(timeout=0.02)
        self._stopping.set()
        self._thread.join(timeout=1.0)
        if self.error and not self._thread.is_alive():
            # A failed thread leaves the channel open so that the role can still send. It has to be closed here: an open
            # ZeroMQ context blocks the exit of the process.
            with suppress(ChannelClosedError):
                self._client.close(reason=reason)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._client.step(timeout_s=0.2)
            self._client.close(reason=self._reason)
        except RefusedByBrokerError as refusal:
            self.error = refusal
            self._client.handle_refusal(Refuse(str(refusal)))
        except Exception as error:
            log.error("broker_client_died", exc_info=error)
            self.error = ClientDiedError(f"the broker client ended: {type(error).__name__}: {error}")
            self._client.on_end(self.error)
