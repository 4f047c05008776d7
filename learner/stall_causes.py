"""Stall causes: why a wait of the learner will not end, from the store's counts and the roles' progress.

Root causes come first: a dead broker makes generators look silent, and a generator without weights sends nothing.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from slipstream.buffer.accounting import REJECTION_REASONS, StoreCounts
from slipstream.buffer.role_reports import RoleStatus, last_heard, role_statuses
from slipstream.buffer.store import Store
from slipstream.configs.engines import START_STALLS, VllmEngineConfig
from slipstream.configs.run import RunConfig
from slipstream.runtime.clock import Clock

_MAX_COUNTED_STARTS = 4
"""Starts of one generator that count as progress: a crash loop must not hide a dead end."""
_LOSSES = ("rejected", "expired", "quarantined")
_MAX_FAILED_STEPS = 2
"""Consecutive steps without any reward. One may be a short grader outage."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of a run in its store at one moment."""

    counts: StoreCounts
    announced_version: int
    """Newest announced version."""
    broker: RoleStatus | None = None
    """None before its first report."""
    generators: tuple[RoleStatus, ...] = ()
    """All that ever reported."""
    rewarded: int = 0
    """Trajectories with a reward since each live generator's start."""
    unrewarded: int = 0
    """Trajectories with a failed reward function, likewise."""
    answered: int | None = None
    """Answers of the awaited evaluation; None while waiting for groups."""

    @property
    def live(self) -> list[RoleStatus]:
        return [generator for generator in self.generators if generator.is_alive]

    @property
    def synced(self) -> list[RoleStatus]:
        """Live generators with verified weights."""
        return [each for each in self.live if each.state in ("ready", "updating") and each.version is not None]


def take_snapshot(store: Store, run: RunConfig, *, answered: int | None = None) -> Snapshot:
    """Read the state of run and roles from the store. Raises StoreUnavailableError."""
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
        answered=answered,
    )


class Progress:
    """The newest snapshot and the changes up to it. Life: (begin -> update*)*, one `begin` per wait.

    Tracks rewards and applied versions across waits: both can fail while every wait succeeds.
    """

    now: Snapshot
    idle_s: float
    """Time since the last progress, or since the wait began."""
    served_s: float
    """Time since a generator first had verified weights in this wait."""
    outdated_s: float
    """Time since a generator applied newer weights; 0 while one holds the newest or none any."""
    accepted: int
    """Trajectories stored since the wait began."""
    losses: dict[str, int]
    """Groups lost since then, by `<outcome>: <reason>`."""
    refused: dict[str, int]
    """Frames that the broker rejected since then, by reason."""

    def __init__(self, run: RunConfig, *, clock: Clock) -> None:
        self.run = run
        self.failed_rewards = 0
        """Trajectories since the last one with a reward."""
        self.rewards_have_failed = False
        """Whether `failed_rewards` is a cause."""
        self._max_failed_rewards = _MAX_FAILED_STEPS * run.claimed_groups_per_step * run.generators.group_size
        self._clock = clock
        self._rewards: tuple[int, int] | None = None
        self._newest_held = -1
        self._version_lag = 0
        self._applied_at = clock()

    def begin(self) -> None:
        self._progressed_at = self._clock()
        self._served_since: float | None = None
        self._base: StoreCounts | None = None
        self._most_arrived: tuple[int, ...] = (0, 0)

    def excuse(self) -> None:
        """Restart the clocks: nothing could arrive until now."""
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
        rewarded, unrewarded = self._rewards or (now.rewarded, now.unrewarded)
        self._rewards = (now.rewarded, now.unrewarded)
        if now.rewarded > rewarded:
            self.failed_rewards, self.rewards_have_failed = 0, False
        else:
            # Both sums shrink when a generator leaves or restarts.
            self.failed_rewards += max(0, now.unrewarded - unrewarded)
            self.rewards_have_failed |= self.failed_rewards >= self._max_failed_rewards
        newest = max((generator.version or 0 for generator in now.synced), default=-1)
        before, self._version_lag = self._version_lag, now.announced_version - newest if now.synced else 0
        # Count from the first snapshot with a lag: a whole training step may precede it.
        if self._version_lag <= 0 or before <= 0 or newest > self._newest_held:
            self._applied_at = now_s
        self._newest_held = newest
        self.outdated_s = now_s - self._applied_at

    def _has_progressed(self, base: StoreCounts) -> bool:
        """Whether a kept trajectory or an answer arrived, or a generator started or changed weights."""
        # Trajectories of lost groups are not progress, but losses among earlier ones do not cancel new arrivals.
        stored_before = base.open_members + base.ready * self.run.members_per_group
        lost = _lost_members(self.now.counts) - _lost_members(base)
        arrived = (self.accepted - max(0, lost - stored_before), self.now.answered or 0)
        before, self._most_arrived = self._most_arrived, tuple(map(max, arrived, self._most_arrived))
        has_arrived = self._most_arrived != before
        if has_arrived:
            self._num_starts.clear()
        held, self._held = self._held, _held_versions(self.now)
        # The end of a start is progress, so fetching the first weights gets its full time.
        started = [name for name, new in self._held.items() if name not in held or new not in (None, held[name])]
        self._num_starts.update(started)
        return has_arrived or any(self._num_starts[name] <= _MAX_COUNTED_STARTS for name in started)

    def record_no_reward(self, *, num_failed: int) -> None:
        """An evaluation without any reward in its `num_failed` answers is a cause."""
        self.failed_rewards, self.rewards_have_failed = max(self.failed_rewards, num_failed), True
        # Generators may report these answers only now, so the next report is the new baseline.
        self._rewards = None


def _held_versions(now: Snapshot) -> dict[str, int | None]:
    """Verified version of each live, started generator; None before its first."""
    verified = {generator.name: generator.version for generator in now.synced}
    return {each.name: verified.get(each.name) for each in now.live if each.state != "starting"}


def _growth(before: dict[str, int], now: dict[str, int], *, prefixes: tuple[str, ...] = ("",)) -> dict[str, int]:
    grown = {name: count - before.get(name, 0) for name, count in now.items() if name.startswith(prefixes)}
    return {name: count for name, count in grown.items() if count > 0}


def _lost_members(counts: StoreCounts) -> int:
    return sum(counts.outcome_members.get(outcome, 0) for outcome in _LOSSES)


Kind = Literal[
    "broker", "generators", "start", "weights", "outdated", "rewards", "filtered", "lost", "refused", "store",
    "silence", "slow",
]  # fmt: skip

_MOST_NAMED = 3
_SLOW_S = 1800.0
"""Limit of a wait with progress, or three times `learner.stall.timeout_s` if that is longer."""
_SEE_LOGS = "see their logs and the events"


@dataclass(frozen=True, slots=True)
class StallCause:
    """Example: StallCause("generators", "no generator is alive ...", "start one with ...")."""

    kind: Kind
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.problem}: {self.remedy}"


def find_cause(progress: Progress) -> StallCause | None:
    """First cause past its deadline; None while the wait may still end."""
    run = progress.run
    checks: list[Callable[[Progress], StallCause | None]] = []
    # A replay trains on stored rewards.
    if progress.rewards_have_failed and run.mode != "replay":
        checks.append(_rewards_failed)
    if progress.outdated_s >= run.learner.stall.timeout_s + run.weights.fetch_timeout_s:
        checks.append(_weights_outdated)
    # Loading a model and fetching weights get longer limits.
    live, longer_s = progress.now.live, 0.0
    if any(each.state == "starting" or each.waits_for == "transfer" for each in live):
        longer_s = run.weights.fetch_timeout_s
    if any(each.state == "starting" for each in live) and isinstance(run.generators.engine, VllmEngineConfig):
        # The generator's own start timeout, with the reason, fires first.
        longer_s = max(longer_s, START_STALLS * run.learner.stall.timeout_s)
    if progress.idle_s >= run.learner.stall.timeout_s + longer_s:
        checks += [
            _broker_dead, _generators_dead, _weights_missing, _weights_outdated, _rewards_failed, _groups_lost,
            _frames_refused, _store_full, _generators_silent,
        ]  # fmt: skip
    if progress.served_s >= max(_SLOW_S, 3 * run.learner.stall.timeout_s):
        checks.append(_too_slow)
    return next(filter(None, (check(progress) for check in checks)), None)


def _broker_dead(progress: Progress) -> StallCause | None:
    broker = progress.now.broker
    if broker and broker.is_alive:
        return None
    since = f"has been silent for {broker.report_age_s:.0f} s" if broker else "has never reported"
    remedy = "start it with `python -m slipstream.broker` and the settings of this run"
    return StallCause("broker", f"the broker {since}", remedy)


def _generators_dead(progress: Progress) -> StallCause | None:
    if progress.now.live:
        return None
    known = _describe(progress.now.generators) or "none ever joined"
    problem = f"no generator is alive, and nothing has arrived for {progress.idle_s:.0f} s ({known})"
    run = progress.run
    where = f"name={run.name}" if run.runs_dir == "runs" else f"name={run.name} runs_dir={run.runs_dir}"
    return StallCause("generators", problem, f"start one with `python -m slipstream.generators {where}`")


def _weights_missing(progress: Progress) -> StallCause | None:
    if progress.now.synced:
        return None
    is_starting = all(each.state == "starting" for each in progress.now.live)
    missing = "has finished its start" if is_starting else "holds verified weights"
    problem = f"no live generator {missing} after {progress.idle_s:.0f} s ({_describe(progress.now.live)})"
    return StallCause("start" if is_starting else "weights", problem, _SEE_LOGS)


def _weights_outdated(progress: Progress) -> StallCause | None:
    version = progress.now.announced_version
    if any(generator.version == version for generator in progress.now.synced):
        return None
    problem = f"no live generator has applied version {version} ({_describe(progress.now.live)})"
    return StallCause("outdated", problem, _SEE_LOGS)


def _rewards_failed(progress: Progress) -> StallCause | None:
    return no_reward(progress.run, num_failed=progress.failed_rewards) if progress.failed_rewards else None


def no_reward(run: RunConfig, *, num_failed: int) -> StallCause:
    """Cause of `num_failed` consecutive trajectories without a reward."""
    called = f"every call of {run.generators.reward.summary} failed or timed out"
    problem = f"none of the last {num_failed} trajectories has a reward, {called}"
    timeout_s = run.generators.reward.timeout_s
    return StallCause("rewards", problem, f"fix it, or raise generators.reward.timeout_s ({timeout_s:g} s)")


def _groups_lost(progress: Progress) -> StallCause | None:
    # Lost groups do not delay an evaluation.
    if not progress.losses or progress.now.answered is not None:
        return None
    lost = f"every group that arrived in {progress.idle_s:.0f} s ({_count(progress.losses)})"
    if set(progress.losses) <= {f"rejected: {flaw}" for flaw in REJECTION_REASONS}:
        remedy = (
            "start a new run with easier or harder prompts, a larger generators.group_size, or a looser buffer.filter"
        )
        return StallCause("filtered", f"buffer.filter rejected {lost}", remedy)
    remedy = "speed up generators, or loosen staleness, group_deadline or max_attempts in a new run"
    generators = _describe(progress.now.live)
    return StallCause("lost", f"the buffer dropped {lost}{generators and f' ({generators})'}", remedy)


def _frames_refused(progress: Progress) -> StallCause | None:
    if not progress.refused:
        return None
    problem = f"the broker has rejected incoming frames for {progress.idle_s:.0f} s ({_count(progress.refused)})"
    return StallCause("refused", problem, "run generators and broker from one version; see the broker's log")


def _store_full(progress: Progress) -> StallCause | None:
    broker = progress.now.broker
    if not (reason := broker.reason if broker and broker.waits_for == "store" else ""):
        return None
    problem = f"the store accepts nothing more ({reason})"
    return StallCause("store", problem, "free space, or raise the limit named there")


def _generators_silent(progress: Progress) -> StallCause:
    synced = _describe(progress.now.synced)
    problem = f"nothing has arrived for {progress.idle_s:.0f} s from generators with verified weights ({synced})"
    return StallCause("silence", problem, "read their logs; for slow trajectories, raise learner.stall.timeout_s")


def _too_slow(progress: Progress) -> StallCause:
    problem = f"it is incomplete after {progress.served_s:.0f} s, in which {progress.accepted} trajectories arrived"
    return StallCause("slow", problem, "start more generators, or raise learner.stall.timeout_s")


def _describe(generators: Sequence[RoleStatus]) -> str:
    newest = sorted(generators, key=lambda generator: generator.report_age_s)
    more = [f"and {len(newest) - _MOST_NAMED} more"] if len(newest) > _MOST_NAMED else []
    shown = []
    for each in newest[:_MOST_NAMED]:
        holds = "no weights" if each.version is None else f"version {each.version}"
        running = f", {each.running} trajectories running" if each.running else ""
        alive, silent = f"{each.state} with {holds}{running}", f"{each.liveness} for {each.report_age_s:.0f} s"
        state = f"is {alive}" if each.is_alive else f"has been {silent}"
        shown.append(f"{each.name} {state}{f': {each.reason}' if each.reason else ''}")
    return ", ".join([*shown, *more])


def _count(counts: dict[str, int]) -> str:
    largest_first = sorted(counts.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{count} {name}" for name, count in largest_first[:_MOST_NAMED])
