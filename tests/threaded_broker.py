"""In-memory channels that wait, for a server and peers on separate threads."""

import threading

from slipstream.broker.messages import Frames
from slipstream.broker.transport.channels import MemoryBroker, MemoryClientChannel, MemoryServerChannel, check_open


class ThreadedBroker(MemoryBroker):
    """A MemoryBroker for several threads."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = threading.Condition()

    def server(self) -> "ThreadedServer":
        with self.changed:
            self.changed.notify_all()
            return ThreadedServer(self)

    def client(self, *, guest: str = "") -> "ThreadedClient":
        with self.changed:
            return ThreadedClient(self, guest=guest)


class ThreadedServer(MemoryServerChannel):
    """The broker's end."""

    _hub: ThreadedBroker

    def receive(self, *, timeout_s: float) -> tuple[bytes, Frames] | None:
        with self._hub.changed:
            check_open(is_closed=self._is_closed)
            self._hub.changed.wait_for(lambda: bool(self.inbox), timeout=timeout_s)
            return super().receive(timeout_s=timeout_s)

    def send(self, identity: bytes, frames: Frames) -> bool:
        with self._hub.changed:
            self._hub.changed.notify_all()
            return super().send(identity, frames)

    def close(self) -> None:
        with self._hub.changed:
            super().close()


class ThreadedClient(MemoryClientChannel):
    """A peer's end."""

    _hub: ThreadedBroker
    _is_woken = False

    def send(self, frames: Frames) -> None:
        with self._hub.changed:
            super().send(frames)
            self._hub.changed.notify_all()

    def receive(self, *, timeout_s: float) -> Frames | None:
        with self._hub.changed:
            check_open(is_closed=self._is_closed)
            self._hub.changed.wait_for(self._is_done_waiting, timeout=timeout_s)
            frames = super().receive(timeout_s=timeout_s)
            self._is_woken = self._is_woken and frames is not None
            return frames

    def wake(self) -> None:
        with self._hub.changed:
            self._is_woken = True
            self._hub.changed.notify_all()

    def reconnect(self, address: str = "") -> None:
        with self._hub.changed:
            super().reconnect(address)

    def close(self) -> None:
        with self._hub.changed:
            super().close()

    def _is_done_waiting(self) -> bool:
        self._flush()
        return bool(self.inbox) or self._is_woken

    def _flush(self) -> None:
        if self._queue and self._hub.server_channel:
            super()._flush()
            self._hub.changed.notify_all()
