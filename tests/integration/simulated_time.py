"""Simulated time: an asyncio loop that jumps to the next timer instead of waiting, so that times are exact."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    """Never waits for a timer. `now` is the loop's time."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if not timeout:
            return super().select(timeout)
        events = super().select(0)
        self.now += 0.0 if events else timeout
        return events


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Starts at 0 s. Code on this loop must not block."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Simulated seconds."""
        return self._jumping.now


def simulate(work: Coroutine[Any, Any, T], *, loop: SimulatedLoop) -> T:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(work)
