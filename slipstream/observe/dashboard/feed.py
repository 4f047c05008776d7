"""Feed: sends the changes of a run to clients as server-sent events."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anyio
import msgspec
from anyio.to_thread import run_sync

from slipstream.observe.dashboard.viewed_run import ViewedRun

_ROWS_EVERY_S = 0.25
_VIEW_EVERY_S = 1.0
_MAX_ROWS = 200
"""Rows per message; a client further behind reads the columns again."""
_QUEUE_LENGTH = 64
"""Queued messages at which a slow client is disconnected."""

Message = dict[str, str]


class Feed:
    """Feed of one run, in the event loop.

    Messages: `rows` (first index, rows), `reset` (rows must be read again), `view` (RunView), `events` (all events).
    A client resumes at the id `<generation>.<number of rows>` of its last message.
    """

    def __init__(self, reader: ViewedRun) -> None:
        self.reader = reader
        self._queues: set[asyncio.Queue[Message | None]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._lock = asyncio.Lock()
        self._events = b""

    async def refresh(self) -> None:
        async with self._lock:
            generation = self.reader.table.generation
            rows = await run_sync(self.reader.poll)
            if self.reader.table.generation != generation:
                self._send(self._reset())
            elif rows:
                self._send(self._rows(rows) if len(rows) <= _MAX_ROWS else self._reset())

    async def messages(self, position: str, *, ending: anyio.Event) -> AsyncIterator[Message]:
        """Yield messages until `ending` is set. `position`: id of the client's last message, or empty."""
        queue: asyncio.Queue[Message | None] = asyncio.Queue(_QUEUE_LENGTH)
        await self.refresh()
        # No await from here on: no row is sent in between.
        if missed := self._since(position):
            queue.put_nowait(missed)
        self._queues.add(queue)
        end = asyncio.create_task(self._disconnect_at(ending, queue))
        try:
            if len(self._queues) == 1:
                self._tasks = [asyncio.create_task(self._poll_rows()), asyncio.create_task(self._poll_view())]
            if self._events:
                queue.put_nowait({"event": "events", "data": self._events.decode()})
            while message := await queue.get():
                yield message
        finally:
            end.cancel()
            self._queues.discard(queue)
            if not self._queues:
                for task in self._tasks:
                    task.cancel()

    def _since(self, position: str) -> Message | None:
        """Message with the rows since a position; None if nothing is missing."""
        generation, _, number = position.partition(".")
        first, table = int(number) if number.isdecimal() else 0, self.reader.table
        if generation != str(table.generation) or not 0 <= len(table) - first <= _MAX_ROWS:
            return self._reset() if position else None
        return self._rows([table.row(index) for index in range(first, len(table))]) if first < len(table) else None

    def _reset(self) -> Message:
        return {"event": "reset", "data": "{}", "id": self.position}

    def _rows(self, rows: list[dict[str, Any]]) -> Message:
        first = len(self.reader.table) - len(rows)
        data = msgspec.json.encode({"first": first, "rows": rows}).decode()
        return {"event": "rows", "data": data, "id": self.position}

    @property
    def position(self) -> str:
        return f"{self.reader.table.generation}.{len(self.reader.table)}"

    def _send(self, message: Message) -> None:
        for queue in list(self._queues):
            if queue.full():
                # A slow client's browser reconnects and resumes at its last id.
                self._disconnect(queue)
            else:
                queue.put_nowait(message)

    async def _poll_rows(self) -> None:
        while self._queues:
            await asyncio.sleep(_ROWS_EVERY_S)
            await self.refresh()

    async def _poll_view(self) -> None:
        while self._queues:
            view = await run_sync(self.reader.view)
            self._send({"event": "view", "data": msgspec.json.encode(view).decode()})
            events = msgspec.json.encode(self.reader.events_seen)
            if events != self._events:
                self._events = events
                self._send({"event": "events", "data": events.decode()})
            await asyncio.sleep(_VIEW_EVERY_S)

    def _disconnect(self, queue: asyncio.Queue[Message | None]) -> None:
        self._queues.discard(queue)
        while not queue.empty():
            queue.get_nowait()
        queue.put_nowait(None)

    async def _disconnect_at(self, ending: anyio.Event, queue: asyncio.Queue[Message | None]) -> None:
        await ending.wait()
        self._disconnect(queue)

    async def close(self) -> None:
        for queue in list(self._queues):
            self._disconnect(queue)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
