"""ConcurrencyLimit: adapts the number of concurrent trajectories of a generator to its engine."""

from slipstream.generators.engines.engine import EngineLoad


class ConcurrencyLimit:
    """Adapts the number of concurrent trajectories to the engine: additive increase, multiplicative decrease.

    Grows by one group while the limit is what holds the engine back, its queue is empty and its cache has room. Shrinks
    on preemptions in a full cache, and on requests that stay queued, which another generator would start sooner. A
    queue that gets shorter (after a burst of prompts) and preemptions in a cache with room (caused by a weight update)
    change nothing.

    Source: Chiu and Jain, Analysis of the increase and decrease algorithms for congestion avoidance, 1989.
    Differs: a queue shrinks the limit by its length rather than by a factor, because it tells how many are too many.
    """

    ROOM_BELOW = 0.8
    """KV cache usage up to which the limit grows; the rest is for running sequences, which still get longer."""
    DECREASE = 0.75
    """Factor after a preemption, which throws away the work of a whole sequence."""

    def __init__(self, *, least: int, most: int) -> None:
        """Start at `most`. `least` is the size of a group, and the step of the increase."""
        self._least = min(least, most)
        self._most = most
        self._num_waiting = 0
        self._num_preempted = 0
        self.limit = most

    def observe(self, load: EngineLoad, *, running: int) -> None:
        """Update the limit from the engine's load while `running` trajectories are in flight; about once a second."""
        preempted = load.num_preempted - self._num_preempted
        lasting_queue = self._num_waiting if load.num_waiting >= self._num_waiting else 0
        self._num_preempted, self._num_waiting = load.num_preempted, load.num_waiting
        if running > self.limit:
            # The last decrease has not taken effect yet: cutting again for the same cause would overshoot.
            return
        has_room = load.kv_usage < self.ROOM_BELOW
        if preempted > 0 and not has_room:
            self._set(int(self.DECREASE * running))
        elif lasting_queue:
            self._set(running - lasting_queue)
        elif has_room and not load.num_waiting and running + self._least > self.limit:
            self._set(self.limit + self._least)

    def _set(self, limit: int) -> None:
        self.limit = max(self._least, min(self._most, limit))
