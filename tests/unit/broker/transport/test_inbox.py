import asyncio

from slipstream.broker.messages import Drain
from slipstream.broker.transport.inbox import QueueInbox, call_threadsafe


def test_queued_messages_are_forwarded_first() -> None:
    inbox, received = QueueInbox(), []
    inbox.put(Drain("first"))
    inbox.forward_to(received.append)
    inbox.put(Drain("second"))
    assert received == [Drain("first"), Drain("second")]


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
