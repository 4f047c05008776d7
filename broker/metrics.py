"""Numbers a role keeps about itself."""

import time
from collections import deque

from broker.clock import Clock


class Rate:
    """Amount per second over the last `window_s` seconds.

    Example: tokens = Rate(); tokens.add(512); tokens.per_s
    """

    def __init__(self, *, window_s: float = 5.0, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._window_s = window_s
        self._events: deque[tuple[float, float]] = deque()
        self._sum = 0.0
        self._started_at = clock()
        self.total = 0.0
        """Everything ever added."""

    def add(self, amount: float) -> None:
        """Count `amount` now."""
        self._events.append((self._clock(), amount))
        self._sum += amount
        self.total += amount

    @property
    def per_s(self) -> float:
        """Mean over the window (over the life time while that is shorter)."""
        now = self._clock()
        while self._events and self._events[0][0] < now - self._window_s:
            self._sum -= self._events.popleft()[1]
        return self._sum / max(1e-9, min(self._window_s, now - self._started_at))
