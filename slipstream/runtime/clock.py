"""Clocks, deadlines, rates, and counter growth."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any

Clock = Callable[[], float]
"""Seconds, monotonic; `time.monotonic` outside tests."""


class WaitTimeoutError(TimeoutError):
    """A deadline passed. The message names what was awaited."""


class Deadline:
    """Time after which a wait raises an error."""

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


class Rate:
    """Amount per second over the last `window_s` seconds. Thread-safe.

    Example: tokens = Rate(); tokens.add(512); tokens.per_s
    """

    def __init__(self, *, window_s: float = 5.0, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._window_s = window_s
        self._events: deque[tuple[float, float]] = deque()
        self._sum = 0.0
        self._started_at = clock()
        self.total = 0.0

    def add(self, amount: float) -> None:
        with self._lock:
            self._events.append((self._clock(), amount))
            self._sum += amount
            self.total += amount

    @property
    def per_s(self) -> float:
        """Mean over the window, or since the start if shorter."""
        with self._lock:
            now = self._clock()
            while self._events and self._events[0][0] < now - self._window_s:
                self._sum -= self._events.popleft()[1]
            return self._sum / max(1e-9, min(self._window_s, now - self._started_at))


class Growth:
    """Total growth of counters, which may vanish and restart at 0.

    Example: growth = Growth({"generator-0": 500.0}); growth.update({"generator-0": 700.0, "generator-1": 100.0});
        growth.total == 300.0
    """

    def __init__(self, counters: Mapping[Any, float]) -> None:
        """`counters`: current values; later counters start at 0."""
        self._last = dict(counters)
        self.each: dict[Any, float] = {}
        """Growth per counter. Growth between the last update and a restart is lost."""

    @property
    def total(self) -> float:
        return sum(self.each.values())

    def update(self, counters: Mapping[Any, float]) -> None:
        for name, count in counters.items():
            last = self._last.get(name, 0.0)
            # After a restart from 0, the whole value is growth.
            self.each[name] = self.each.get(name, 0.0) + (count - last if count >= last else count)
        self._last |= counters
