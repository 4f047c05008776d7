import asyncio
import queue
import threading

import pytest

from slipstream.broker.messages import Drain
from slipstream.broker.transport.session import QueueInbox, call_threadsafe


def test_queued_messages_are_forwarded_first() -> None:
    inbox, received = QueueInbox(), []
    inbox.put(Drain("first"))
    inbox.forward_to(received.append)
    inbox.put(Drain("second"))
    assert received == [Drain("first"), Drain("second")]


def test_a_message_that_arrives_while_a_listener_begins_is_forwarded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    arriving, goes_on = threading.Event(), threading.Event()

    class SlowQueue(queue.SimpleQueue):
        def put(self, message: Drain) -> None:
            arriving.set()
            goes_on.wait(1)
            super().put(message)

    monkeypatch.setattr(queue, "SimpleQueue", SlowQueue)
    inbox, received = QueueInbox(), []
    putting = threading.Thread(target=inbox.put, args=(Drain("now"),))
    beginning = threading.Thread(target=inbox.forward_to, args=(received.append,))
    putting.start()
    assert arriving.wait(5)
    beginning.start()
    beginning.join(0.05)
    goes_on.set()
    for thread in (putting, beginning):
        thread.join(5)
    assert received == [Drain("now")]


def test_a_running_loop_makes_the_call() -> None:
    received: list[str] = []

    async def listen() -> None:
        call_threadsafe(asyncio.get_running_loop(), received.append, "drain")
        await asyncio.sleep(0)

    asyncio.run(listen())
    assert received == ["drain"]


def test_a_call_on_a_closed_loop_does_nothing() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    received: list[str] = []
    call_threadsafe(loop, received.append, "drain")
    assert received == []
