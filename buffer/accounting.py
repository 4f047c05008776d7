"""A store's counters, and an audit that recomputes them from the stored data."""

from collections import Counter

from slipstream.buffer.records import StepEntry
from slipstream.configs.base import Record

REJECTION_REASONS = ("no_reward", "zero_advantage", "too_hard", "too_easy")
"""Reasons of `buffer.filter`: no sampled member has a reward, all rewards are equal, or the success rate is too low or
too high.
"""
_MAX_NAMED = 5
"""Groups or steps listed per problem of an audit."""


class StoreCounts(Record):
    """Counters of a store at one instant, in groups unless stated otherwise.

    Invariant: accepted == open_members + group_size * (ready + claimed + used) - short_members + sum of
    outcome_members.
    """

    admitted: int
    """Training prompts ever leased, minus those that ended without being trained on."""
    leased: int
    returned: int
    """Training prompts waiting for another lease."""
    open: int
    """Groups with some but not all members."""
    ready: int
    claimed: int
    used: int
    """Groups trained on, and reusable or not covered by a durable checkpoint."""
    reusable: int
    """Used groups that may be sampled again."""
    accepted: int
    """Trajectories stored since the run began."""
    duplicates: int
    """Trajectories received again with the same checksum."""
    superseded: int
    """Trajectories for an index that was already filled."""
    refused: dict[str, int]
    """Quarantined frames, by reason."""
    outcomes: dict[str, int]
    """Finished groups, by outcome."""
    outcome_members: dict[str, int]
    reasons: dict[str, int]
    """Finished groups, by `<outcome>: <reason>`."""
    unarchived: int
    open_members: int
    """Trajectories in open groups."""
    short_members: int
    """Missing members of groups that became ready while incomplete."""
    payload_bytes: int
    accepted_tokens: int
    """Model-written tokens ever stored."""
    superseded_tokens: int
    wasted_tokens: int
    """Model-written tokens of groups that ended without being trained on."""
    trained: int
    """Trajectories trained on, counting each use."""
    trained_tokens: int
    """Model-written tokens trained on, counting each use."""
    became_ready: int = 0
    curriculum: dict[str, int] = {}
    """Prompts: `skipped_too_easy`, `skipped_too_hard`, `explored` (outside the band). Measured dataset rows: `rows`, of
    these `rows_too_easy`, `rows_too_hard`.
    """

    @property
    def rows_out_of_band(self) -> int:
        return self.curriculum.get("rows_too_easy", 0) + self.curriculum.get("rows_too_hard", 0)

    @property
    def curriculum_metrics(self) -> dict[str, float]:
        """Metrics; the fraction is 1 before the first measured row."""
        names = ("skipped_too_easy", "skipped_too_hard", "explored")
        in_band = {"buffer/in_band_fraction": 1 - self.rows_out_of_band / max(1, self.curriculum.get("rows", 0))}
        return in_band | {f"buffer/{name}": self.curriculum.get(name, 0) for name in names}

    @property
    def filtered(self) -> int:
        return sum(self.reasons.get(f"rejected: {reason}", 0) for reason in REJECTION_REASONS)

    @property
    def filtered_fraction(self) -> float:
        complete = self.filtered + self.became_ready
        return self.filtered / complete if complete else 0.0

    @property
    def length_bias(self) -> float:
        """Mean length of trained / accepted trajectories; below 1, long ones are underrepresented."""
        if not self.trained or not self.accepted_tokens:
            return 1.0
        return (self.trained_tokens / self.trained) / (self.accepted_tokens / self.accepted)

    @property
    def waste_fraction(self) -> float:
        """Fraction of received tokens discarded without training, not counting masked ones."""
        arrived = self.accepted_tokens + self.superseded_tokens
        return (self.wasted_tokens + self.superseded_tokens) / arrived if arrived else 0.0


class StoreMemory(Record):
    """Memory of a store's server. Example: StoreMemory(used_bytes=52428800, max_bytes=1073741824)."""

    used_bytes: int = 0
    """Whole server, including other runs."""
    max_bytes: int = 0
    """Limit above which the server refuses writes; 0 = none."""


class Audit(Record):
    """Accounting recomputed from the stored data, in trajectories unless stated otherwise.

    Invariant: accepted == buffered + claimed + used + retired + rejected + expired + quarantined.
    """

    accepted: int
    buffered: int
    """In open and ready groups."""
    claimed: int
    used: int
    """Trained on, not yet covered by a durable checkpoint."""
    retired: int
    rejected: int
    """By the run's filter or the learner."""
    expired: int
    """In groups that were too late."""
    quarantined: int
    """In groups that were tried too often."""
    lost: int
    """Acknowledged, but not stored in any group."""
    duplicated: int
    """Trajectories in two states, or trained on too often."""
    skipped_prompts: int
    """Prompts that were admitted but have no state."""
    problems: list[str] = []
    """One sentence per inconsistency."""

    @property
    def is_sound(self) -> bool:
        return not (self.lost or self.duplicated or self.skipped_prompts or self.problems)


class Snapshot(Record):
    """Input of an audit, read atomically.

    Example: Snapshot(next_ordinal=3, max_uses=1, accepted=4, groups={"leased": ["2"], "ready": ["1"], "used": ["0"]},
        members={"0": (2, 2), "1": (2, 2), "2": (0, 0)}, done=[], outcome_members={}, ledger=[StepEntry(step=1, ...)])
    """

    next_ordinal: int
    max_uses: int
    accepted: int
    groups: dict[str, list[str]]
    """State (leased, returned, ready, claimed, used) -> training groups."""
    members: dict[str, tuple[int, int]]
    """Group -> (members counted, payloads stored)."""
    done: list[int]
    outcome_members: dict[str, int]
    ledger: list[StepEntry]
    """Archived entries up to `archived_step`, then the store's."""
    archived_step: int = 0
    """Newest step with its entry only in the archive."""


def audit(snapshot: Snapshot) -> Audit:
    """Recompute the accounting, and list inconsistencies."""
    states = _states_of(snapshot)
    held = {state: sum(snapshot.members[group][0] for group in ids) for state, ids in snapshot.groups.items()}
    over = {name: snapshot.outcome_members.get(name, 0) for name in ("retired", "rejected", "expired", "quarantined")}
    # Positive: acknowledged trajectories are missing. Negative: some are stored twice.
    missing = snapshot.accepted - sum(held.values()) - sum(over.values())
    doubled = {group: at for group, at in states.items() if len(at) > 1}
    overused = _overused(snapshot)
    skipped = [ordinal for ordinal in range(snapshot.next_ordinal) if str(ordinal) not in states]
    known = {entry.step for entry in snapshot.ledger}
    recorded = dict.fromkeys(group for entry in snapshot.ledger for group in entry.group_ids)
    # With reuse, a used group may be claimed for another step.
    after_use = {"used", "over", "claimed"} if snapshot.max_uses > 1 else {"used", "over"}
    unrecorded = [str(step) for step in range(1, snapshot.archived_step + 1) if step not in known]
    found = {
        "in no state": list(map(str, skipped)),
        "in more than one state": [f"{group} ({' and '.join(at)})" for group, at in doubled.items()],
        "trained on more often than allowed": overused,
        "steps moved to the archive, but not in its ledger": unrecorded,
        "used, but not in the ledger": [group for group in snapshot.groups["used"] if group not in recorded],
        "in the ledger, but neither used nor over": [
            group for group in recorded if not after_use & set(states.get(group, []))
        ],
    }
    return Audit(
        accepted=snapshot.accepted,
        buffered=held["leased"] + held["returned"] + held["ready"],
        claimed=held["claimed"],
        used=held["used"],
        **over,
        lost=max(0, missing) + sum(max(0, counted - stored) for counted, stored in snapshot.members.values()),
        duplicated=max(0, -missing) + len(doubled) + len(overused),
        skipped_prompts=len(skipped),
        problems=[
            f"{what}: {', '.join(names[:_MAX_NAMED])}"
            + (f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else "")
            for what, names in found.items()
            if names
        ],
    )


def _states_of(snapshot: Snapshot) -> dict[str, list[str]]:
    # A list, because the audit looks for groups in two states.
    states: dict[str, list[str]] = {}
    for state, groups in snapshot.groups.items():
        for group in groups:
            states.setdefault(group, []).append(state)
    for ordinal in snapshot.done:
        states.setdefault(str(ordinal), []).append("over")
    return states


def _overused(snapshot: Snapshot) -> list[str]:
    total: Counter[str] = Counter()
    repeated = []
    for entry in snapshot.ledger:
        in_step = Counter(name for group in entry.trajectory_ids for name in group)
        total += in_step
        repeated += [name for name, count in in_step.items() if count > 1]
    return list(dict.fromkeys([name for name, count in total.items() if count > snapshot.max_uses] + repeated))
