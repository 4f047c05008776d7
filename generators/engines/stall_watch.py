"""StallWatch: notices an engine that has requests and makes no step; it would answer pings for ever."""

import time

from broker.clock import Clock
from generators.engines.engine import EngineLoad
from generators.errors import EngineDied


class StallWatch:
    """Life: look, now and then. Counts only time in which the engine should have stepped."""

    def __init__(self, *, limit_s: float, clock: Clock = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._num_steps = -1
        self._moved_at = clock()

    def look(self, load: EngineLoad, *, is_paused: bool) -> None:
        """`is_paused`: it is not meant to step now. Raises EngineDied."""
        if is_paused or not load.num_open or load.num_steps != self._num_steps:
            self._num_steps, self._moved_at = load.num_steps, self._clock()
        elif self._clock() - self._moved_at > self._limit_s:
            raise EngineDied(
                f"the engine must make a step within generators.engine.stall_timeout_s ({self._limit_s:g} s) while "
                f"requests are open, it did not with {load.num_open} of them: look at the log above, or raise the limit"
            )
