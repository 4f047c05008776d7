"""Statistics of trajectories, and the results of verify."""

from collections import Counter
from collections.abc import Iterable

from rich.table import Table

from slipstream.buffer.accounting import Audit
from slipstream.buffer.archive.archive import ArchiveCheck
from slipstream.buffer.archive.trajectory_filter import GROUP_STATES, StoredTrajectory
from slipstream.buffer.cli.show import distribution
from slipstream.buffer.trajectory import lag_histogram
from slipstream.runtime.console import add_row, make_table

# --- verify ----------------------------------------------------------------------------------------------------------
_ADDENDS = ("buffered", "claimed", "used", "retired", "rejected", "expired", "quarantined")


def describe_audit(audit: Audit) -> list[str]:
    """Return the sums of a store and its problems, a line each."""
    sums = " + ".join(f"{name} {getattr(audit, name)}" for name in _ADDENDS)
    total = sum(getattr(audit, name) for name in _ADDENDS)
    return [
        f"accepted = {' + '.join(_ADDENDS)}",
        f"{audit.accepted} {'=' if audit.accepted == total else 'is not'} {total} = {sums}",
        f"lost={audit.lost} duplicated={audit.duplicated} skipped_prompts={audit.skipped_prompts}",
        *audit.problems,
    ]


def describe_check(check: ArchiveCheck) -> list[str]:
    """Return the sums of an archive and its problems, a line each."""
    return [
        f"{check.shards} shards, {check.groups} groups, {check.trajectories} trajectories, {check.steps} steps",
        f"damaged={check.damaged} duplicated={check.duplicated} missing={check.missing}",
        *check.problems,
    ]


# --- stats -----------------------------------------------------------------------------------------------------------
_POINTS = ("mean", "least", "10%", "median", "90%", "greatest")


class _Totals:
    """Numbers of one kind of trajectory: a few per trajectory, no tokens."""

    def __init__(self) -> None:
        self.groups: set[str] = set()
        self.num_sampled = 0
        self.num_correct = 0
        self.num_failed = 0
        self.rewards: list[float] = []
        self.tokens: list[float] = []
        self.response_tokens: list[float] = []
        self.lags: list[float] = []
        """Lag of the oldest model-written token, once for each step that trained on the trajectory."""
        self.lags_of_tokens = Counter[int]()
        """Lag -> model-written tokens, each once for each step that trained on it, as `lag/histogram` has them."""

    def add(self, stored: StoredTrajectory, *, step_versions: dict[int, int]) -> None:
        # A trajectory trained on twice has two lags; one whose reward function failed has no reward. Rewards are those
        # of sampled trajectories: greedy baselines would shift them.
        trajectory = stored.trajectory
        self.groups.add(trajectory.group_id)
        is_ok = trajectory.reward.status == "ok"
        self.num_failed += not is_ok
        if not trajectory.is_greedy:
            self.num_sampled += 1
            self.num_correct += trajectory.reward.is_correct and is_ok
        if is_ok and not trajectory.is_greedy:
            self.rewards.append(trajectory.reward.total)
        self.tokens.append(trajectory.num_tokens)
        self.response_tokens.append(stored.response_tokens)
        learner_versions = [step_versions[step] for step in stored.steps if step in step_versions]
        self.lags += [version - stored.oldest_version for version in learner_versions]
        for version in learner_versions:
            self.lags_of_tokens.update(lag_histogram([trajectory], learner_version=version))


class TrajectoryStats:
    """Totals of all trajectories, by outcome, by reason, and by data source."""

    def __init__(self, found: Iterable[StoredTrajectory], *, step_versions: dict[int, int]) -> None:
        """Read `found` to its end."""
        self.all = _Totals()
        self.by_outcome: dict[str, _Totals] = {}
        self.by_reason: dict[str, _Totals] = {}
        self.by_data_source: dict[str, _Totals] = {}
        for stored in found:
            matching = [
                self.all,
                self.by_outcome.setdefault(stored.state, _Totals()),
                self.by_data_source.setdefault(stored.trajectory.data_source, _Totals()),
            ]
            if stored.reason:
                matching.append(self.by_reason.setdefault(f"{stored.state}: {stored.reason}", _Totals()))
            for totals in matching:
                totals.add(stored, step_versions=step_versions)

    def tables(self) -> list[Table]:
        """Return counts by outcome, reason and data source, and the distributions; nothing if nothing was found."""
        if not self.all.tokens:
            return []
        outcomes = {state: self.by_outcome[state] for state in GROUP_STATES if state in self.by_outcome}
        kinds = {"outcome": outcomes, "reason": self.by_reason, "data source": self.by_data_source}
        return [*(_counts(title, totals) for title, totals in kinds.items() if totals), _distributions(self.all)]


def _counts(title: str, kinds: dict[str, _Totals]) -> Table:
    columns = ("groups", "trajectories", "mean reward", "right", "failed")
    numbers = (*columns, "mean tokens", "mean response", "mean lag of tokens")
    table = make_table(title, *numbers, numbers=numbers)
    for kind, totals in kinds.items():
        num_lags = totals.lags_of_tokens.total()
        lag = f"{sum(lag * n for lag, n in totals.lags_of_tokens.items()) / num_lags:.4g}" if num_lags else "-"
        means = (_mean(totals.tokens), _mean(totals.response_tokens), lag)
        right = f"{totals.num_correct / max(1, totals.num_sampled):.1%}"
        counts = (len(totals.groups), len(totals.tokens), _mean(totals.rewards), right, totals.num_failed)
        add_row(table, kind, *counts, *means)
    return table


def _distributions(totals: _Totals) -> Table:
    table = make_table("", *_POINTS, numbers=_POINTS)
    measures = {"reward": totals.rewards, "tokens": totals.tokens, "response tokens": totals.response_tokens}
    for name, values in (measures | {"lag of the oldest token": totals.lags}).items():
        if values:
            add_row(table, name, *distribution(values))
    return table


def _mean(values: list[float]) -> str:
    return f"{sum(values) / len(values):.4g}" if values else "-"
