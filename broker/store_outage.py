"""StoreOutage: since when the store has been away, told in a sentence now and then instead of once per message."""

import time
from collections.abc import Callable

from slipstream.buffer.errors import StoreCannotWriteError, StoreUnavailableError
from slipstream.runtime.clock import Clock

_REPORT_EVERY_S = 5.0


class StoreOutage:
    """Life: (record, again and again -> end)*."""

    def __init__(self, *, report: Callable[[str], object], clock: Clock = time.monotonic) -> None:
        """`report` is given a sentence for people."""
        self._report = report
        self._clock = clock
        self._since: float | None = None
        self._report_at = 0.0
        self.reason = ""
        """In one word, for peers: `store_unavailable` | `store_cannot_write`; empty while the store works."""

    @property
    def seconds(self) -> float:
        """How long it has lasted; 0 while there is none."""
        return 0.0 if self._since is None else self._clock() - self._since

    def record(self, error: StoreUnavailableError) -> None:
        """Something could not be done."""
        now = self._clock()
        if self._since is None:
            self._since = self._report_at = now
        self.reason = "store_cannot_write" if isinstance(error, StoreCannotWriteError) else "store_unavailable"
        if now >= self._report_at:
            self._report_at = now + _REPORT_EVERY_S
            self._report(f"waiting for the store for {self.seconds:.0f} s: {error}")

    def end(self) -> None:
        """The store has done what it was asked."""
        if self._since is not None:
            self._report(f"the store works again after {self.seconds:.1f} s")
        self._since, self.reason = None, ""
