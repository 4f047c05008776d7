"""Delivery: hands entries to a logger in a thread of its own, and drops the oldest when it does not keep up."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import structlog

from slipstream.loggers.logger import Entry, RunLogger
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
