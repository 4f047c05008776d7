"""Channels inside one process: deques with the contract of the ZeroMQ ones. For the serial mode and for tests.

By default a `receive` does not wait: in a single thread nothing could arrive meanwhile, so `timeout_s` is ignored and
None comes at once. The channels of `MemoryBroker.threaded()` wait for other threads, at most `timeout_s`.
"""

import threading
import uuid
from collections import deque
from collections.abc import Callable

from slipstream.broker.errors import ChannelClosedError
from slipstream.broker.transport.channels import Frames


class MemoryBroker:
    """The hub: at most one server, any number of clients."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.clients: dict[bytes, MemoryClientChannel] = {}
        self.listener: MemoryServerChannel | None = None
        self._is_threaded = False

    @classmethod
    def threaded(cls) -> "MemoryBroker":
        """A hub whose channels wait for other threads, as the ZeroMQ ones do."""
        hub = cls()
        hub._is_threaded = True
        return hub

    def server(self) -> "MemoryServerChannel":
        """The broker's end. Raises ChannelClosedError while another is open."""
        return MemoryServerChannel(self)

    def client(self) -> "MemoryClientChannel":
        """A peer's end; the server need not be there."""
        return MemoryClientChannel(self)

    def await_that(self, is_ready: Callable[[], bool], *, timeout_s: float) -> None:
        """Wait as this hub waits. The caller holds `changed`."""
        if self._is_threaded:
            self.changed.wait_for(is_ready, timeout=timeout_s)


class MemoryServerChannel:
    """The broker's end. Fulfils ServerChannel."""

    def __init__(self, hub: MemoryBroker) -> None:
        with hub.changed:
            if hub.listener is not None:
                raise ChannelClosedError("a hub must have one server at a time: close the other first")
            hub.listener = self
            hub.changed.notify_all()
        self._hub = hub
        self._is_closed = False
        self.inbox: deque[tuple[bytes, Frames]] = deque()
        """What clients have sent."""

    def receive(self, *, timeout_s: float) -> tuple[bytes, Frames] | None:
        """(identity, frames) from some peer, or None. Raises ChannelClosedError after close."""
        with self._hub.changed:
            self._check_open()
            self._hub.await_that(lambda: bool(self.inbox), timeout_s=timeout_s)
            return self.inbox.popleft() if self.inbox else None

    def send(self, identity: bytes, frames: Frames) -> bool:
        """Send to one peer. False when it is gone."""
        with self._hub.changed:
            self._check_open()
            client = self._hub.clients.get(identity)
            if client is None:
                return False
            client.inbox.append(list(frames))
            self._hub.changed.notify_all()
            return True

    def close(self) -> None:
        """Let go; what was not received is lost. May be called again."""
        with self._hub.changed:
            self._is_closed = True
            if self._hub.listener is self:
                self._hub.listener = None

    def _check_open(self) -> None:
        if self._is_closed:
            raise ChannelClosedError("a channel must not be used after close: open a new one")


class MemoryClientChannel:
    """A peer's end. Fulfils ClientChannel."""

    def __init__(self, hub: MemoryBroker) -> None:
        self._hub = hub
        self._queue: deque[Frames] = deque()
        self._is_woken = False
        self._is_closed = False
        self._identity = b""
        self.inbox: deque[Frames] = deque()
        """What the server has sent."""
        with hub.changed:
            self._join()

    def send(self, frames: Frames) -> None:
        """Queue frames for the broker; any thread. They leave with the `receive` that is waiting, or the next one."""
        with self._hub.changed:
            self._check_open()
            self._queue.append(list(frames))
            self._hub.changed.notify_all()

    def receive(self, *, timeout_s: float) -> Frames | None:
        """Send what is queued, then the next frames, or None. Raises ChannelClosedError after close."""
        with self._hub.changed:
            self._check_open()
            self._hub.await_that(self._is_done_waiting, timeout_s=timeout_s)
            self._flush()
            if self.inbox:
                return self.inbox.popleft()
            self._is_woken = False
            return None

    def wake(self) -> None:
        """End a `receive` that is waiting, or the next wait; any thread."""
        with self._hub.changed:
            self._is_woken = True
            self._hub.changed.notify_all()

    def reconnect(self) -> None:
        """Drop what is queued, take a new identity."""
        with self._hub.changed:
            self._check_open()
            self._hub.clients.pop(self._identity, None)
            self._queue.clear()
            self.inbox.clear()
            self._join()

    def close(self) -> None:
        """Let go; queued frames leave if a server is there. May be called again."""
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
        listener = self._hub.listener
        if listener is None or not self._queue:
            return
        while self._queue:
            listener.inbox.append((self._identity, self._queue.popleft()))
        self._hub.changed.notify_all()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ChannelClosedError("a channel must not be used after close: open a new one")
