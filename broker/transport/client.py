"""BrokerClient: a peer's end of the protocol, kept joined through losses of the broker.

Consumes: messages from the broker, messages and trajectories from its own role.
Produces: Hello until Welcome, Pong for every Ping, every trajectory until its Ack.
Waits for: nothing; `step` returns within its timeout.
Invariant: a trajectory leaves the outbox only by Ack or fatal Nack.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import structlog

from slipstream.broker.errors import ChannelClosedError, ClientDiedError, RefusedByBrokerError
from slipstream.broker.messages import (
    Ack,
    AnyMessage,
    Bye,
    Hello,
    Members,
    Message,
    Nack,
    OpenEpoch,
    Ping,
    Pong,
    Put,
    Refuse,
    Update,
    Welcome,
)
from slipstream.broker.partial_decode import RefuseHeader, decode_header
from slipstream.broker.transport.channels import ClientChannel, Frames
from slipstream.broker.transport.outbox import Outbox
from slipstream.buffer.codec import chunks, decode, encode
from slipstream.buffer.errors import RecordRefusedError
from slipstream.buffer.trajectory import Record, TrajectoryHeader
from slipstream.configs.broker import BROKER_SILENCE_S
from slipstream.runtime.clock import Clock

_HELLO_EVERY_S = 1.0
_REASON_CHARACTERS = 1000

log = structlog.get_logger(__name__)


class PeerStatus(Record):
    """What a Pong says of its sender."""

    state: str
    """Pong.state."""
    version: int = -1
    """Pong.version."""
    reason: str = ""
    """Pong.reason."""
    gauges: dict[str, Any] = {}
    """Pong.gauges."""
    lease_ids: list[str] = []
    """Pong.lease_ids."""


class BrokerClient:
    """Session or joining. `step` belongs to one thread (BrokerClientThread, or the serial run's), the rest to any.

    Life: (Hello -> Welcome -> traffic -> silence or Bye)* -> close. After a silence of `BROKER_SILENCE_S` it connects
    anew; each Welcome sends the outbox again, which the store's idempotent insert makes safe.
    """

    def __init__(
        self,
        channel: ClientChannel,
        *,
        hello: Hello,
        status: Callable[[], PeerStatus],
        on_message: Callable[[Message], None],
        on_end: Callable[[ClientDiedError], None] = lambda _: None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`on_end` hears when nobody will speak for this link any more."""
        self._channel = channel
        self._hello = hello
        self._status = status
        self._on_message = on_message
        self.on_end = on_end
        self._clock = clock
        self._heard_at = clock()
        self._next_hello_at = clock()
        self._welcomed = threading.Event()
        self._order: Message | None = None
        self._order_may_be_lost = False
        self.outbox = Outbox(clock=clock)
        """Trajectories the store does not have yet."""
        self.welcome: Welcome | None = None
        """The newest Welcome."""
        self.refusal: str = ""
        """Why the broker will not have us; empty while it may."""

    @property
    def is_joined(self) -> bool:
        """Whether the broker knows us, as far as we know."""
        return self._welcomed.is_set()

    def send(self, message: Message) -> None:
        """Queue a message; lost if the broker dies before passing it on, but for orders about weights, said again."""
        if isinstance(message, OpenEpoch | Update):
            self._order, self._order_may_be_lost = message, False
        self._channel.send([encode(message)])
        self._channel.wake()

    def put(self, header: TrajectoryHeader, payload: bytes) -> None:
        """Take a finished trajectory into the outbox; it is sent while there is credit, again until acknowledged."""
        self.outbox.add(header, payload)
        self._channel.wake()

    def report(self) -> None:
        """Tell the broker our status now, without waiting for its Ping."""
        if self.is_joined:
            self.send(self._pong(sent_at=-1.0))

    def step(self, *, timeout_s: float) -> None:
        """Say Hello when due, send what credit allows, handle what has arrived; blocks at most `timeout_s`."""
        self._stay_joined()
        self._send_outbox()
        frames = self._channel.receive(timeout_s=timeout_s)
        while frames is not None:
            self._heard_at = self._clock()
            self._handle(frames)
            frames = self._channel.receive(timeout_s=0)
        self._send_outbox()

    def close(self, *, reason: str = "") -> None:
        """Say Bye, with the reason of a role that cannot go on, and let go."""
        try:
            if self.is_joined:
                self._channel.send([encode(Bye(reason[:_REASON_CHARACTERS]))])
                self._channel.receive(timeout_s=0)
        finally:
            self._channel.close()

    def be_refused(self, refuse: Refuse) -> None:
        """The broker will not have us, or cannot be understood: the role hears it and ends."""
        self.refusal = refuse.reason
        self._on_message(refuse)

    def _stay_joined(self) -> None:
        now = self._clock()
        if self.is_joined and now - self._heard_at > BROKER_SILENCE_S:
            self._welcomed.clear()
            self._channel.reconnect()
        if not self.is_joined and not self.refusal and now >= self._next_hello_at:
            self._next_hello_at = now + _HELLO_EVERY_S
            self._channel.send([encode(self._hello)])

    def _send_outbox(self) -> None:
        if self.is_joined:
            for chunk in chunks(self.outbox.take_sendable()):
                put = Put([header for header, _ in chunk])
                self._channel.send([encode(put), *(payload for _, payload in chunk)])

    def _handle(self, frames: Frames) -> None:
        message = _read(frames)
        match message:
            case Ping(sent_at=sent_at):
                self._channel.send([encode(self._pong(sent_at=sent_at))])
            case Ack(ids=ids):
                self.outbox.acknowledge(ids)
            case Welcome():
                self._enter(message)
            case Bye() if self.is_joined:  # from a broker that does not know us: one that was started again
                self._welcomed.clear()
                self._next_hello_at = self._clock()
            case Refuse():
                self.be_refused(message)
            case Nack():
                self.outbox.reject(message)
                self._on_message(message)
            case Members() if self._order_may_be_lost and self._order:
                # To whoever is back by now. The learner's own thread cannot: it waits inside the broadcast.
                self._channel.send([encode(self._order)])
                self._on_message(message)
            case Bye():
                return
            case _:
                self._on_message(message)

    def _enter(self, welcome: Welcome) -> None:
        if self.is_joined and self.welcome and self.welcome.broker_incarnation == welcome.broker_incarnation:
            return
        self._order_may_be_lost = self.welcome is not None
        self.welcome = welcome
        self.outbox.set_credit(messages=welcome.credit_messages, size_bytes=welcome.credit_bytes)
        self.outbox.resend_all()
        self._welcomed.set()
        self._on_message(welcome)
        self._channel.send([encode(self._pong(sent_at=-1.0))])

    def _pong(self, *, sent_at: float) -> Pong:
        status = self._status()
        return Pong(
            sent_at=sent_at,
            state=status.state,  # type: ignore[arg-type]
            version=status.version,
            reason=status.reason,
            gauges=status.gauges,
            lease_ids=status.lease_ids,
        )


def _read(frames: Frames) -> Message:
    """Raises RefusedByBrokerError."""
    try:
        message: Message = decode(frames[0], AnyMessage)  # type: ignore[arg-type]
    except RecordRefusedError as refusal:
        # A newer broker's refusal may hold more than we know of, but its reason is for people.
        if refuse := decode_header(frames, RefuseHeader):
            return Refuse(refuse.reason)
        raise RefusedByBrokerError(
            f"the broker must speak this version's language, got something that is {refusal}: run the same version of "
            "Slipstream on both sides, and look what listens at its address."
        ) from refusal
    return message


class BrokerClientThread:
    """Steps a BrokerClient on a thread of its own, so that a busy role still answers pings."""

    def __init__(self, link: BrokerClient) -> None:
        self._link = link
        self._reason = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self.error: BaseException | None = None
        """What ended the thread, if it ended by itself."""

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, *, flush_s: float = 0.0, reason: str = "") -> None:
        """Give the outbox `flush_s` seconds to empty, say Bye, end; blocks no longer than that plus a second.

        `reason` is what the broker hears of a role that cannot go on.
        """
        self._reason = reason
        ends_at = time.monotonic() + flush_s
        while (
            self._thread.is_alive() and self._link.is_joined and len(self._link.outbox) and time.monotonic() < ends_at
        ):
            self._thread.join(timeout=0.02)
        self._stopping.set()
        self._thread.join(timeout=1.0)
        if self.error and not self._thread.is_alive():
            # Left open, so that the role could still be told and speak; a socket that nobody closes keeps a process.
            with suppress(ChannelClosedError):
                self._link.close(reason=reason)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._link.step(timeout_s=0.2)
            self._link.close(reason=self._reason)
        except RefusedByBrokerError as refusal:
            self.error = refusal
            self._link.be_refused(Refuse(str(refusal)))
        except Exception as error:
            log.error("link_died", exc_info=error)
            self.error = ClientDiedError(f"the link to the broker ended: {type(error).__name__}: {error}")
            self._link.on_end(self.error)
