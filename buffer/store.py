"""Store: a run's durable state, and its outages as a role sees them."""

import time
from collections.abc import Callable

from slipstream.buffer.errors import StoreCannotWriteError, StoreUnavailableError
from slipstream.buffer.redis.store import RedisStore
from slipstream.runtime.clock import Clock

Store = RedisStore
"""All operations. The tests also run them against a model on dicts."""

_REPORT_INTERVAL_S = 5.0


class StoreOutage:
    """A period of failing store calls. Life cycle: (record* -> end)*."""

    def __init__(self, *, report: Callable[[str], object], clock: Clock = time.monotonic) -> None:
        """`report` receives one sentence per call."""
        self._report = report
        self._clock = clock
        self._began_at: float | None = None
        self._next_report_at = 0.0
        self.reason = ""
        """`store_unavailable` | `store_cannot_write`, for a Nack; empty while the store works."""

    @property
    def seconds(self) -> float:
        """Duration so far; 0 without an outage."""
        return 0.0 if self._began_at is None else self._clock() - self._began_at

    def record(self, error: StoreUnavailableError) -> None:
        """Record a failed call; report it every few seconds."""
        now = self._clock()
        if self._began_at is None:
            self._began_at = self._next_report_at = now
        self.reason = "store_cannot_write" if isinstance(error, StoreCannotWriteError) else "store_unavailable"
        if now >= self._next_report_at:
            self._next_report_at = now + _REPORT_INTERVAL_S
            self._report(f"waiting for the store for {self.seconds:.0f} s: {error}")

    def end(self) -> None:
        if self._began_at is not None:
            self._report(f"the store works again after {self.seconds:.1f} s")
        self._began_at, self.reason = None, ""
