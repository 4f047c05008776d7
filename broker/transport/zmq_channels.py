"""Channels over ZeroMQ: a ROUTER that binds for the broker, a DEALER that connects for each peer. The one door to zmq.

Every option that decides about loss, memory or patience is set here rather than left to libzmq's defaults, most of
which mean "for ever" or "without limit".
"""

import ipaddress
import socket
import threading
import time
import uuid
from collections import deque
from contextlib import suppress

import zmq

from slipstream.broker.errors import ChannelClosedError
from slipstream.broker.transport.channels import Frames

# @@ Endpoints a broker may bind: on this machine only, and not in use.
LOOPBACK_NAMES = ("localhost",)
_CALL_TIMEOUT_S = 1.0


def check_local(address: str) -> None:
    """Raises ChannelClosedError unless the address is ipc or a loopback port."""
    transport, _, place = address.partition("://")
    if transport == "ipc" or (transport == "tcp" and _is_loopback(place.rpartition(":")[0])):
        return
    raise ChannelClosedError(
        "broker.address must be a loopback or ipc endpoint (like tcp://127.0.0.1:5757 or ipc:///tmp/broker.sock), "
        f"got {address}: nothing that travels is encrypted; other machines come through a tunnel (docs/scaling.md)"
    )


def check_unused(address: str) -> None:
    """Raises ChannelClosedError when somebody answers at an ipc path.

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


def cannot_bind(address: str, reason: object) -> ChannelClosedError:
    """The error for an address that is taken."""
    return ChannelClosedError(
        f"broker.address must be free to bind, got {address}: {reason}; "
        "stop the broker that runs there, or choose another with broker.address=..."
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in LOOPBACK_NAMES


HIGH_WATER_MARK = 4096
"""Messages per peer and direction in libzmq's own queues; credit keeps real traffic far below."""
LINGER_S = 0.5
"""Time that queued frames get to leave at close, seconds."""

Options = dict[int, int | bytes]

_COMMON_OPTIONS: Options = {
    zmq.SNDHWM: HIGH_WATER_MARK,
    zmq.RCVHWM: HIGH_WATER_MARK,
    zmq.LINGER: int(LINGER_S * 1000),
    zmq.IPV6: 0,
    zmq.HANDSHAKE_IVL: 5_000,
    # A peer whose machine vanished sends no FIN: only these tell.
    zmq.HEARTBEAT_IVL: 2_000,
    zmq.HEARTBEAT_TIMEOUT: 8_000,
    zmq.HEARTBEAT_TTL: 8_000,
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 30,
    zmq.TCP_KEEPALIVE_INTVL: 10,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
_SERVER_OPTIONS: Options = _COMMON_OPTIONS | {
    # Without it a message to a peer that left is dropped in silence.
    zmq.ROUTER_MANDATORY: 1,
}
_CLIENT_OPTIONS: Options = _COMMON_OPTIONS | {
    zmq.RECONNECT_IVL: 50,
    zmq.RECONNECT_IVL_MAX: 1_000,
    # 0, so that what is in libzmq's queue when the broker dies is kept and sent to its successor; 1 would drop it.
    zmq.IMMEDIATE: 0,
}


class ZmqServerChannel:
    """The broker's end. Fulfils ServerChannel; single-threaded."""

    def __init__(self, address: str, *, max_message_bytes: int) -> None:
        """Bind. A frame above twice `max_message_bytes` closes the connection it came from.

        Twice, so that what is a little too large can be refused with a reason by whoever reads it.

        Raises ChannelClosedError when the address is not loopback or ipc, or is in use.
        """
        check_local(address)
        check_unused(address)
        self._context = zmq.Context()
        self._socket = _open(self._context, zmq.ROUTER, _SERVER_OPTIONS | {zmq.MAXMSGSIZE: 2 * max_message_bytes})
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise cannot_bind(address, error) from error
        self._address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    @property
    def address(self) -> str:
        """Where it is really bound: port 0 resolved."""
        return self._address

    def receive(self, *, timeout_s: float) -> tuple[bytes, Frames] | None:
        """(identity, frames) from some peer, or None after `timeout_s`. Raises ChannelClosedError after close."""
        _check_open(self._socket)
        if timeout_s > 0:
            self._socket.poll(_milliseconds(timeout_s), zmq.POLLIN)
        received = _receive_now(self._socket)
        return None if received is None else (received[0], received[1:])

    def send(self, identity: bytes, frames: Frames) -> bool:
        """Send to one peer. Never blocks; False when the peer is gone or cannot take more."""
        _check_open(self._socket)
        try:
            self._socket.send_multipart([identity, *frames], flags=zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise ChannelClosedError(f"the broker's socket must stay open while it is used: {error}") from error
        return True

    def close(self) -> None:
        """Unbind; what is queued gets LINGER_S to leave. May be called again."""
        self._socket.close()
        self._context.term()


class ZmqClientChannel:
    """A peer's end. Fulfils ClientChannel.

    `send` only appends to a queue and rings a bell, because a zmq socket belongs to one thread; whoever sits in
    `receive` hears the bell and moves the queue into the socket. What bounds the queue is the credit the broker grants.
    """

    def __init__(self, address: str, *, max_message_bytes: int, context: zmq.Context | None = None) -> None:
        """Connect in the background; the broker need not be there. A given context is used, not ended."""
        self._address = address
        self._options: Options = _CLIENT_OPTIONS | {zmq.MAXMSGSIZE: max_message_bytes}
        self._context = context or zmq.Context()
        self._owns_context = context is None
        self._queue: deque[Frames] = deque()
        self._is_woken = threading.Event()
        self._bell_heard, self._bell = socket.socketpair()
        self._bell_heard.setblocking(False)
        self._bell.setblocking(False)
        self._socket = self._connect()

    def send(self, frames: Frames) -> None:
        """Queue frames for the broker; any thread. They leave with the `receive` that is waiting, or the next one."""
        _check_open(self._socket)
        self._queue.append(frames)
        self._ring()

    def receive(self, *, timeout_s: float) -> Frames | None:
        """Send what is queued, then the next frames from the broker, or None after `timeout_s` or a `wake`.

        A `wake` that comes while nobody waits ends the next wait. Raises ChannelClosedError after close.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            _check_open(self._socket)
            self._flush()
            frames = _receive_now(self._socket)
            if frames is not None or self._take_wake():
                return frames
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0:
                return None
            self._wait(seconds_left)

    def wake(self) -> None:
        """End a `receive` that is waiting; any thread."""
        self._is_woken.set()
        self._ring()

    def reconnect(self) -> None:
        """Drop the connection and what is queued, take a new identity, connect again."""
        _check_open(self._socket)
        self._queue.clear()
        dropped, self._socket = self._socket, self._connect()
        dropped.close(linger=0)

    def close(self) -> None:
        """Let go; queued frames get LINGER_S to leave. May be called again."""
        if self._socket.closed:
            return
        deadline = time.monotonic() + LINGER_S
        self._flush()
        while self._queue and time.monotonic() < deadline:
            self._socket.poll(_milliseconds(deadline - time.monotonic()), zmq.POLLOUT)
            self._flush()
        self._socket.close(linger=_milliseconds(max(deadline - time.monotonic(), 0)))
        self._bell.close()
        self._bell_heard.close()
        if self._owns_context:
            self._context.term()

    def _connect(self) -> zmq.Socket:
        identity: Options = {zmq.IDENTITY: uuid.uuid4().hex.encode()}
        connected = _open(self._context, zmq.DEALER, self._options | identity)
        try:
            connected.connect(self._address)
        except zmq.ZMQError as error:
            connected.close(linger=0)
            raise ChannelClosedError(
                f"broker address must be a ZeroMQ endpoint, got {self._address}: {error}"
            ) from error
        return connected

    def _flush(self) -> None:
        """Only this thread takes from the queue, so what is seen at its head is still there when it has been sent."""
        while self._queue:
            try:
                self._socket.send_multipart(self._queue[0], flags=zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._queue.popleft()

    def _wait(self, timeout_s: float) -> None:
        """Until a message, the bell, room for what is still queued, or the time is up."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if self._queue else 0))
        poller.register(self._bell_heard, zmq.POLLIN)
        poller.poll(_milliseconds(timeout_s))
        with suppress(BlockingIOError):
            self._bell_heard.recv(4096)

    def _ring(self) -> None:
        """A bell that is full of rings (BlockingIOError) rings already; one that is gone has nobody to hear it."""
        with suppress(OSError):
            self._bell.send(b"!")

    def _take_wake(self) -> bool:
        was_woken = self._is_woken.is_set()
        self._is_woken.clear()
        return was_woken


def _open(context: zmq.Context, kind: int, options: Options) -> zmq.Socket:
    opened = context.socket(kind)
    for option, value in options.items():
        opened.setsockopt(option, value)
    return opened


def _receive_now(source: zmq.Socket) -> Frames | None:
    try:
        return source.recv_multipart(flags=zmq.NOBLOCK)
    except zmq.Again:
        return None


def _milliseconds(seconds: float) -> int:
    """Rounded up: a wait of half a millisecond must not turn into a busy loop."""
    return int(seconds * 1000) + 1


def _check_open(checked: zmq.Socket) -> None:
    if checked.closed:
        raise ChannelClosedError("a channel must not be used after close: open a new one")
