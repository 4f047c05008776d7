"""StoreOutage: tracks an unavailable store and reports it every few seconds instead of once per failed call."""

import time
from collections.abc import Callable

from slipstream.buffer.errors import StoreCannotWriteError, StoreUnavailableError
from slipstream.runtime.clock import Clock

_REPORT_INTERVAL_S = 5.0


class StoreOutage:
    """An interval in which calls of the store fail. Life: (record* -> end)*."""

    def __init__(self, *, report: Callable[[str], object], clock: Clock = time.monotonic) -> None:
        """`report` receives one sentence at a time."""
        self._report = report
        self._clock = clock
        self._began_at: float | None = None
        self._next_report_at = 0.0
        self.reason = ""
        """`store_unavailable` | `store_cannot_write`, as peers receive it in a Nack; empty while the store works."""

    @property
    def seconds(self) -> float:
        """Duration so far; 0 without an outage."""
        return 0.0 if self._began_at is None else self._clock() - self._began_at

    def record(self, error: StoreUnavailableError) -> None:
        """Record a failed call, and report it if a report is due."""
        now = self._clock()
        if self._began_at is None:
            self._began_at = self._next_report_at = now
        self.reason = "store_cannot_write" if isinstance(error, StoreCannotWriteError) else "store_unavailable"
        if now >= self._next_report_at:
            self._next_report_at = now + _REPORT_INTERVAL_S
            self._report(f"waiting for the store for {self.seconds:.0f} s: {error}")

    def end(self) -> None:
        """Record that a call has succeeded."""
        if self._began_at is not None:
            self._report(f"the store works again after {self.seconds:.1f} s")
        self._began_at, self.reason = None, ""
