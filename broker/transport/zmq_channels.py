"""ZeroMQ channels: a ROUTER bound by the broker, a DEALER connected by each peer.

Every socket, unix sockets included, uses CURVE, which encrypts and authenticates both ends with keys derived from the
run's token. Before authentication libzmq keeps one frame per connection, so frames above PIECE_BYTES are sent in
pieces.

Options that affect loss, memory or timeouts are explicit: most defaults are "forever" or "unlimited".
"""

import socket
import threading
import time
import uuid
from collections import deque
from contextlib import suppress
from ipaddress import IPv4Network
from itertools import accumulate, chain, pairwise
from types import SimpleNamespace
from typing import Annotated

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from slipstream.broker.errors import ChannelClosedError
from slipstream.broker.messages import Frames
from slipstream.broker.transport.channels import check_open
from slipstream.broker.transport.endpoints import (
    PROBE_TIMEOUT_S,
    bind_error,
    check_reach,
    check_unused,
    remove_path,
    speaks_curve,
    tcp_endpoints,
)
from slipstream.configs.cluster import ClusterConfig
from slipstream.runtime.credentials import Keys

PIECE_BYTES = 64 * 1024
"""Maximum frame to a server: the memory that an unauthenticated connection can occupy."""


def in_pieces(frames: Frames) -> Frames:
    """Split a message with a frame above PIECE_BYTES: an empty frame, the piece count of each frame, the pieces."""
    # A header is never empty, so the empty frame is unambiguous.
    if all(len(frame) <= PIECE_BYTES for frame in frames):
        return frames
    split = [[frame[at : at + PIECE_BYTES] for at in range(0, len(frame), PIECE_BYTES)] or [frame] for frame in frames]
    return [b"", msgspec.msgpack.encode([len(pieces) for pieces in split]), *chain.from_iterable(split)]


def assembled(frames: Frames) -> Frames:
    """Undo `in_pieces`. Inconsistent messages stay unchanged, and are refused for their empty header."""
    if len(frames) < 2 or frames[0]:
        return frames
    try:
        counts = msgspec.msgpack.decode(frames[1], type=list[Annotated[int, msgspec.Meta(ge=1)]])
    except msgspec.MsgspecError:
        return frames
    ends = list(accumulate(counts, initial=2))
    return [b"".join(frames[start:end]) for start, end in pairwise(ends)] if ends[-1] == len(frames) else frames


# --- sockets ---------------------------------------------------------------------------------------------------------
HIGH_WATER_MARK = 4096
"""Messages per peer and direction, far above the credit."""
LINGER_S = 0.5
"""Time that `close` waits for queued frames."""

Options = dict[int, int | bytes]

_COMMON_OPTIONS: Options = {
    zmq.SNDHWM: HIGH_WATER_MARK,
    zmq.RCVHWM: HIGH_WATER_MARK,
    zmq.LINGER: int(LINGER_S * 1000),
    zmq.IPV6: 0,
    zmq.HANDSHAKE_IVL: 5_000,
    # Detect a machine that lost power or network and sends no FIN.
    zmq.HEARTBEAT_IVL: 2_000,
    zmq.HEARTBEAT_TIMEOUT: 8_000,
    zmq.HEARTBEAT_TTL: 8_000,
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 30,
    zmq.TCP_KEEPALIVE_INTVL: 10,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
_SERVER_OPTIONS: Options = _COMMON_OPTIONS | {
    # Report undeliverable messages instead of dropping them silently.
    zmq.ROUTER_MANDATORY: 1
}
_CLIENT_OPTIONS: Options = _COMMON_OPTIONS | {
    zmq.RECONNECT_IVL: 50,
    zmq.RECONNECT_IVL_MAX: 1_000,
    # 0 keeps queued frames for a broker's successor; 1 would drop them.
    zmq.IMMEDIATE: 0,
}


BROKER_ADDRESS = "broker.address"
_ZAP_DOMAIN = "slipstream"
_CURVE_BYTES = 64
"""Upper bound on the bytes that encryption adds to a frame."""


def _client_options(keys: Keys) -> Options:
    return _CLIENT_OPTIONS | {
        zmq.CURVE_SERVERKEY: keys.server_public,
        zmq.CURVE_PUBLICKEY: keys.client_public,
        zmq.CURVE_SECRETKEY: keys.client_secret,
    }


def _server_options(keys: Keys) -> Options:
    return _SERVER_OPTIONS | {
        zmq.CURVE_SERVER: 1,
        zmq.CURVE_SECRETKEY: keys.server_secret,
        # Without an authenticator, libzmq accepts every client that knows the server's key.
        zmq.ZAP_DOMAIN: _ZAP_DOMAIN.encode(),
        zmq.ZAP_ENFORCE_DOMAIN: 1,
        zmq.MAXMSGSIZE: PIECE_BYTES + _CURVE_BYTES,
    }


def check_free(address: str, *, network: IPv4Network | None = None) -> None:
    """Raise ChannelClosedError unless a broker can bind the address."""
    check_reach(address, setting=BROKER_ADDRESS, network=network)
    check_unused(address, setting=BROKER_ADDRESS)
    with zmq.Context() as context, _open(context, zmq.ROUTER, _SERVER_OPTIONS | {zmq.LINGER: 0}) as probe:
        try:
            probe.bind(address)
        except zmq.ZMQError as error:
            raise bind_error(address, error, setting=BROKER_ADDRESS) from error
        remove_path(address)


def is_refused(address: str, keys: Keys) -> bool:
    """Whether a CURVE server refuses these keys, which closes the connection; blocks at most three seconds."""
    if not speaks_curve(address):
        return False
    with zmq.Context() as context, _open(context, zmq.DEALER, _client_options(keys) | {zmq.LINGER: 0}) as probe:
        monitor = probe.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        probe.connect(address)
        event = recv_monitor_message(monitor)["event"] if monitor.poll(_milliseconds(PROBE_TIMEOUT_S)) else None
        probe.disable_monitor()
        monitor.close(linger=0)
    return bool(event == zmq.EVENT_DISCONNECTED)


class ZmqServerChannel:
    """The broker's end. Implements ServerChannel; single-threaded."""

    def __init__(
        self, address: str, *, keys: Keys, setting: str = BROKER_ADDRESS, network: IPv4Network | None = None
    ) -> None:
        """Bind the address, the value of `setting`; accept only matching keys.

        Raises ChannelClosedError if it is in use, or is neither ipc nor loopback nor in `network`.
        """
        check_reach(address, setting=setting, network=network)
        check_unused(address, setting=setting)
        self._path = self.address = ""
        """Bound endpoint, with the actual port; after `bind`, the endpoint for other machines."""
        self._guests = {key.decode(): name for key, name in keys.guests.items()}
        self.guest = ""
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        # Admit the run's client key and the guests' keys.
        expected = {keys.client_public, *keys.guests}
        provider = SimpleNamespace(callback=lambda _domain, key: key in expected)
        self._authenticator.configure_curve_callback(domain=_ZAP_DOMAIN, credentials_provider=provider)
        self._socket = _open(self._context, zmq.ROUTER, _server_options(keys))
        refusals = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        self._refusals = self._socket.get_monitor_socket(refusals)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise bind_error(address, error, setting=setting) from error
        self.address = self._path = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def bind(self, endpoint: str) -> bool:
        """Also listen at an endpoint; False if it is in use. Raises ChannelClosedError."""
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                return False
            raise ChannelClosedError(f"cluster.ports must be ports to bind, got {endpoint}: {error}") from error
        self.address = endpoint
        return True

    def receive(self, *, timeout_s: float) -> tuple[bytes, Frames] | None:
        check_open(is_closed=self._socket.closed)
        if timeout_s > 0:
            self._socket.poll(_milliseconds(timeout_s), zmq.POLLIN)
        received = self._receive_now()
        return None if received is None else (received[0], assembled(received[1:]))

    def _receive_now(self) -> Frames | None:
        if not self._guests:
            return _receive_now(self._socket)
        try:
            identity = self._socket.recv(flags=zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        # The authenticator sets User-Id to the connection's key, which the client cannot forge.
        self.guest = self._guests.get(str(identity.get("User-Id")), "")
        return [identity.bytes, *self._socket.recv_multipart(flags=zmq.NOBLOCK)]

    def send(self, identity: bytes, frames: Frames) -> bool:
        check_open(is_closed=self._socket.closed)
        try:
            self._socket.send_multipart([identity, *frames], flags=zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise ChannelClosedError(f"the broker's socket must stay open while it is used: {error}") from error
        return True

    def take_refused(self) -> int:
        number = 0
        while number < HIGH_WATER_MARK and self._refusals.poll(0):
            recv_monitor_message(self._refusals)
            number += 1
        return number

    def close(self) -> None:
        if self._socket.closed:
            return
        # Before closing: afterwards the path may belong to another broker.
        remove_path(self._path)
        self._socket.disable_monitor()
        self._refusals.close(linger=0)
        self._socket.close()
        self._authenticator.stop()
        self._context.term()


class ZmqClientChannel:
    """A peer's end. Implements ClientChannel.

    A ZeroMQ socket belongs to one thread, so `send` appends to a queue, bounded by the credit, and wakes the thread in
    `receive`, which sends the queue, through a socket pair.
    """

    def __init__(self, address: str, *, keys: Keys, max_message_bytes: int) -> None:
        """Connect in the background; the broker may start later."""
        self._address = address
        self._options: Options = _client_options(keys) | {zmq.MAXMSGSIZE: max_message_bytes}
        self._context = zmq.Context()
        self._queue: deque[Frames] = deque()
        self._is_woken = threading.Event()
        self._is_notified = False
        self._wakeup_receiver, self._wakeup_sender = socket.socketpair()
        self._wakeup_receiver.setblocking(False)
        self._wakeup_sender.setblocking(False)
        self._socket = self._connect()

    def send(self, frames: Frames) -> None:
        check_open(is_closed=self._socket.closed)
        self._queue.append(in_pieces(frames))
        self._notify()

    def receive(self, *, timeout_s: float) -> Frames | None:
        deadline = time.monotonic() + timeout_s
        while True:
            check_open(is_closed=self._socket.closed)
            self._flush()
            frames = _receive_now(self._socket)
            if frames is not None:
                return frames
            # Clear only if set, so that a `wake` in between is not lost.
            if self._is_woken.is_set():
                self._is_woken.clear()
                return None
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0:
                return None
            self._wait(seconds_left)

    def wake(self) -> None:
        self._is_woken.set()
        self._notify()

    def reconnect(self, address: str = "") -> None:
        check_open(is_closed=self._socket.closed)
        self._queue.clear()
        self._address = address or self._address
        dropped, self._socket = self._socket, self._connect()
        # When moving, let the old broker receive the last frames, such as Bye.
        dropped.close(linger=_milliseconds(LINGER_S) if address else 0)

    def close(self) -> None:
        if self._socket.closed:
            return
        # libzmq lingers only for its own queue, so move this one there.
        deadline = time.monotonic() + LINGER_S
        self._flush()
        while self._queue and time.monotonic() < deadline:
            self._socket.poll(_milliseconds(deadline - time.monotonic()), zmq.POLLOUT)
            self._flush()
        self._socket.close(linger=_milliseconds(max(deadline - time.monotonic(), 0)))
        self._wakeup_sender.close()
        self._wakeup_receiver.close()
        self._context.term()

    def _connect(self) -> zmq.Socket:
        # Random per connection: a ROUTER refuses the identity of a connection that it still holds.
        identity: Options = {zmq.IDENTITY: uuid.uuid4().hex.encode()}
        connected = _open(self._context, zmq.DEALER, self._options | identity)
        try:
            connected.connect(self._address)
        except zmq.ZMQError as error:
            connected.close(linger=0)
            got = f"{self._address}: {error}"
            raise ChannelClosedError(f"broker address must be a ZeroMQ endpoint, got {got}") from error
        return connected

    def _flush(self) -> None:
        # Only this thread removes from the queue, so its head is stable.
        while self._queue:
            try:
                self._socket.send_multipart(self._queue[0], flags=zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return  # at the high-water mark; `_wait` polls for room
            self._queue.popleft()

    def _wait(self, timeout_s: float) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if self._queue else 0))
        poller.register(self._wakeup_receiver, zmq.POLLIN)
        poller.poll(_milliseconds(timeout_s))
        with suppress(BlockingIOError):
            self._wakeup_receiver.recv(4096)
        # Reset before the queue is read: a thread that appends later notifies again.
        self._is_notified = False

    def _notify(self) -> None:
        if not self._is_notified:
            self._is_notified = True
            # The socket pair may be closed.
            with suppress(OSError):
                self._wakeup_sender.send(b"\0")


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
    # Round up: half a millisecond must not become a busy loop.
    return int(seconds * 1000) + 1


def listen(
    address: str, *, keys: Keys, cluster: ClusterConfig, setting: str = BROKER_ADDRESS, previous: str = ""
) -> ZmqServerChannel:
    """Open a server at the address, the value of `setting`. Raises ConfigError, ChannelClosedError.

    With an interface in `cluster`, an ipc server also listens at the first free one of `tcp_endpoints`.
    """
    is_shared = cluster.network is not None and address.startswith("ipc://")
    endpoints = tcp_endpoints(cluster, previous=previous) if is_shared else []
    channel = ZmqServerChannel(address, keys=keys, setting=setting, network=cluster.network)
    try:
        if endpoints and not any(map(channel.bind, endpoints)):
            got = f"{endpoints[0]} to {endpoints[-1]}, all of them in use"
            raise ChannelClosedError(f"cluster.ports must have a free port, got {got}: name a wider range.")
    except ChannelClosedError:
        channel.close()
        raise
    return channel
