"""Accounting of a run: the counters a store keeps, and the audit that recomputes them from what is stored."""

from collections import Counter
from collections.abc import Iterable

from slipstream.buffer.records import StepEntry
from slipstream.configs.base import Record

REJECTION_REASONS = ("no_reward", "zero_signal", "too_hard", "too_easy")
"""Reasons for which a filter rejects a complete group: no sampled member has a reward, the rewards of all are alike,
too few or too many are right."""
_MAX_NAMED = 5
"""Groups named in one problem."""


class StoreCounts(Record):
    """Counters of a store at one instant; in groups unless stated otherwise.

    Invariant: accepted == open_members + group_size * (ready + claimed + used) - short_members + sum of
    outcome_members.
    """

    admitted: int
    """Training prompts ever leased for the first time, less those whose admission was given back."""
    leased: int
    """Training leases held by generators."""
    returned: int
    """Training prompts waiting to be leased again."""
    open: int
    """Groups with at least one member and short of others."""
    ready: int
    """Groups complete and not claimed."""
    claimed: int
    """Held by the learner in a claim."""
    used: int
    """Trained on, and not yet covered by a durable checkpoint or still reusable."""
    reusable: int
    """Groups in `used` that may be sampled again."""
    accepted: int
    """Trajectories stored since the run began."""
    duplicates: int
    """Trajectories that arrived again with the same checksum."""
    superseded: int
    """Trajectories whose index in the group was taken already."""
    refused: dict[str, int]
    """Frames put into quarantine, by reason."""
    outcomes: dict[str, int]
    """Groups that are over, by outcome (retired, rejected, expired, quarantined)."""
    outcome_members: dict[str, int]
    """Trajectories of groups that are over, by outcome."""
    reasons: dict[str, int]
    """Groups that are over, by `<outcome>: <reason>`."""
    unarchived: int
    """Groups that are over and still stored for the archive."""
    open_members: int
    """Trajectories in groups that are open."""
    short_members: int
    """Trajectories missing from groups that were made ready without them."""
    payload_bytes: int
    """Size of the encoded trajectories stored, bytes."""
    accepted_tokens: int
    """Model-written tokens of all trajectories ever stored."""
    superseded_tokens: int
    """Model-written tokens of superseded trajectories."""
    wasted_tokens: int
    """Model-written tokens of groups that ended without being trained on."""
    trained: int
    """Trajectories trained on; each use counts."""
    trained_tokens: int
    """Model-written tokens trained on; each use counts."""
    became_ready: int = 0
    """Groups that ever became ready."""
    curriculum: dict[str, int] = {}
    """Prompts `skipped_too_easy`, `skipped_too_hard` and `explored` (generated though their row lies outside the band);
    `rows` measured, and how many of them are `rows_too_easy` and `rows_too_hard` at present."""

    @property
    def rows_out_of_band(self) -> int:
        """Rows whose success rate lies outside the curriculum's band."""
        return self.curriculum.get("rows_too_easy", 0) + self.curriculum.get("rows_too_hard", 0)

    @property
    def curriculum_metrics(self) -> dict[str, float]:
        """Prompts skipped and explored, and the share of the measured rows in the band, which is 1 before the first."""
        names = ("skipped_too_easy", "skipped_too_hard", "explored")
        in_band = {"buffer/in_band_fraction": 1 - self.rows_out_of_band / max(1, self.curriculum.get("rows", 0))}
        return in_band | {f"buffer/{name}": self.curriculum.get(name, 0) for name in names}

    @property
    def outstanding(self) -> int:
        """Groups admitted and not over, or over and still stored."""
        in_store = self.ready + self.claimed + self.used + self.unarchived
        return self.leased + self.returned + in_store

    @property
    def filtered(self) -> int:
        """Complete groups rejected by `buffer.filter`."""
        return sum(self.reasons.get(f"rejected: {reason}", 0) for reason in REJECTION_REASONS)

    @property
    def filtered_fraction(self) -> float:
        """Share of complete groups that `buffer.filter` rejected; 0 before the first."""
        complete = self.filtered + self.became_ready
        return self.filtered / complete if complete else 0.0

    @property
    def length_bias(self) -> float:
        """Mean length of trained trajectories / mean length of accepted ones; below 1, long ones are left behind."""
        if not self.trained or not self.accepted_tokens:
            return 1.0
        return (self.trained_tokens / self.trained) / (self.accepted_tokens / self.accepted)

    @property
    def waste_fraction(self) -> float:
        """Share of received tokens that were discarded without a step; masked tokens come on top."""
        arrived = self.accepted_tokens + self.superseded_tokens
        return (self.wasted_tokens + self.superseded_tokens) / arrived if arrived else 0.0


class StoreMemory(Record):
    """Memory of a store's server. Example: StoreMemory(used_bytes=52428800, max_bytes=1073741824)."""

    used_bytes: int = 0
    """All that the server holds, other runs on it included; 0 for one without a process of its own."""
    max_bytes: int = 0
    """Limit, beyond which it refuses writes; 0 = none."""


class Audit(Record):
    """Accounting recomputed from what is stored; in trajectories unless stated otherwise.

    Invariant of a sound store: accepted == buffered + claimed + used + retired + rejected + expired + quarantined.
    """

    accepted: int
    """Acknowledged as new since the run began."""
    buffered: int
    """In open and ready groups."""
    claimed: int
    """Held by the learner in a claim."""
    used: int
    """Trained on, not yet covered by a durable checkpoint."""
    retired: int
    """Covered by a durable checkpoint."""
    rejected: int
    """Refused by the run's filter or the learner."""
    expired: int
    """In groups that were too late."""
    quarantined: int
    """In groups that were tried too often."""
    lost: int
    """Acknowledged, but stored in no group."""
    duplicated: int
    """In two states at once, or trained on more often than allowed."""
    skipped_prompts: int
    """Prompts that were admitted and are in no state."""
    problems: list[str] = []
    """One sentence for each inconsistency."""

    @property
    def is_sound(self) -> bool:
        """Whether no inconsistency was found."""
        return not (self.lost or self.duplicated or self.skipped_prompts or self.problems)


class Snapshot(Record):
    """Input of an audit, read at one instant.

    Example: Snapshot(next_ordinal=3, max_uses=1, accepted=4, groups={"leased": ["2"], "ready": ["1"], "used": ["0"]},
        members={"0": (2, 2), "1": (2, 2), "2": (0, 0)}, done=[], outcome_members={}, ledger=[StepEntry(step=1, ...)])
    """

    next_ordinal: int
    """Training prompts admitted since the run began."""
    max_uses: int
    """Steps that may train on one group."""
    accepted: int
    """Trajectories ever acknowledged as new."""
    groups: dict[str, list[str]]
    """State (leased, returned, ready, claimed, used) -> training groups."""
    members: dict[str, tuple[int, int]]
    """Group -> (members counted, payloads stored)."""
    done: list[int]
    """Ordinals of the groups that are over."""
    outcome_members: dict[str, int]
    """Trajectories of groups that are over, by outcome."""
    ledger: list[StepEntry]
    """Entries of the committed steps."""


def audit(snapshot: Snapshot) -> Audit:
    """Recompute the accounting and list every inconsistency."""
    states = _states_of(snapshot)
    held = {state: sum(snapshot.members[group][0] for group in ids) for state, ids in snapshot.groups.items()}
    over = {name: snapshot.outcome_members.get(name, 0) for name in ("retired", "rejected", "expired", "quarantined")}
    # Positive: acknowledged trajectories are nowhere. Negative: some are stored twice.
    missing = snapshot.accepted - sum(held.values()) - sum(over.values())
    doubled = {group: found for group, found in states.items() if len(found) > 1}
    overused = _overused(snapshot)
    skipped = [ordinal for ordinal in range(snapshot.next_ordinal) if str(ordinal) not in states]
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
            *_problem("in no state", map(str, skipped)),
            *_problem("in more than one state", (f"{group} ({' and '.join(at)})" for group, at in doubled.items())),
            *_problem("trained on more often than allowed", overused),
            *_problem("used, but not in the ledger", _unrecorded(snapshot)),
            *_problem("in the ledger, but neither used nor over", _unused(snapshot, states)),
        ],
    )


def _states_of(snapshot: Snapshot) -> dict[str, list[str]]:
    # A list, not one state: a group in two of them is what the audit looks for.
    states: dict[str, list[str]] = {}
    for state, groups in snapshot.groups.items():
        for group in groups:
            states.setdefault(group, []).append(state)
    for ordinal in snapshot.done:
        states.setdefault(str(ordinal), []).append("over")
    return states


def _overused(snapshot: Snapshot) -> list[str]:
    """Trajectories trained on in too many steps, or twice within one."""
    total: Counter[str] = Counter()
    repeated = []
    for entry in snapshot.ledger:
        in_step = Counter(name for group in entry.trajectory_ids for name in group)
        total += in_step
        repeated += [name for name, count in in_step.items() if count > 1]
    return list(dict.fromkeys([name for name, count in total.items() if count > snapshot.max_uses] + repeated))


def _unrecorded(snapshot: Snapshot) -> list[str]:
    recorded = {group for entry in snapshot.ledger for group in entry.group_ids}
    return [group for group in snapshot.groups["used"] if group not in recorded]


def _unused(snapshot: Snapshot, states: dict[str, list[str]]) -> list[str]:
    recorded = dict.fromkeys(group for entry in snapshot.ledger for group in entry.group_ids)
    # With reuse, a group that was trained on may be claimed for another step.
    allowed = {"used", "over"} | ({"claimed"} if snapshot.max_uses > 1 else set())
    return [group for group in recorded if not allowed & set(states.get(group, []))]


def _problem(what: str, groups: Iterable[str]) -> list[str]:
    names = list(groups)
    if not names:
        return []
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return [f"{what}: {', '.join(names[:_MAX_NAMED])}{more}"]
