"""Channel protocols: moving frames between processes. Implemented over ZeroMQ and, within one process, over deques.

In-memory channels: deques with the contract of the ZeroMQ channels, for the serial mode and for tests.

By default `receive` ignores `timeout_s` and returns None at once: within a single thread nothing could arrive while it
waits. The channels of `MemoryBroker.threaded()` wait for other threads, at most `timeout_s`.
"""

import threading
import uuid
from collections import deque
from collections.abc import Callable
from typing import Protocol

from slipstream.broker.errors import ChannelClosedError
from slipstream.broker.messages import Frames


class ClientChannel(Protocol):
    """A peer's end. `receive` and `close` belong to one thread; `send` and `wake` may be called from any.

    `send` and `receive` raise ChannelClosedError after `close`.
    """

    def send(self, frames: Frames) -> None:
        """Queue frames for the broker. Never blocks: they leave with a `receive` once the broker is reachable."""
        ...

    def receive(self, *, timeout_s: float) -> Frames | None:
        """Send what is queued, then return the next frames; None after `timeout_s` or a `wake`."""
        ...

    def wake(self) -> None:
        """End a blocked `receive`, or the next one to block."""
        ...

    def reconnect(self, address: str = "") -> None:
        """Drop the connection and all queued frames, then connect under a new identity, to another address if given."""
        ...

    def close(self) -> None:
        """Close the connection; queued frames get a short, bounded time to leave."""
        ...


class ServerChannel(Protocol):
    """The broker's end. Belongs to one thread. `send` and `receive` raise ChannelClosedError after `close`."""

    guest: str
    """Guest that sent what `receive` returned last; empty: somebody with the run's token."""

    def receive(self, *, timeout_s: float) -> tuple[bytes, Frames] | None:
        """Return (identity, frames) from some peer; None after `timeout_s`."""
        ...

    def send(self, identity: bytes, frames: Frames) -> bool:
        """Send to one peer. Never blocks; False if the peer is gone or its queue is full."""
        ...

    def take_refused(self) -> int:
        """Return the number of connections since the last call that were refused for want of the run's token."""
        ...

    def close(self) -> None: ...


class MemoryBroker:
    """Hub of at most one server and any number of clients."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.clients: dict[bytes, MemoryClientChannel] = {}
        self.server_channel: MemoryServerChannel | None = None
        self._is_threaded = False

    @classmethod
    def threaded(cls) -> "MemoryBroker":
        """Create a hub whose channels wait for other threads, as the ZeroMQ channels do."""
        hub = cls()
        hub._is_threaded = True
        return hub

    def server(self) -> "MemoryServerChannel":
        """Open the broker's end. Raises ChannelClosedError while another is open."""
        return MemoryServerChannel(self)

    def client(self, *, guest: str = "") -> "MemoryClientChannel":
        """Open a peer's end, of a guest if one is named; no server need be open."""
        return MemoryClientChannel(self, guest=guest)

    def wait_for(self, is_ready: Callable[[], bool], *, timeout_s: float) -> None:
        """Wait for a condition if the hub is threaded. The caller holds `changed`."""
        if self._is_threaded:
            self.changed.wait_for(is_ready, timeout=timeout_s)


class MemoryServerChannel:
    """The broker's end. Fulfils ServerChannel."""

    def __init__(self, hub: MemoryBroker) -> None:
        with hub.changed:
            if hub.server_channel is not None:
                raise ChannelClosedError("a hub must have one server at a time: close the other first")
            hub.server_channel = self
            hub.changed.notify_all()
        self._hub = hub
        self._is_closed = False
        self.guest = ""
        self.inbox: deque[tuple[bytes, Frames]] = deque()
        """(identity, frames) sent by clients and not received yet."""

    def receive(self, *, timeout_s: float) -> tuple[bytes, Frames] | None:
        with self._hub.changed:
            self._check_open()
            self._hub.wait_for(lambda: bool(self.inbox), timeout_s=timeout_s)
            if not self.inbox:
                return None
            identity, frames = self.inbox.popleft()
            client = self._hub.clients.get(identity)
            self.guest = client.guest if client else ""
            return identity, frames

    def send(self, identity: bytes, frames: Frames) -> bool:
        with self._hub.changed:
            self._check_open()
            client = self._hub.clients.get(identity)
            if client is None:
                return False
            # A copy of the list, as a socket makes one of the frames.
            client.inbox.append(list(frames))
            self._hub.changed.notify_all()
            return True

    def take_refused(self) -> int:
        return 0

    def close(self) -> None:
        """Close; unreceived frames are lost. Idempotent."""
        with self._hub.changed:
            self._is_closed = True
            if self._hub.server_channel is self:
                self._hub.server_channel = None

    def _check_open(self) -> None:
        if self._is_closed:
            raise ChannelClosedError("a channel must not be used after close: open a new one")


class MemoryClientChannel:
    """A peer's end. Fulfils ClientChannel."""

    def __init__(self, hub: MemoryBroker, *, guest: str = "") -> None:
        self._hub = hub
        self.guest = guest
        self._queue: deque[Frames] = deque()
        self._is_woken = False
        self._is_closed = False
        self._identity = b""
        self.inbox: deque[Frames] = deque()
        """Frames sent by the server and not received yet."""
        with hub.changed:
            self._join()

    def send(self, frames: Frames) -> None:
        with self._hub.changed:
            self._check_open()
            self._queue.append(list(frames))
            self._hub.changed.notify_all()

    def receive(self, *, timeout_s: float) -> Frames | None:
        with self._hub.changed:
            self._check_open()
            self._hub.wait_for(self._is_done_waiting, timeout_s=timeout_s)
            self._flush()
            if self.inbox:
                return self.inbox.popleft()
            self._is_woken = False
            return None

    def wake(self) -> None:
        with self._hub.changed:
            self._is_woken = True
            self._hub.changed.notify_all()

    def reconnect(self, address: str = "") -> None:
        """Drop all queued frames and take a new identity; a hub has one server, whatever the address."""
        with self._hub.changed:
            self._check_open()
            self._hub.clients.pop(self._identity, None)
            self._queue.clear()
            self.inbox.clear()
            self._join()

    def close(self) -> None:
        """Close; queued frames leave if a server is open. Idempotent."""
        with self._hub.changed:
            self._flush()
            self._is_closed = True
            self._hub.clients.pop(self._identity, None)

    def _join(self) -> None:
        self._identity = uuid.uuid4().hex.encode()
        self._hub.clients[self._identity] = self

    def _is_done_waiting(self) -> bool:
        self._flush()
        return bool(self.inbox) or self._is_woken

    def _flush(self) -> None:
        server = self._hub.server_channel
        if server is None or not self._queue:
            return
        while self._queue:
            server.inbox.append((self._identity, self._queue.popleft()))
        self._hub.changed.notify_all()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ChannelClosedError("a channel must not be used after close: open a new one")
