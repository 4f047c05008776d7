"""`python -m buffer stats`: how many there are of what, and how rewards, lengths and lags are distributed."""

from collections.abc import Iterable

from rich.table import Table

from slipstream.buffer.accounting import Audit
from slipstream.buffer.archive.archive import ArchiveCheck
from slipstream.buffer.archive.trajectory_filter import GROUP_STATES, StoredTrajectory
from slipstream.buffer.cli.show import add_row, distribution, make_table

# @@ `python -m buffer verify`: the books of a run, or every byte of an archive.
_ADDENDS = ("buffered", "claimed", "used", "retired", "rejected", "expired", "quarantined")


def tell_audit(books: Audit) -> list[str]:
    """The sums of a store, and what is wrong with them."""
    sums = " + ".join(f"{name} {getattr(books, name)}" for name in _ADDENDS)
    total = sum(getattr(books, name) for name in _ADDENDS)
    return [
        f"accepted = {' + '.join(_ADDENDS)}",
        f"{books.accepted} {'=' if books.accepted == total else 'is not'} {total} = {sums}",
        f"lost={books.lost} duplicated={books.duplicated} skipped_prompts={books.skipped_prompts}",
        *books.problems,
    ]


def tell_check(check: ArchiveCheck) -> list[str]:
    """The sums of an archive, and what is wrong with it."""
    return [
        f"{check.shards} shards, {check.groups} groups, {check.trajectories} trajectories, {check.steps} steps",
        f"damaged={check.damaged} duplicated={check.duplicated} missing={check.missing}",
        *check.problems,
    ]


_POINTS = ("mean", "least", "10%", "median", "90%", "greatest")


class Tally:
    """Numbers of one kind of trajectory; a few per trajectory are kept, no tokens."""

    def __init__(self) -> None:
        self.groups: set[str] = set()
        self.num_sampled = 0
        self.num_correct = 0
        self.num_failed = 0
        self.rewards: list[float] = []
        self.tokens: list[float] = []
        self.response_tokens: list[float] = []
        self.lags: list[float] = []

    def add(self, stored: StoredTrajectory, *, step_versions: dict[int, int]) -> None:
        """Count one. A trajectory trained on twice has two lags; a failed reward function gave no reward.

        Rewards are those of sampled trajectories: a greedy baseline would shift them.
        """
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


class Stats:
    """Tallies of all, by outcome, by why groups fell out, and by data source."""

    def __init__(self, found: Iterable[StoredTrajectory], *, step_versions: dict[int, int]) -> None:
        """Reads `found` to its end."""
        self.all = Tally()
        self.by_outcome: dict[str, Tally] = {}
        self.by_reason: dict[str, Tally] = {}
        self.by_data_source: dict[str, Tally] = {}
        for stored in found:
            tallies = [
                self.all,
                self.by_outcome.setdefault(stored.state, Tally()),
                self.by_data_source.setdefault(stored.trajectory.data_source, Tally()),
            ]
            if stored.reason:
                tallies.append(self.by_reason.setdefault(f"{stored.state}: {stored.reason}", Tally()))
            for tally in tallies:
                tally.add(stored, step_versions=step_versions)

    def tables(self) -> list[Table]:
        """Counts by outcome, by reason where there is any, by data source, and the distributions over all."""
        outcomes = {place: self.by_outcome[place] for place in GROUP_STATES if place in self.by_outcome}
        kinds = {"outcome": outcomes, "reason": self.by_reason, "data source": self.by_data_source}
        return [*(_counts(title, tallies) for title, tallies in kinds.items() if tallies), _distributions(self.all)]


def _counts(title: str, kinds: dict[str, Tally]) -> Table:
    numbers = ("groups", "trajectories", "mean reward", "right", "failed", "mean tokens", "mean response", "mean lag")
    table = make_table(title, *numbers, numbers=numbers)
    for kind, tally in kinds.items():
        means = (_mean(tally.tokens), _mean(tally.response_tokens), _mean(tally.lags))
        count = len(tally.tokens)
        right = f"{tally.num_correct / max(1, tally.num_sampled):.1%}"
        add_row(table, kind, len(tally.groups), count, _mean(tally.rewards), right, tally.num_failed, *means)
    return table


def _distributions(tally: Tally) -> Table:
    table = make_table("", *_POINTS, numbers=_POINTS)
    measures = {"reward": tally.rewards, "tokens": tally.tokens, "response tokens": tally.response_tokens}
    for name, values in (measures | {"lag": tally.lags}).items():
        if values:
            add_row(table, name, *distribution(values))
    return table


def _mean(values: list[float]) -> str:
    return f"{sum(values) / len(values):.4g}" if values else "-"
