"""ViewedRun: a run for the dashboard's pages; Feed: its changes as server-sent events."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import msgspec
from anyio.to_thread import run_sync

from slipstream.buffer.records import EVENTS_KEPT, Event
from slipstream.buffer.redis.run_store import COMMAND_TIMEOUT_S
from slipstream.configs.base import ConfigError, Record
from slipstream.configs.run import RunConfig
from slipstream.observe.metrics_rows import Health, HealthWarning, MetricsTable, Row, read_tail
from slipstream.observe.reader import UNREADABLE, RunReader
from slipstream.observe.run_status import RunStatus

_CONNECT_TIMEOUT_S = 1.0
_IDLE_TIMEOUT_S = 30.0
"""Time after which an embedded server without clients stops."""
_ENDED = ("finished", "failed")
_ACCURACY = "eval/accuracy_"
_ROWS_EVERY_S = 0.25
_VIEW_EVERY_S = 1.0
_MAX_ROWS = 200
"""Rows per message; a client further behind reads the columns again."""
_QUEUE_LENGTH = 64
"""Queued messages at which a slow client is disconnected."""

Message = dict[str, str]


class RunView(Record):
    """State of a run, from its folder and store."""

    phase: str
    """Phase as in RunStatus, or without a store as in RunLine."""
    step: int
    max_steps: int | None
    """None if the settings cannot be read."""
    max_lag: int | None
    is_live: bool
    status: RunStatus | None
    """As last read; None if the store never answered."""
    problem: str
    """Reason that the store cannot be read; else empty."""
    summary: dict[str, Any]
    """summary.json; empty before the end."""
    times: dict[str, Any]
    """StepTimes as a dict; empty before the first step."""
    lag_tokens: dict[str, int]
    warnings: list[HealthWarning]
    num_rows: int


class RunLine(Record):
    """A run in a list."""

    id: str
    phase: str
    """running | finished (has a summary) | stopped (neither)."""
    mode: str
    """Empty if the settings cannot be read."""
    step: int
    max_steps: int | None
    changed_at: float | None
    """Time of the newest step, seconds since 1970."""
    time_s: float | None
    reward: float | None
    accuracies: dict[str, float]
    """By held-out set, of the final evaluation, or else the newest one."""


class ViewedRun(RunReader):
    """A run that pages show. Life: (poll | view | line)* -> close."""

    def __init__(self, folder: Path, *, run_id: str) -> None:
        limits: dict[str, Any] = {"answer_timeout_s": COMMAND_TIMEOUT_S, "idle_timeout_s": _IDLE_TIMEOUT_S}
        super().__init__(folder, starts_server=True, timeout_s=_CONNECT_TIMEOUT_S, **limits)
        self.id = run_id
        self.table = MetricsTable(folder / "metrics.jsonl")
        self.events_seen: list[Event] = []
        """Events as of the last `view`."""
        self._health = Health(self._known_config)
        # Separate locks: `view` may block on the store without delaying `poll`.
        self._polling, self._viewing = threading.Lock(), threading.Lock()
        self._tail_read = (0, 0)
        self._tail: tuple[float, Row, dict[str, float]] = (0.0, {}, {})
        """Write time of the newest row, the row, newest accuracy by set."""
        self._status: RunStatus | None = None
        self._is_final = False

    @property
    def _known_config(self) -> RunConfig | None:
        with suppress(ConfigError):
            return self.config
        return None

    def poll(self) -> list[Row]:
        """Add new rows of metrics.jsonl to `table` and return them."""
        # A disconnecting client cancels its task, but not its thread.
        with self._polling:
            generation, rows = self.table.generation, self.table.poll()
            if self.table.generation != generation:
                self._health = Health(self._known_config)
            for row in rows:
                self._health.add(row)
            return rows

    def view(self) -> RunView:
        """Return the state. Takes seconds if the store does not answer."""
        with self._viewing:
            is_live = self.is_live
            # The run may have been resumed.
            self._is_final = self._is_final and not is_live
            if not self._is_final:
                self._read_store(is_live=is_live)
            summary, run, read = self.summary, self._known_config, None if self.problem else self._status
            step = int(self.table.newest("step") or 0)
            has_phase = is_live or not self._is_final or (read is not None and read.phase in _ENDED)
            return RunView(
                phase=read.phase if read and has_phase else self.folder_phase,
                step=max(step, read.step) if read else step,
                max_steps=run.learner.max_steps if run else None,
                max_lag=run.staleness.max_lag if run else None,
                is_live=is_live,
                status=self._status,
                problem=self.problem,
                summary=summary,
                times=summary.get("times") or self.table.nested.get("times") or {},
                lag_tokens=self.table.nested.get("lag/histogram") or {},
                warnings=self._health.warnings,
                num_rows=len(self.table),
            )

    def _read_store(self, *, is_live: bool) -> None:
        try:
            self._status, self.problem = self.status(), ""
            self.events_seen = self.store.events(limit=EVENTS_KEPT)
            self._is_final = not is_live and not any(role.is_alive for role in self._status.roles)
        except UNREADABLE as error:
            self.problem = str(error)
            self._is_final = not is_live
        if self._is_final or self.problem:
            # An embedded server stops only when it has no clients.
            self.close()

    def line(self) -> RunLine:
        with suppress(OSError):
            found = self.table.path.stat()
            # Pages list all runs every few seconds.
            if (found.st_mtime_ns, found.st_size) != self._tail_read:
                self._tail_read = found.st_mtime_ns, found.st_size
                rows = read_tail(self.table.path)
                newest = {name: value for row in rows for name, value in _accuracies(row).items()}
                self._tail = found.st_mtime, rows[-1] if rows else {}, newest
        changed_at, last, accuracies = self._tail
        run = self._known_config
        final = self.summary.get("evaluation") if self.folder_phase == "finished" else None
        return RunLine(
            id=self.id,
            phase=self.folder_phase,
            mode=run.mode if run else "",
            step=int(last.get("step", 0)),
            max_steps=run.learner.max_steps if run else None,
            changed_at=changed_at if last else None,
            time_s=last.get("time_s"),
            reward=last.get("learner/reward_mean"),
            accuracies=_accuracies(final or {}) or accuracies,
        )


def _accuracies(row: Row) -> dict[str, float]:
    return {key.removeprefix(_ACCURACY): value for key, value in row.items() if key.startswith(_ACCURACY)}


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
