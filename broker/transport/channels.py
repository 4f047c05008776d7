"""Channels between processes: protocols, and in-memory channels for serial mode and tests.

These never wait, because nothing can arrive while a single thread waits.
"""

import uuid
from collections import deque
from typing import Protocol

from slipstream.broker.errors import ChannelClosedError
from slipstream.broker.messages import Frames


class ClientChannel(Protocol):
    """A peer's end. `receive` and `close` belong to one thread; any thread may call `send` and `wake`.

    `send` and `receive` raise ChannelClosedError after `close`.
    """

    def send(self, frames: Frames) -> None:
        """Queue frames without blocking; `receive` sends them once the broker is reachable."""

    def receive(self, *, timeout_s: float) -> Frames | None:
        """Send queued frames, then return the next received; None after `timeout_s` or a `wake`."""

    def wake(self) -> None:
        """Unblock the current or next `receive`."""

    def reconnect(self, address: str = "") -> None:
        """Drop connection and queued frames; connect with a new identity, to `address` if given."""

    def close(self) -> None:
        """Close, after a short, bounded time for sending queued frames."""


class ServerChannel(Protocol):
    """The broker's end. Belongs to one thread. `send` and `receive` raise ChannelClosedError after `close`."""

    guest: str
    """Guest that sent the last received message; empty for a peer with the run's token."""

    def receive(self, *, timeout_s: float) -> tuple[bytes, Frames] | None:
        """(identity, frames) from any peer; None after `timeout_s`."""

    def send(self, identity: bytes, frames: Frames) -> bool:
        """Send without blocking; False if the peer is gone or its queue is full."""

    def take_refused(self) -> int:
        """Connections refused since the last call for lack of a valid token."""

    def close(self) -> None: ...


def check_open(*, is_closed: bool) -> None:
    """Raise ChannelClosedError for a closed channel."""
    if is_closed:
        raise ChannelClosedError("a channel must not be used after close: open a new one")


class MemoryBroker:
    """Hub of at most one server and any number of clients. Belongs to one thread."""

    def __init__(self) -> None:
        self.clients: dict[bytes, MemoryClientChannel] = {}
        self.server_channel: MemoryServerChannel | None = None

    def server(self) -> "MemoryServerChannel":
        """Open the broker's end. Raises ChannelClosedError while another is open."""
        return MemoryServerChannel(self)

    def client(self, *, guest: str = "") -> "MemoryClientChannel":
        return MemoryClientChannel(self, guest=guest)


class MemoryServerChannel:
    """The broker's end. Implements ServerChannel."""

    def __init__(self, hub: MemoryBroker) -> None:
        if hub.server_channel is not None:
            raise ChannelClosedError("a hub must have one server at a time: close the other first")
        hub.server_channel = self
        self._hub = hub
        self._is_closed = False
        self.guest = ""
        self.inbox: deque[tuple[bytes, Frames]] = deque()

    def receive(self, *, timeout_s: float) -> tuple[bytes, Frames] | None:
        check_open(is_closed=self._is_closed)
        if not self.inbox:
            return None
        identity, frames = self.inbox.popleft()
        client = self._hub.clients.get(identity)
        self.guest = client.guest if client else ""
        return identity, frames

    def send(self, identity: bytes, frames: Frames) -> bool:
        check_open(is_closed=self._is_closed)
        client = self._hub.clients.get(identity)
        if client is None:
            return False
        # Copied, as by a socket.
        client.inbox.append(list(frames))
        return True

    def take_refused(self) -> int:
        return 0

    def close(self) -> None:
        self._is_closed = True
        if self._hub.server_channel is self:
            self._hub.server_channel = None


class MemoryClientChannel:
    """A peer's end. Implements ClientChannel."""

    def __init__(self, hub: MemoryBroker, *, guest: str = "") -> None:
        self._hub = hub
        self.guest = guest
        self._queue: deque[Frames] = deque()
        self._is_closed = False
        self._identity = b""
        self.inbox: deque[Frames] = deque()
        self._join()

    def send(self, frames: Frames) -> None:
        check_open(is_closed=self._is_closed)
        self._queue.append(list(frames))

    def receive(self, *, timeout_s: float) -> Frames | None:
        check_open(is_closed=self._is_closed)
        self._flush()
        return self.inbox.popleft() if self.inbox else None

    def wake(self) -> None:
        """Do nothing: no `receive` waits."""

    def reconnect(self, address: str = "") -> None:
        """Drop all queued frames and take a new identity; a hub has one server."""
        check_open(is_closed=self._is_closed)
        self._hub.clients.pop(self._identity, None)
        self._queue.clear()
        self.inbox.clear()
        self._join()

    def close(self) -> None:
        self._flush()
        self._is_closed = True
        self._hub.clients.pop(self._identity, None)

    def _join(self) -> None:
        self._identity = uuid.uuid4().hex.encode()
        self._hub.clients[self._identity] = self

    def _flush(self) -> None:
        server = self._hub.server_channel
        while server and self._queue:
            server.inbox.append((self._identity, self._queue.popleft()))
