"""Progress of a run while the learner waits: what the store shows now, and what has changed since the wait began."""

from collections import Counter
from dataclasses import dataclass

from slipstream.broker.admission import capacity_reason
from slipstream.broker.status.role_status import RoleStatus, last_heard, role_statuses
from slipstream.buffer.accounting import StoreCounts
from slipstream.buffer.store import Store
from slipstream.configs.run import RunConfig
from slipstream.runtime.clock import Clock

_MAX_COUNTED_STARTS = 4
"""Changes of one generator that count as progress while nothing arrives: a crash loop must not hide a dead end."""
_LOSSES = ("rejected", "expired", "quarantined")
_MAX_FAILED_STEPS = 2
"""Steps in a row without any reward: one may meet an outage of the grader, a second one is no accident."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run as its store shows it at one moment."""

    counts: StoreCounts
    announced_version: int
    """Newest version the learner has made."""
    broker: RoleStatus | None = None
    """None before its first report."""
    generators: tuple[RoleStatus, ...] = ()
    """All generators that ever reported."""
    rewarded: int = 0
    """Trajectories with a reward that the living generators have finished since they started."""
    unrewarded: int = 0
    """Their trajectories whose reward function failed."""
    capacity_reason: str = ""
    """Limit that keeps the store from admitting more; empty while there is room."""
    answered: int | None = None
    """Answers of the awaited evaluation; None while groups are awaited."""

    @property
    def living(self) -> list[RoleStatus]:
        return [generator for generator in self.generators if generator.is_alive]

    @property
    def synced(self) -> list[RoleStatus]:
        """Living generators with verified weights."""
        return [each for each in self.living if each.state in ("ready", "updating") and each.version is not None]


def take_snapshot(store: Store, run: RunConfig, *, answered: int | None = None) -> Snapshot:
    """Read the store. Raises StoreUnavailableError."""
    counts, gauges, version = store.counts(), store.roles(), store.run_state().announced_version
    roles = role_statuses(gauges, run=run, now=store.now(), announced_version=version)
    generators = tuple(role for role in roles if role.role == "generator")
    finished = [(gauges[each.name].get("trajectories"), each.rewards_failed) for each in generators if each.is_alive]
    pairs = [(int(all_), failed) for all_, failed in finished if isinstance(all_, int | float) and failed is not None]
    return Snapshot(
        counts,
        version,
        broker=last_heard(roles, "broker"),
        generators=generators,
        rewarded=sum(all_ - failed for all_, failed in pairs),
        unrewarded=sum(failed for _, failed in pairs),
        capacity_reason=capacity_reason(run.buffer.capacity, counts),
        answered=answered,
    )


class Progress:
    """The newest snapshot, and what has changed up to it. Life: (begin -> update*)*, one `begin` per wait.

    Rewards and applied versions are followed across waits: both can fail while every single wait succeeds.
    """

    now: Snapshot
    idle_s: float
    """Since anything helped the wait, or since it began, seconds."""
    served_s: float
    """Since a generator could first work for the wait, seconds."""
    outdated_s: float
    """Since a generator last applied newer weights, seconds; 0 while one holds the newest or none holds any."""
    accepted: int
    """Trajectories stored since the wait began."""
    losses: dict[str, int]
    """Groups lost since the wait began, by `<outcome>: <reason>`."""
    refused: dict[str, int]
    """Frames the broker refused since the wait began, by reason."""

    def __init__(self, run: RunConfig, *, clock: Clock) -> None:
        self.run = run
        self.failed_rewards = 0
        """Trajectories without a reward since the last one with a reward."""
        self.rewards_have_failed = False
        """Whether those are too many to be an accident."""
        self._max_failed_rewards = _MAX_FAILED_STEPS * run.claimed_groups_per_step * run.generators.group_size
        self._clock = clock
        self._rewards: tuple[int, int] | None = None
        self._newest_held = -1
        self._version_lag = 0
        self._applied_at = clock()

    def begin(self, *, limit_s: float, limit_setting: str) -> None:
        """Start a wait that may last `limit_s`, the value of that setting, once a generator can work for it."""
        self.limit_s, self.limit_setting = limit_s, limit_setting
        self._progressed_at = self._clock()
        self._served_since: float | None = None
        self._base: StoreCounts | None = None
        self._most_arrived: tuple[int, ...] = (0, 0)

    def excuse(self) -> None:
        """Nothing could arrive or be reported up to now: a standstill counts from here."""
        self._progressed_at = self._applied_at = self._clock()
        if self._served_since is not None:
            self._served_since = self._clock()

    def update(self, now: Snapshot) -> None:
        self.now, now_s = now, self._clock()
        if self._base is None:
            self._base, self._most_arrived, self._held = now.counts, (0, now.answered or 0), _held_versions(now)
            self._num_starts: Counter[str] = Counter()
        self.accepted = now.counts.accepted - self._base.accepted
        self.losses = _growth(self._base.reasons, now.counts.reasons, prefixes=_LOSSES)
        self.refused = _growth(self._base.refused, now.counts.refused)
        if self._has_progressed(self._base):
            self._progressed_at = now_s
        if now.synced and self._served_since is None:
            self._served_since = now_s
        self.idle_s = now_s - self._progressed_at
        self.served_s = 0.0 if self._served_since is None else now_s - self._served_since
        self._track_rewards(now)
        self._track_updates(now, now_s)

    def _has_progressed(self, base: StoreCounts) -> bool:
        """Whether a trajectory came and stayed, an answer came, or a generator ended its start or has other weights."""
        # A trajectory whose group is lost has not helped. Losses of what was stored before the wait are subtracted:
        # they do not count against what came since.
        stored_before = base.open_members + base.ready * self.run.generators.members_per_group
        lost = _lost_members(self.now.counts) - _lost_members(base)
        arrived = (self.accepted - max(0, lost - stored_before), self.now.answered or 0)
        before, self._most_arrived = self._most_arrived, tuple(map(max, arrived, self._most_arrived))
        has_arrived = self._most_arrived != before
        if has_arrived:
            self._num_starts.clear()
        held, self._held = self._held, _held_versions(self.now)
        # The end of a start counts by itself: fetching the first weights has its time after a start that took longer.
        started = [
            name
            for name, version in self._held.items()
            if name not in held or (version is not None and version != held[name])
        ]
        self._num_starts.update(started)
        return has_arrived or any(self._num_starts[name] <= _MAX_COUNTED_STARTS for name in started)

    def record_no_reward(self, *, num_failed: int) -> None:
        """Count an evaluation of `num_failed` answers without a single reward: it needs no second one to be a cause."""
        self.failed_rewards, self.rewards_have_failed = max(self.failed_rewards, num_failed), True
        # The generators may report these answers only now: what counts comes after their next report.
        self._rewards = None

    def _track_rewards(self, now: Snapshot) -> None:
        rewarded, unrewarded = self._rewards or (now.rewarded, now.unrewarded)
        self._rewards = (now.rewarded, now.unrewarded)
        # Both sums shrink when a generator leaves or restarts: that is neither a reward nor a failed one.
        grown = max(0, now.unrewarded - unrewarded)
        if now.rewarded > rewarded:
            self.failed_rewards, self.rewards_have_failed = 0, False
        else:
            self.failed_rewards += grown
            self.rewards_have_failed |= self.failed_rewards >= self._max_failed_rewards

    def _track_updates(self, now: Snapshot, now_s: float) -> None:
        newest = max((generator.version or 0 for generator in now.synced), default=-1)
        before, self._version_lag = self._version_lag, now.announced_version - newest if now.synced else 0
        # Counted from the first snapshot that shows a lag: a whole training step may lie before it.
        if self._version_lag <= 0 or before <= 0 or newest > self._newest_held:
            self._applied_at = now_s
        self._newest_held = newest
        self.outdated_s = now_s - self._applied_at


def _held_versions(now: Snapshot) -> dict[str, int | None]:
    """Verified version of each living generator that has ended its start; None before its first."""
    verified = {generator.name: generator.version for generator in now.synced}
    return {each.name: verified.get(each.name) for each in now.living if each.state != "starting"}


def _growth(before: dict[str, int], now: dict[str, int], *, prefixes: tuple[str, ...] = ("",)) -> dict[str, int]:
    grown = {name: count - before.get(name, 0) for name, count in now.items() if name.startswith(prefixes)}
    return {name: count for name, count in grown.items() if count > 0}


def _lost_members(counts: StoreCounts) -> int:
    return sum(counts.outcome_members.get(outcome, 0) for outcome in _LOSSES)
