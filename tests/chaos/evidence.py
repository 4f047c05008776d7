"""Evidence: all journals of a run under chaos, and its final records."""

from collections.abc import Iterable
from typing import NamedTuple

from tests.chaos.outcome import Stored, Trained
from tests.chaos.watched.journal import Entry, Life

SLACK_S = 2.0
"""Added to the time that a strike explains, because processes start slowly on a busy machine."""


class Times(NamedTuple):
    """Settings of the run that rules depend on, seconds. Example: Times(lease_s=2.5, peer_timeout_s=1.5)."""

    lease_s: float
    """Time that a lease or a claim lasts without a renewal."""
    peer_timeout_s: float


class Evidence:
    def __init__(
        self,
        lives: list[Life],
        *,
        stored: list[Stored],
        lineage: list[Trained],
        times: Times,
        max_lag: int,
        skipped: Iterable[int] = (),
    ) -> None:
        self.generators = [life for life in lives if life.role.startswith("generator") and life.of("hello")]
        self.learners = [life for life in lives if life.role == "learner"]
        self.brokers = [life for life in lives if life.role == "broker"]
        self.harness = next(life for life in lives if life.role == "harness")
        self.stored = {each.id: each for each in stored}
        self.stored_at = {(each.sample[0], each.sample[2]): each for each in stored}
        self.lineage = lineage
        self.skipped = {str(ordinal) for ordinal in skipped}
        self.times = times
        self.max_lag = max_lag
        self._commits: dict[str, float] = {}
        for entry in self.of_learners("committing"):
            for group in entry["groups"]:
                self._commits[group] = min(entry["t"], self._commits.get(group, entry["t"]))

    def of_learners(self, *kinds: str) -> list[Entry]:
        return sorted((entry for life in self.learners for entry in life.of(*kinds)), key=lambda entry: entry["t"])

    def first_commit_at(self, group: str) -> float:
        """Time of the first attempt to commit a step with the group; until then the store has its record."""
        return self._commits.get(group, float("inf"))

    def owner(self, life: Life) -> str:
        return f"{life.role}/{life.of('hello')[0]['incarnation']}"

    def successor_began_at(self, life: Life) -> float:
        """Start of the role's next process; infinite for the last."""
        later = [each.began_at for each in self.generators if each.role == life.role and each.began_at > life.began_at]
        return min(later, default=float("inf"))

    def is_quiet(self, roles: Iterable[str], *, since: float, until: float) -> bool:
        """Whether no role was struck or recovering in that time."""
        away: dict[str, float | None] = {}
        for entry in self.harness.of("down", "up", "stop", "continue", "full", "room"):
            role = entry.get("role", "store")
            if role not in roles:
                continue
            if entry["k"] in ("down", "stop", "full"):
                away.setdefault(role, entry["t"])
                if since - SLACK_S <= entry["t"] <= until:
                    return False
            elif (began := away.pop(role, None)) is not None and began <= until:
                served_at = entry["t"]
                if (role, entry["k"]) == ("broker", "up"):
                    # A broker serves no peer before the start of its journal.
                    later = (life.began_at for life in self.brokers if life.began_at >= entry["t"])
                    served_at = min(later, default=float("inf"))
                if served_at + SLACK_S >= since:
                    return False
        return not any(began is not None and began <= until for began in away.values())


def genuine(life: Life) -> dict[str, Entry]:
    """Return undamaged training trajectories that a process recorded before sending, by id."""
    return {each["id"]: each for each in life.of("put") if each["purpose"] == "train" and not each["spoiled"]}


def first_acks(life: Life) -> dict[str, float]:
    acks: dict[str, float] = {}
    for entry in life.of("acked"):
        for trajectory_id in entry["ids"]:
            acks.setdefault(trajectory_id, entry["t"])
    return acks
