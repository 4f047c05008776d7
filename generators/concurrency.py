"""Concurrency: how many trajectories a generator runs together, as many as its engine has room for."""

from slipstream.generators.engines.engine import EngineLoad

_ROOMY = 0.8
"""Share of the KV cache below which there is room for more: running sequences are still growing."""
_CUT = 0.75
"""What is left of the limit after a preemption; each one throws away the work of a whole sequence."""


class Concurrency:
    """Additive increase, multiplicative decrease, between a group and what the settings allow. Starts at the latter.

    A group more while the limit is what holds the engine back, nothing waits in it and its KV cache has room. Fewer
    when sequences were preempted for want of room, or when as many requests as before still wait to be begun: those are
    better off with another generator. No reason are a queue that gets shorter, as after a burst of prompts, and
    preemptions in a cache that has room: an update of the weights asked for those.

    Source: Chiu and Jain, Analysis of the increase and decrease algorithms for congestion avoidance, 1989.
    Differs: a queue is cut by its own length, not by a factor, because it says exactly how many are too many.
    """

    def __init__(self, *, least: int, most: int) -> None:
        """`least`: a group, which is also the step of the increase."""
        self._least = min(least, most)
        self._most = most
        self._num_waiting = 0
        self._num_preempted = 0
        self.limit = most
        """Trajectories that may run together now."""

    def observe(self, load: EngineLoad, *, running: int) -> None:
        """What the engine says of itself while `running` trajectories are under way; call it about once a second."""
        preempted = load.num_preempted - self._num_preempted
        lasting = self._num_waiting if load.num_waiting >= self._num_waiting else 0
        self._num_preempted, self._num_waiting = load.num_preempted, load.num_waiting
        if running > self.limit:
            # The last cut is still being worked off: the engine is as full as it was before.
            return
        is_roomy = load.kv_usage < _ROOMY
        if preempted > 0 and not is_roomy:
            self._bound(int(_CUT * running))
        elif lasting:
            self._bound(running - lasting)
        elif is_roomy and not load.num_waiting and running + self._least > self.limit:
            self._bound(self.limit + self._least)

    def _bound(self, limit: int) -> None:
        self.limit = max(self._least, min(self._most, limit))
