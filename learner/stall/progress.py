"""Vital signs of a run, followed from look to look: what arrives, whose rewards answer, whether weights are adopted."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from slipstream.broker.admission import capacity_reason
from slipstream.broker.status.role_status import RoleStatus, role_statuses
from slipstream.buffer.accounting import StoreCounts
from slipstream.buffer.store import Store
from slipstream.configs.run import RunConfig
from slipstream.runtime.clock import Clock


# @@ RunProgress: what one look at the store tells a learner that waits.
@dataclass(frozen=True, slots=True)
class GeneratorProgress:
    """One generator that ever reported."""

    status: RoleStatus
    """How it is."""
    trajectories: int | None = None
    """Finished since it started; None for one that does not say (any more)."""

    @property
    def is_starting(self) -> bool:
        """Whether it lives and may still come to hold weights by itself: it loads its model or fetches them."""
        return self.status.is_alive and (self.status.state == "starting" or self.status.waits_for == "transfer")

    @property
    def is_holding(self) -> bool:
        """Whether it lives and works with verified weights."""
        return self.status.is_alive and self.status.state in ("ready", "updating") and self.status.version is not None


@dataclass(frozen=True, slots=True)
class RunProgress:
    """The run, now."""

    counts: StoreCounts
    """Where everything is."""
    announced_version: int
    """The newest the learner has made."""
    generators: tuple[GeneratorProgress, ...] = ()
    """All that ever reported, by name."""
    broker: RoleStatus | None = None
    """None when none has ever reported."""
    capacity_reason: str = ""
    """Why the store has no room for more; empty when it has."""
    answered: int | None = None
    """Answers of the evaluation that is waited for; None when groups are."""

    @property
    def living(self) -> list[GeneratorProgress]:
        """Generators that were reported of lately."""
        return [generator for generator in self.generators if generator.status.is_alive]

    @property
    def holding(self) -> list[GeneratorProgress]:
        """Those with verified weights."""
        return [generator for generator in self.generators if generator.is_holding]


def look_at(store: Store, run: RunConfig, *, answered: int | None = None) -> RunProgress:
    """Read it. Raises StoreUnavailableError."""
    counts, told, version = store.counts(), store.roles(), store.run_state().announced_version
    statuses = role_statuses(told, run=run, now=store.now(), announced_version=version)
    return RunProgress(
        counts,
        version,
        generators=tuple(_generator(each, told[each.name]) for each in statuses if each.role == "generator"),
        broker=next((each for each in statuses if each.role == "broker"), None),
        capacity_reason=capacity_reason(run.buffer.capacity, counts),
        answered=answered,
    )


def _generator(status: RoleStatus, gauges: dict[str, Any]) -> GeneratorProgress:
    trajectories = gauges.get("trajectories")
    return GeneratorProgress(status, int(trajectories) if isinstance(trajectories, int | float) else None)


_STARTS_COUNTED = 4
"""A generator that comes to hold weights for the fifth time while nothing arrives is no sign of life any more."""
_LOST = ("rejected", "expired", "quarantined")


class Arrivals:
    """For how long nothing has come that helps the wait: trajectories, answers, a generator that is ready to work.

    A trajectory whose group is let go again has not helped: what counts is how many came and stayed.

    Life: (begin -> note*)*.
    """

    def __init__(self, *, group_size: int, clock: Clock) -> None:
        self._group_size = group_size
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """A wait begins."""
        self._moved_at = self._clock()
        self._base: StoreCounts | None = None
        self._most_kept = 0
        self._most_answered = 0
        self._workers: dict[str, int | None] = {}
        self._num_starts: Counter[str] = Counter()
        self.lost: dict[str, int] = {}
        """Groups let go since the wait began, by `<outcome>: <reason>`."""
        self.refused: dict[str, int] = {}
        """Frames the broker has refused since then, by reason."""
        self.accepted = 0
        """Trajectories stored since then."""

    @property
    def idle_s(self) -> float:
        """Since anything helped last, or since the wait began, seconds."""
        return self._clock() - self._moved_at

    def note(self, look: RunProgress) -> None:
        """Take in a look."""
        if self._base is None:
            self._base = look.counts
            self._most_answered = look.answered or 0
            self._workers = _versions(look)
        base = self._base
        self.accepted = look.counts.accepted - base.accepted
        self.lost = _growth(base.reasons, look.counts.reasons, among=_LOST)
        self.refused = _growth(base.refused, look.counts.refused)
        has_come = [self._kept_more(base, look.counts), self._answered_more(look.answered or 0)]
        if any(has_come):
            self._num_starts.clear()
        if self._works_more(look) or any(has_come):
            self._moved_at = self._clock()

    def _kept_more(self, base: StoreCounts, now: StoreCounts) -> bool:
        """Losses of what was there before the wait do not count against what came since."""
        there = base.open_members + base.ready * self._group_size
        lost = _lost_members(now) - _lost_members(base)
        kept = self.accepted - max(0, lost - there)
        is_more, self._most_kept = kept > self._most_kept, max(kept, self._most_kept)
        return is_more

    def _answered_more(self, answered: int) -> bool:
        is_more, self._most_answered = answered > self._most_answered, max(answered, self._most_answered)
        return is_more

    def _works_more(self, look: RunProgress) -> bool:
        before, self._workers = self._workers, _versions(look)
        started = [name for name, version in self._workers.items() if before.get(name) != version]
        self._num_starts.update(started)
        return any(self._num_starts[name] <= _STARTS_COUNTED for name in started)


class RewardTally:
    """How many trajectories in a row had a reward that failed, as the generators count them, since the first look."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[int, int]] | None = None
        self.num_failed = 0
        """Since one was answered last, all generators together."""

    def note(self, look: RunProgress) -> None:
        """Take in a look."""
        now = {
            generator.status.name: (generator.trajectories, generator.status.rewards_failed)
            for generator in look.living
            if generator.trajectories is not None and generator.status.rewards_failed is not None
        }
        before = now if self._before is None else self._before
        grown = [_grown(before.get(name, (0, 0)), counts) for name, counts in now.items()]
        num_failed = sum(failed for _, failed in grown)
        has_answer = sum(finished for finished, _ in grown) > num_failed
        self.num_failed = 0 if has_answer else self.num_failed + num_failed
        self._before = before | now


class AdoptionLag:
    """For how long no living generator has come nearer to the learner's newest version."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._newest = -1
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """0 while one holds it, and while nobody holds any version."""
        return 0.0 if self._since is None else self._clock() - self._since

    def note(self, look: RunProgress) -> None:
        """Take in a look. Between two looks a whole step may lie: it starts to count at the first that shows a lag."""
        newest = max((generator.status.version or 0 for generator in look.holding), default=-1)
        if newest == -1 or newest >= look.announced_version:
            self._since = None
        elif newest > self._newest or self._since is None:
            self._since = self._clock()
        self._newest = newest


def _grown(before: tuple[int, int], now: tuple[int, int]) -> tuple[int, int]:
    """Trajectories finished and failed meanwhile; who has fewer than before was started again and counts anew."""
    return now if now[0] < before[0] else (now[0] - before[0], now[1] - before[1])


def _versions(look: RunProgress) -> dict[str, int | None]:
    """What each generator works with."""
    return {generator.status.name: generator.status.version for generator in look.holding}


def _growth(before: dict[str, int], now: dict[str, int], *, among: tuple[str, ...] = ("",)) -> dict[str, int]:
    grown = {name: count - before.get(name, 0) for name, count in now.items() if name.startswith(among)}
    return {name: count for name, count in grown.items() if count > 0}


def _lost_members(counts: StoreCounts) -> int:
    return sum(counts.outcome_members.get(outcome, 0) for outcome in _LOST)
