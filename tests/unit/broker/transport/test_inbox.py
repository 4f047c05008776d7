import asyncio

from slipstream.broker.messages import Drain
from slipstream.broker.transport.inbox import QueueInbox, call_threadsafe


def test_what_came_before_the_listener_is_handed_to_it_first() -> None:
    inbox, heard = QueueInbox(), []
    inbox.put(Drain("first"))
    inbox.forward_to(heard.append)
    inbox.put(Drain("second"))
    assert heard == [Drain("first"), Drain("second")]


def test_a_running_loop_makes_the_call() -> None:
    heard: list[str] = []

    async def listen() -> None:
        call_threadsafe(asyncio.get_running_loop(), heard.append, "drain")
        await asyncio.sleep(0)

    asyncio.run(listen())
    assert heard == ["drain"]


def test_a_message_or_signal_after_the_end_of_the_loop_does_no_harm() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    heard: list[str] = []
    call_threadsafe(loop, heard.append, "drain")
    assert heard == []
