"""Inbox: messages that a BrokerClient received and its role has not handled yet."""

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from slipstream.broker.errors import ClientDiedError, RefusedByBrokerError
from slipstream.broker.messages import Message, Refuse


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
