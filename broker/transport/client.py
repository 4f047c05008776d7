"""BrokerClient: a peer's end of the protocol.

Consumes: messages from the broker; messages and trajectories from its role.
Produces: Hello until Welcome, a Pong for every Ping, each trajectory until its Ack.
Waits for: nothing; `step` returns within its timeout.
Invariant: a trajectory leaves the outbox only after an Ack or fatal Nack.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

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
from slipstream.configs.broker import BROKER_SILENCE_S
from slipstream.runtime.clock import Clock

_MAX_PROBES = 4
"""Brokers probed at a time. An unreachable address takes one second, while pings go unanswered."""


def preferred(peer_id: str, brokers: Iterable[str]) -> list[str]:
    """Brokers in a peer's order of preference: by descending hash of both names.

    Peers spread evenly. If a broker dies, only its peers move.

    Source: rendezvous hashing (highest random weight), Thaler and Ravishankar, IEEE/ACM Trans. Networking 6(1), 1998.
    """
    return sorted(brokers, key=lambda name: xxhash.xxh3_64_intdigest(f"{name}\0{peer_id}".encode()), reverse=True)


class Route:
    """Selects the broker that a peer joins. Belongs to the client's thread. Life: (next | follow)*."""

    def __init__(self, peer_id: str, brokers: Mapping[str, str], *, is_reachable: Callable[[str], bool]) -> None:
        self._peer_id = peer_id
        self._configured = dict(brokers)
        """Configured addresses, such as tunnels; a Welcome confirms which broker is there."""
        self._confirmed: dict[str, str] = {}
        """Broker -> address at which it welcomed this peer."""
        self._failed: dict[str, str] = {}
        """Address that accepts connections but did not answer -> broker assumed there, until that broker dies."""
        self._brokers = {name: [address] for name, address in brokers.items()}
        self._is_reachable = is_reachable
        self._current = preferred(peer_id, brokers)[0]
        self.address = brokers[self._current]
        """Address of the current broker, joined or not."""

    @property
    def has_others(self) -> bool:
        return len(self._brokers) > 1

    def next(self) -> str:
        """Switch to the next reachable broker, cyclically; returns its address."""
        self._failed[self.address] = self._current
        order = preferred(self._peer_id, self._brokers)
        following = order.index(self._current) + 1
        others = [*order[following:], *order[:following]]
        if not self._go_to_first(others[:_MAX_PROBES]):
            # Retry the failed ones: one may be back.
            self._failed = {self.address: self._current}
            if not self._go_to_first(others[:_MAX_PROBES]):
                self._current, self.address = others[0], self._brokers[others[0]][0]
        return self.address

    def follow(self, living: Mapping[str, str], *, at: str) -> bool:
        """Update the live brokers, as reported by the broker `at`; returns whether to move to one of the others."""
        # Only `at` is confirmed to be at this address.
        self._confirmed = {name: address for name, address in self._confirmed.items() if address != self.address}
        self._confirmed[at], self._current = self.address, at
        self._brokers = {name: found for name in (at, *living) if (found := self._addresses_of(name, living))}
        failed = self._failed.items()
        self._failed = {address: name for address, name in failed if name in living and address != self.address}
        order = preferred(self._peer_id, self._brokers)
        return self._go_to_first(order[: min(order.index(at), _MAX_PROBES)])

    def _addresses_of(self, broker: str, living: Mapping[str, str]) -> list[str]:
        """Possible addresses: announced, last used, then those of no other broker."""
        others = {address for each in (living, self._confirmed) for name, address in each.items() if name != broker}
        known = (self._confirmed.get(broker), self._configured.get(broker), *self._configured.values())
        found = (living.get(broker), *(address for address in known if address not in others))
        return [address for address in dict.fromkeys(found) if address]

    def _go_to_first(self, names: Iterable[str]) -> bool:
        for name in names:
            for address in self._brokers[name]:
                if address not in self._failed and self._is_reachable(address):
                    self._current, self.address = name, address
                    return True
        return False


_HELLO_INTERVAL_S = 1.0
_MAX_REASON_LENGTH = 1000

log = structlog.get_logger(__name__)


class BrokerClient:
    """A peer's connection to its broker.

    `step` and `close` belong to one thread. Any thread may call the other methods.

    Life: (Hello -> Welcome -> traffic -> silence or Bye)* -> close. After `BROKER_SILENCE_S` of silence it reconnects;
    with a route, to the next broker, until its preferred one is back. Each new Welcome resends the outbox.
    """

    def __init__(
        self,
        channel: ClientChannel,
        *,
        hello: Hello,
        status: Callable[[], Pong],
        on_message: Callable[[Message], None],
        on_end: Callable[[ClientDiedError], None] = lambda _: None,
        route: Route | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`on_end` is called if the thread dies. `route`: for a peer that any broker may serve."""
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
        """Newest weight order, resent to members that join later."""
        self._connected: set[Member] = set()
        self.outbox = Outbox(clock=clock)
        self.welcome: Welcome | None = None
        self.refusal: str = ""

    @property
    def is_joined(self) -> bool:
        """Whether a Welcome has arrived and its connection is not lost."""
        return self._welcomed.is_set()

    def send(self, message: Message) -> None:
        """Queue a message. It may get lost, except for weight orders, which are resent to members that join later."""
        if isinstance(message, OpenEpoch | Update):
            self.order = message
        # Without a connection, drop the learner's messages, which would pile up. A generator's few, such as answers to
        # weight orders and returned leases, must arrive after it rejoins.
        if self.is_joined or self._route:
            self._channel.send([encode(message)])
            self._channel.wake()

    def put(self, header: TrajectoryHeader, payload: bytes) -> None:
        self.outbox.add(header, payload)
        self._channel.wake()

    def send_status(self) -> None:
        if self.is_joined:
            self.send(self._status())

    def step(self, *, timeout_s: float) -> None:
        """Send a due Hello and the outbox, then handle messages; blocks at most `timeout_s`."""
        now, has_others = self._clock(), self._route is not None and self._route.has_others
        if (self.is_joined or has_others) and now - self._heard_at > BROKER_SILENCE_S:
            # ZeroMQ may keep a half-open connection for a long time.
            self._welcomed.clear()
            self._connected.clear()
            self._heard_at = now
            self._channel.reconnect(self._route.next() if self._route and has_others else "")
        if not self.is_joined and not self.refusal and now >= self._next_hello_at:
            self._next_hello_at = now + _HELLO_INTERVAL_S
            self._channel.send([encode(self._hello)])
        self._send_outbox()
        frames = self._channel.receive(timeout_s=timeout_s)
        while frames is not None:
            self._heard_at = self._clock()
            self._handle(frames)
            frames = self._channel.receive(timeout_s=0)
        # Acks have freed credit.
        self._send_outbox()

    def close(self, *, reason: str = "") -> None:
        """Send Bye, with the role's error if it failed, and close the channel."""
        try:
            if self.is_joined:
                self._channel.send([encode(Bye(reason[:_MAX_REASON_LENGTH]))])
                # `receive` sends queued frames.
                self._channel.receive(timeout_s=0)
        finally:
            self._channel.close()

    def handle_refusal(self, refuse: Refuse) -> None:
        """Stop joining and pass the refusal to the role, which then fails."""
        self.refusal = refuse.reason
        self._on_message(refuse)

    def _send_outbox(self) -> None:
        if self.is_joined:
            for chunk in chunks(self.outbox.pop_sendable()):
                self._channel.send([encode(Put([header for header, _ in chunk])), *(payload for _, payload in chunk)])

    def _handle(self, frames: Frames) -> None:
        message = _decode(frames)
        match message:
            case Ping(sent_at=sent_at):
                self._channel.send([encode(msgspec.structs.replace(self._status(), sent_at=sent_at))])
            case Ack(ids=ids):
                self.outbox.acknowledge(ids)
            case Welcome():
                self._accept_welcome(message)
            case Bye() if self.is_joined:
                # A restarted broker does not know this peer: say Hello immediately.
                self._welcomed.clear()
                self._next_hello_at = self._clock()
            case Refuse():
                self.handle_refusal(message)
            case Nack():
                self.outbox.reject(message)
                self._on_message(message)
            case Members(generators=generators):
                connected = {each.member for each in generators}
                joined, self._connected = connected - self._connected, connected
                # New members may have missed the order, and the learner's main thread cannot resend it while the
                # broadcast blocks. A generator that has handled it only repeats its answer.
                if self.order and not joined.isdisjoint(self.order.members):
                    self._channel.send([encode(self.order)])
                self._on_message(message)
            case LivingBrokers():
                if not self._moves(message) and self._route is None:
                    self._on_message(message)
            case Bye():
                return  # a repeated Bye: the Hello is already sent
            case _:
                self._on_message(message)

    def _accept_welcome(self, welcome: Welcome) -> None:
        # Hellos may have queued up during an outage: ignore all answers but the first.
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
        self._channel.send([encode(self._status())])

    def _moves(self, living: LivingBrokers | None) -> bool:
        if not (self._route and living and self._route.follow(living.brokers, at=living.broker)):
            return False
        log.info("moving", broker=living.broker, to=self._route.address)
        self._welcomed.clear()
        self._channel.send([encode(Bye(is_moving=True))])
        # `receive` sends queued frames; a received message is obsolete.
        self._channel.receive(timeout_s=0)
        self._channel.reconnect(self._route.address)
        self._heard_at = self._next_hello_at = self._clock()
        return True


def _decode(frames: Frames) -> Message:
    try:
        message: Message = decode(frames[0], AnyMessage)  # type: ignore[arg-type]
    except RecordRefusedError as refusal:
        # A newer broker's Refuse may not decode; its reason still helps.
        if refuse := decode_header(frames, RefuseHeader):
            return Refuse(refuse.reason)
        raise RefusedByBrokerError(
            f"the broker must speak this version's protocol, got a message that is {refusal}: run the same version of "
            "Slipstream on both sides, and check which program listens at broker.address."
        ) from refusal
    return message


class BrokerClientThread:
    """Steps a BrokerClient on a separate thread, so that a busy role still answers pings."""

    def __init__(self, client: BrokerClient) -> None:
        self._client = client
        self._reason = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="broker-client", daemon=True)
        self.error: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, flush_s: float = 0.0, reason: str = "") -> None:
        """Flush the outbox for at most `flush_s`, send Bye with the role's error, if any, and end the thread.

        Blocks at most one second longer.
        """
        self._reason = reason
        deadline = time.monotonic() + flush_s
        while self._thread.is_alive() and self._client.is_joined and len(self._client.outbox):
            if time.monotonic() >= deadline:
                break
            self._thread.join(timeout=0.02)
        self._stopping.set()
        self._thread.join(timeout=1.0)
        if self.error and not self._thread.is_alive():
            # A failed thread leaves the channel open, which would block the process's exit.
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
