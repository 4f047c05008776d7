"""Feed: turns a run's rows into metrics, a curve, and tables of samples for a logger."""

import json
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from msgspec.structs import replace

from slipstream.observe.catalog.token_decoder import find_decoder
from slipstream.observe.loggers.logger import Cell, Entry, RunLogger, numbers_of
from slipstream.observe.reader import RunReader
from slipstream.runtime.clock import Clock
from slipstream.runtime.logs import LogLimiter
from slipstream.runtime.model_files import find_file

SAMPLE_COLUMNS = ("step", "trajectory", "data_source", "prompt", "answer", "reward", "ended by", "lag")
_MAX_TEXT = 4000
_NUM_SAMPLES = 8
_CURVE_EVERY_S = 60.0
"""Minimum time between curves, which take a quarter of a second."""
_SLOW_S = 10.0
"""Calls that take longer are reported."""

log = structlog.get_logger(__name__)


class Delivery:
    """A bounded queue to a logger that may hang or raise. Life: put* -> close, in one thread."""

    def __init__(self, make: Callable[[], RunLogger], *, max_queue: int, clock: Clock = time.monotonic) -> None:
        """`make` builds the logger, in the logger's thread."""
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
        """Entries delivered | failed in the logger | dropped from a full queue."""
        self.cursor = 0
        """Position after the last delivered row; 0 before the first."""
        self.error: Exception | SystemExit | None = None
        """Raised by the logger's start."""
        self._thread = threading.Thread(target=self._run, name="logger", daemon=True)
        self._thread.start()

    def put(self, entry: Entry) -> None:
        """Queue an entry; a full queue drops its oldest."""
        with self._changed:
            if len(self._waiting) >= self._max_queue:
                self._waiting.popleft()
                self.num_dropped += 1
            self._waiting.append(entry)
            self._changed.notify()

    def gauges(self) -> dict[str, Any]:
        """Counters, and the current call if it is slow."""
        busy_s = self._clock() - self._since if self._call else 0.0
        reason = f"{self._call} has taken {busy_s:.0f} s so far" if busy_s >= _SLOW_S else ""
        if self.num_dropped or self.num_failed:
            reason += f"{reason and '; '}{self.num_dropped} entries dropped, {self.num_failed} failed"
        counts = {"sent": self.num_sent, "failed": self.num_failed, "dropped": self.num_dropped}
        return {**counts, "queued": len(self._waiting), "reason": reason}

    def close(self, *, timeout_s: float) -> bool:
        """Deliver the queued entries; return whether the logger closed within `timeout_s`."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            logger = self._make()
        except (Exception, SystemExit) as error:
            self.error = error
            return
        self._call = ""
        while True:
            with self._changed:
                # No deadline: an idle logger waits for an entry or for close.
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                if not self._waiting:
                    break
                entry = self._waiting.popleft()
            call = getattr(logger, entry.kind, None)
            is_sent = self._attempt(entry.kind, call and partial(call, entry.step, *entry.arguments))
            self.num_sent += is_sent
            self.num_failed += not is_sent
            self.cursor = entry.cursor or self.cursor
        self._attempt("close", getattr(logger, "close", None))

    def _attempt(self, name: str, call: Callable[[], object] | None) -> bool:
        """Return whether a call succeeded. A missing method counts as success."""
        self._since, self._call = self._clock(), name
        try:
            if call:
                call()
        # A library may raise anything or exit.
        except (Exception, SystemExit) as error:
            self._limiter.log("logger_failed", name, error=f"{type(error).__name__}: {error}")
            return False
        finally:
            self._call = ""
        return True


class Bookmark:
    """File with a logger's position, and the run's id for it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        known: dict[str, Any] = {}
        # A crash may leave a truncated file.
        with suppress(OSError, ValueError):
            known = json.loads(path.read_bytes())
        self.cursor = int(known.get("cursor", 0))
        self.id = str(known.get("id") or uuid.uuid4().hex[:12])

    def save(self, cursor: int) -> None:
        """Write the position. On a full disk, a restart repeats rows."""
        self.cursor = cursor
        draft = self._path.with_suffix(".new")
        with suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
            draft.write_text(json.dumps({"id": self.id, "cursor": cursor}))
            draft.replace(self._path)


class Feed:
    """Passes new rows to a Delivery. Used by one thread."""

    def __init__(
        self, reader: RunReader, delivery: Delivery, *, samples_every: int, cursor: int, clock: Clock = time.monotonic
    ) -> None:
        """`samples_every`: steps between two tables of samples; 0 for none."""
        self._reader = reader
        self._delivery = delivery
        self._samples_every = samples_every
        self._clock = clock
        self._cursor = cursor
        self._drawn_at = clock()
        # Import matplotlib only for the curve.
        from slipstream.observe.plot import Curve

        self._curve = Curve(title=reader.config.name)
        """From the beginning of the run."""
        rows = reader.changes(after=0).rows if cursor else []
        self._curve.add(rows[: max(0, len(rows) - len(reader.changes(after=cursor).rows))])
        self._curve.has_undrawn = False
        self.num_lost = 0
        """Rows that the store dropped before they were read."""

    def turn(self, *, is_last: bool = False) -> None:
        """Pass on new rows and, when due or `is_last`, the curve. Raises ConfigError, ReplayBufferError."""
        changes = self._reader.changes(after=self._cursor)
        self.num_lost += changes.num_lost
        self._cursor = changes.position
        for row in changes.rows:
            # Only the last row moves the cursor: by then the logger has all rows.
            cursor = changes.position if row is changes.rows[-1] else 0
            self._delivery.put(Entry(row["step"], "log", (numbers_of(row),), cursor))
        self._curve.add(changes.rows)
        # Read samples last: if the store fails here, no row is lost.
        due = [row["step"] for row in changes.rows if self._samples_every and row["step"] % self._samples_every == 0]
        # Only the newest step: the store no longer holds the answers of a backlog.
        if due and (rows := read_samples(self._reader, due[-1], limit=_NUM_SAMPLES)):
            self._delivery.put(Entry(due[-1], "table", ("samples", SAMPLE_COLUMNS, rows)))
        is_due = is_last or self._clock() - self._drawn_at >= _CURVE_EVERY_S
        if is_due and self._curve.has_undrawn:
            self._drawn_at = self._clock()
            step, png = self._curve.draw()
            self._delivery.put(Entry(step, "image", ("curve", png)))


def read_samples(reader: RunReader, step: int, *, limit: int) -> list[list[Cell]]:
    """A step's answers as rows of SAMPLE_COLUMNS. Raises ConfigError, ReplayBufferError."""
    entry = reader.find_step(step) if reader.has_store else None
    if entry is None:
        return []
    decode = find_decoder(find_file(reader.config.model.path, "tokenizer.json"), candidates=[])
    entry = replace(entry, group_ids=entry.group_ids[:limit], trajectory_ids=entry.trajectory_ids[:limit])
    members = reader.members(entry)
    samples: list[list[Cell]] = []
    for trajectory in filter(None, (members.get(names[0]) for names in entry.trajectory_ids if names)):
        ids, first = trajectory.token_ids, int(trajectory.model_mask.argmax())
        texts = [decode(part) if decode else str(part.tolist()) for part in (ids[:first], ids[first:])]
        prompt, answer = (text[:_MAX_TEXT] for text in texts)
        lag = entry.version - min(span.version for span in trajectory.version_spans)
        origin: list[Cell] = [step, trajectory.id, trajectory.data_source]
        samples.append([*origin, prompt, answer, trajectory.reward.total, trajectory.stop_reason, lag])
    return samples
