"""Clocks, passed to role loops as arguments, and deadlines that name what is waited for."""

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds, monotonic; `time.monotonic` outside tests."""


class WaitTimeoutError(TimeoutError):
    """A deadline passed; the message names what was waited for and what is missing."""


class Deadline:
    """A point in time after which a wait raises an error."""

    def __init__(self, timeout_s: float, *, what: str, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._ends_at = clock() + timeout_s
        self._timeout_s = timeout_s
        self._what = what

    @property
    def left_s(self) -> float:
        """Seconds left, 0 after the deadline."""
        return max(0.0, self._ends_at - self._clock())

    @property
    def is_over(self) -> bool:
        return self.left_s == 0.0

    def check(self, *, missing: str = "") -> None:
        """Raise WaitTimeoutError after the deadline; `missing` completes the message."""
        if self.is_over:
            raise WaitTimeoutError(
                f"waited {self._timeout_s:g} s for {self._what}" + (f"; missing: {missing}" if missing else "")
            )
