"""Numbers that are followed: how fast something comes, and how much in all."""

import time
from collections import deque
from collections.abc import Mapping
from threading import Lock

from slipstream.runtime.clock import Clock


class Rate:
    """Amount per second over the last `window_s` seconds. May be asked by a thread that does not add.

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
        """Everything ever added."""

    def add(self, amount: float) -> None:
        """Count `amount` now."""
        with self._lock:
            self._events.append((self._clock(), amount))
            self._sum += amount
            self.total += amount

    @property
    def per_s(self) -> float:
        """Mean over the window (over the life time while that is shorter)."""
        with self._lock:
            now = self._clock()
            while self._events and self._events[0][0] < now - self._window_s:
                self._sum -= self._events.popleft()[1]
            return self._sum / max(1e-9, min(self._window_s, now - self._started_at))


class Growth:
    """What several counters have grown by together, each of which may vanish, and begin again at 0.

    Example: grown = Growth({"generator-0": 500.0}); grown.look({"generator-0": 700.0, "generator-1": 100.0});
        grown.total == 300.0
    """

    def __init__(self, counters: Mapping[str, float]) -> None:
        """`counters`: where they stand now. One that comes later began at 0."""
        self._last = dict(counters)
        self.total = 0.0
        """Seen so far; what grew between the last look at a counter and its end is not."""

    def look(self, counters: Mapping[str, float]) -> None:
        """Take in where they stand."""
        for name, count in counters.items():
            last = self._last.get(name, 0.0)
            self.total += count - last if count >= last else count
        self._last |= counters
