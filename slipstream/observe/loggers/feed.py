"""Feed: reads the rows of a run and turns them into entries for a logger: numbers, the curve, tables of samples."""

import json
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from slipstream.configs.broker import LoggingConfig
from slipstream.observe.loggers.logger import Entry, RunLogger, numbers_of
from slipstream.observe.loggers.sources import SAMPLE_COLUMNS, RowSource
from slipstream.runtime.clock import Clock
from slipstream.runtime.logs import LogLimiter

_SLOW_S = 10.0
"""Duration of one call from which on it is reported."""

log = structlog.get_logger(__name__)


class Delivery:
    """A bounded queue before a logger that may hang or raise. Life: put* -> close. Belongs to one thread."""

    def __init__(self, make: Callable[[], RunLogger], *, max_queue: int, clock: Clock = time.monotonic) -> None:
        """`make` builds the logger, in its thread."""
        self._make = make
        self._clock = clock
        self._max_queue = max_queue
        self._waiting: deque[Entry] = deque()
        self._changed = threading.Condition()
        self._is_closing = False
        self._call = "its start"
        self._since = clock()
        self._limiter = LogLimiter(log.warning, clock=clock)
        self.num_sent = self.num_failed = self.num_dropped = 0
        """Entries that were taken | raised in the logger | left out of the full queue."""
        self.cursor = 0
        """Position in the source up to which entries were taken or given up; 0 before the first."""
        self.error: Exception | SystemExit | None = None
        """Exception with which the logger could not start."""
        self._thread = threading.Thread(target=self._run, name="logger", daemon=True)
        self._thread.start()

    def put(self, entry: Entry) -> None:
        """Queue an entry. Never blocks."""
        with self._changed:
            if len(self._waiting) >= self._max_queue:
                self._waiting.popleft()
                self.num_dropped += 1
            self._waiting.append(entry)
            self._changed.notify()

    def gauges(self) -> dict[str, Any]:
        """Return the counters, and what the logger does at present."""
        busy_s = self._clock() - self._since if self._call else 0.0
        reason = f"{self._call} has taken {busy_s:.0f} s so far" if busy_s >= _SLOW_S else ""
        counts = {"sent": self.num_sent, "failed": self.num_failed, "dropped": self.num_dropped}
        if self.num_dropped or self.num_failed:
            reason += f"{reason and '; '}{self.num_dropped} entries dropped, {self.num_failed} failed"
        return {**counts, "queued": len(self._waiting), "reason": reason}

    def close(self, *, timeout_s: float) -> bool:
        """Let the logger take what waits and close, for that long; return whether it did."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- the logger's thread -----------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            logger = self._make()
        except (Exception, SystemExit) as error:
            self.error = error
            return
        self._call = ""
        while (entry := self._next()) is not None:
            self._deliver(logger, entry)
        self._attempt("close", getattr(logger, "close", None))

    def _next(self) -> Entry | None:
        with self._changed:
            # No deadline: the logger has nothing to do until there is an entry.
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            return self._waiting.popleft() if self._waiting else None

    def _deliver(self, logger: RunLogger, entry: Entry) -> None:
        call = getattr(logger, entry.kind, None)
        if self._attempt(entry.kind, call and (lambda: call(entry.step, *entry.arguments))):
            self.num_sent += 1
        else:
            self.num_failed += 1
        self.cursor = entry.cursor or self.cursor

    def _attempt(self, name: str, call: Callable[[], object] | None) -> bool:
        """Call the logger; a method that it lacks has nothing to do."""
        self._since, self._call = self._clock(), name
        try:
            if call:
                call()
        # Whatever a library raises, or its wish to exit: one entry is lost, and the next may fare better.
        except (Exception, SystemExit) as error:
            self._limiter.log("logger_failed", name, error=f"{type(error).__name__}: {error}")
            return False
        finally:
            self._call = ""
        return True


class Bookmark:
    """Position up to which a logger has the rows, and the run's id in its eyes; kept in the run folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        known: dict[str, Any] = {}
        # A file that a crash cut short is none.
        with suppress(OSError, ValueError):
            known = json.loads(path.read_bytes())
        self.cursor = int(known.get("cursor", 0))
        self.id = str(known.get("id") or uuid.uuid4().hex[:12])

    def save(self, cursor: int) -> None:
        """Keep a position; on a full disk the one before stays, and the rows in between come twice after a restart."""
        self.cursor = cursor
        draft = self._path.with_suffix(".new")
        with suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
            draft.write_text(json.dumps({"id": self.id, "cursor": cursor}))
            draft.replace(self._path)


class Feed:
    """Life: turn*. Belongs to one thread."""

    def __init__(
        self,
        source: RowSource,
        delivery: Delivery,
        *,
        config: LoggingConfig,
        name: str,
        cursor: int,
        clock: Clock = time.monotonic,
    ) -> None:
        """`name`: of the run; `cursor`: position up to which the logger has the rows."""
        self._source = source
        self._delivery = delivery
        self._config = config
        self._clock = clock
        self._cursor = cursor
        self._drawn_at = clock()
        self._curve = _make_curve(source, title=name, cursor=cursor) if config.curve_every_s else None
        self.num_lost = 0
        """Rows that the source did not have any more."""

    def turn(self, *, is_last: bool = False) -> None:
        """Pass on what is new; with `is_last` also the curve, however new the one before. Raises as StoreRows."""
        news = self._source.read(self._cursor)
        self.num_lost += news.num_lost
        self._cursor = news.cursor
        for row in news.rows:
            # With the last one, the logger has them all.
            cursor = news.cursor if row is news.rows[-1] else 0
            self._delivery.put(Entry(row["step"], "log", (numbers_of(row),), cursor))
        if self._curve:
            self._curve.add(news.rows)
        # The last read: where the store goes away meanwhile, no row is missing.
        self._put_samples([row["step"] for row in news.rows])
        if self._curve:
            is_due = is_last or self._clock() - self._drawn_at >= self._config.curve_every_s
            if is_due and self._curve.has_undrawn:
                self._drawn_at = self._clock()
                step, png = self._curve.draw()
                self._delivery.put(Entry(step, "image", ("curve", png)))

    def _put_samples(self, steps: list[int]) -> None:
        every = self._config.samples_every_steps
        # Of one step at a time: a backlog has no answers in the store any more.
        due = [step for step in steps if every and step % every == 0][-1:]
        for step in due:
            if rows := self._source.samples(step, limit=self._config.num_samples):
                self._delivery.put(Entry(step, "table", ("samples", SAMPLE_COLUMNS, rows)))


def _make_curve(source: RowSource, *, title: str, cursor: int) -> Any:
    """Return a Curve that begins with the run, and not with this process."""
    # Imported here, because it imports matplotlib, which a logger without a curve does without.
    from slipstream.observe.plot import Curve

    curve = Curve(title=title)
    rows = source.read(0).rows if cursor else []
    curve.add(rows[: max(0, len(rows) - len(source.read(cursor).rows))])
    curve.has_undrawn = False
    return curve
