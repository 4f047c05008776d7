"""Pacing: the lag that prompts are admitted for, and how many training prompts may be in flight."""

import math
from typing import NamedTuple

from slipstream.buffer.accounting import StoreCounts
from slipstream.buffer.records import RunState
from slipstream.configs.run import RunConfig

_MAX_WAIT = 0.01
"""Fraction of the learner's time spent waiting above which the lag grows."""
_STEPS_TO_RAISE = 8
_STEPS_TO_LOWER = 16
_QUANTUM = 0.25
"""Smallest change, versions."""
_RESERVE = 0.25
"""Ready groups to keep, versions' worth."""
_MIN_LAG = 1.0
"""Below it, the learner would need groups whose prompts are admitted only after its next version."""


def admission_limit(run: RunConfig, state: RunState) -> int:
    """Maximum of `StoreCounts.admitted`, given the groups consumed by the committed version.

    limit = min(consumed + (target_lag + 1) * groups_per_version, max_steps * claimed_groups_per_step)

    A `target_lag` of 0 is the synchronous run, with one version's worth of groups in flight. Groups that end without a
    step (rejected, expired, quarantined) are subtracted from `admitted`. Both counters live in the store, so a
    restarted broker neither bursts nor starves.

    Source: AReaL, arXiv:2505.24298, section 5.1. Its version * groups_per_version equals `consumed` without reuse.
    Differs: Reused groups add no budget. A replay, with stored groups, admits none.
    """
    if run.mode == "replay":
        return 0
    paced = state.consumed + int((target_lag(run, state) + 1) * run.groups_per_version)
    return min(paced, run.learner.max_steps * run.claimed_groups_per_step)


def target_lag(run: RunConfig, state: RunState) -> float:
    """Return the lag that prompts are admitted for, versions."""
    return Pacer(run).lag if state.target_lag is None else state.target_lag


class _PacedStep(NamedTuple):
    waited_s: float
    step_s: float
    spare: float
    """Ready groups left by the claim, in versions' worth."""


class Pacer:
    """Holds the target lag; with `staleness.target_lag=auto`, finds the lowest at which the learner hardly waits.

    The prompts of a version have `target_lag` versions of time to become ready groups: too little makes the learner
    wait, too much leaves ready groups that only age. Both are measured at every claim:

    - if the learner waited for more than `_MAX_WAIT` of its recent time, the lag grows by that wait in units of the
      remaining time, rounded up to quarters;
    - it falls by the groups that none of the last `_STEPS_TO_LOWER` steps needed, except for a reserve;
    - after a change, steps with prompts that were admitted before it don't count.

    If generators are the bottleneck, the learner always waits, and the lag rises to `max_lag`.
    """

    def __init__(self, run: RunConfig) -> None:
        self._run = run
        self._most = run.staleness.window - 1
        # A serial run must stay reproducible.
        self._is_adaptive = run.staleness.target_lag == "auto" and run.mode == "async"
        self._recent: list[_PacedStep] = []
        self.lag = 0.0
        self._set(min(_MIN_LAG, self._most) if self._is_adaptive else self._most)

    def record_step(self, *, waited_s: float, step_s: float, num_spare: int) -> bool:
        """Return whether `lag` changed.

        `waited_s`: part of `step_s`, the time since the last claim, with too few ready groups. `num_spare`: ready
        groups left by the claim.
        """
        self._num_ignored -= 1
        if self._num_ignored >= 0 or not self._is_adaptive:
            return False
        self._recent = [*self._recent, _PacedStep(waited_s, step_s, num_spare / self._run.groups_per_version)]
        self._recent = self._recent[-_STEPS_TO_LOWER:]
        lag = min(max(self.lag + self._change(), min(_MIN_LAG, self._most)), self._most)
        if lag == self.lag:
            return False
        self._set(lag)
        return True

    def _change(self) -> float:
        waited_s = sum(step.waited_s for step in self._recent)
        total_s = sum(step.step_s for step in self._recent)
        # One wait among few steps weighs as if it were one among `_STEPS_TO_RAISE`.
        if waited_s * len(self._recent) > _MAX_WAIT * total_s * max(len(self._recent), _STEPS_TO_RAISE):
            return _QUANTUM * math.ceil(waited_s / max(1e-9, total_s - waited_s) / _QUANTUM)
        if len(self._recent) < _STEPS_TO_LOWER:
            return 0.0
        unneeded = min(step.spare for step in self._recent) - _RESERVE
        return -_QUANTUM * max(0, math.floor(unneeded / _QUANTUM))

    def _set(self, lag: float) -> None:
        self.lag = lag
        self._recent = []
        self._num_ignored = math.ceil(lag + 1) * self._run.weights.publish_every_steps


def pacing_reason(state: RunState) -> str:
    """Reason of a generator that waits for the learner."""
    return f"pacing: the learner is at version {state.version} and must consume before more prompts are admitted"


def admission_reason(run: RunConfig, *, state: RunState, counts: StoreCounts) -> str:
    """Reason that no new training prompt can be admitted; empty if one can."""
    if state.phase not in ("starting", "training"):
        return f"the run is {state.phase}"
    return pacing_reason(state) if counts.admitted >= admission_limit(run, state) else ""


def oldest_version(run: RunConfig, *, committed: int) -> int:
    """Oldest version that gets training prompts; older tokens would be stale on arrival."""
    return committed - run.staleness.max_lag


def weights_reason(run: RunConfig, *, version: int, committed: int) -> str:
    """Reason that this version gets no training prompts; empty if it does, or is unknown (-1)."""
    if version < 0 or version >= oldest_version(run, committed=committed):
        return ""
    max_lag = run.staleness.max_lag
    return f"weights: holds version {version}, {committed} is committed and staleness.max_lag is {max_lag}"
