"""Inbox: what a BrokerClient received and its role has not handled yet, and that the BrokerClient has ended."""

import asyncio
import queue
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from slipstream.broker.errors import ClientDiedError, RefusedByBrokerError
from slipstream.broker.messages import Message, Refuse


class Inbox(Protocol):
    """What a synchronous role reads from."""

    def get(self, *, timeout_s: float) -> Message | None:
        """The next message, or None after `timeout_s`.

        Raises RefusedByBrokerError once the broker will not have us, ClientDiedError when nobody speaks with it any more.
        """
        ...


class QueueInbox:
    """Filled by the link's thread; read by `get`, or forwarded to a listener once there is one."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Message | ClientDiedError] = queue.SimpleQueue()
        self._listener: Callable[[Message | ClientDiedError], None] | None = None

    def put(self, message: Message | ClientDiedError) -> None:
        """Take a message in, or the link's end; the BrokerClient's `on_message` and `on_end`."""
        if self._listener is None:
            self._queue.put(message)
        else:
            self._listener(message)

    def get(self, *, timeout_s: float) -> Message | None:
        """See Inbox."""
        message = self._take(timeout_s=timeout_s)
        if isinstance(message, Refuse):
            raise RefusedByBrokerError(message.reason)
        if isinstance(message, ClientDiedError):
            raise message
        return message

    def forward_to(self, listener: Callable[[Message | ClientDiedError], None]) -> None:
        """Hand everything kept, then everything new, to `listener` (on the link's thread)."""
        self._listener = listener
        while (message := self._take(timeout_s=0)) is not None:
            listener(message)

    def _take(self, *, timeout_s: float) -> Message | ClientDiedError | None:
        try:
            return self._queue.get(timeout=timeout_s) if timeout_s > 0 else self._queue.get_nowait()
        except queue.Empty:
            return None


def call_threadsafe(loop: asyncio.AbstractEventLoop, call: Callable[[Any], object], argument: object) -> None:
    """Have `loop` make the call soon; for any thread, and for signal handlers.

    Does nothing once the loop is closed: while a role empties its outbox, messages and signals still come, and nobody
    is left whom they could concern.
    """
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call, argument)
