"""The books of a run: where everything is, as the store counts along, and added up anew."""

from slipstream.buffer.sampling import FLAWS
from slipstream.buffer.trajectory import Record


class StoreCounts(Record):
    """Where everything is, now. Groups unless said otherwise.

    Invariant: accepted == open_members + group_size * (ready + claimed + used) - short_members + sum of
    outcome_members.
    """

    admitted: int
    """Training prompts ever leased for the first time, less those handed back to the budget."""
    leased: int
    """Training leases out now."""
    returned: int
    """Training prompts waiting to be leased again."""
    open: int
    """Groups with at least one member, not complete."""
    ready: int
    """Complete, unclaimed."""
    claimed: int
    """With the learner."""
    used: int
    """Trained on, and not yet covered by a durable checkpoint or to be used again."""
    reusable: int
    """Those of `used` that may be drawn again."""
    accepted: int
    """Trajectories ever stored."""
    duplicates: int
    """Trajectories that came again, unchanged."""
    superseded: int
    """Trajectories whose place was taken."""
    refused: dict[str, int]
    """Frames put into quarantine, by reason."""
    outcomes: dict[str, int]
    """Groups that are over, by outcome (retired, rejected, expired, quarantined)."""
    outcome_members: dict[str, int]
    """The same in trajectories."""
    reasons: dict[str, int]
    """Groups that are over, by `<outcome>: <reason>`."""
    unarchived: int
    """Groups that are over and still stored, for the archive."""
    open_members: int
    """Trajectories in open groups."""
    short_members: int
    """Trajectories that groups lack which were made ready short of some."""
    payload_bytes: int
    """Encoded trajectories stored, bytes."""
    accepted_tokens: int
    """Model-written tokens of all trajectories ever stored."""
    superseded_tokens: int
    """Of those whose place was taken."""
    wasted_tokens: int
    """Of stored ones whose group was over without a step."""
    trained: int
    """Trajectories trained on; each use counts."""
    trained_tokens: int
    """Model-written tokens of those."""
    became_ready: int = 0
    """Groups that were ever ready to be trained on."""

    @property
    def in_play(self) -> int:
        """Groups admitted of which something is still stored, or to come."""
        in_store = self.ready + self.claimed + self.used + self.unarchived
        return self.leased + self.returned + in_store

    @property
    def filtered(self) -> int:
        """Groups that were complete, and rejected because they teach nothing (`buffer.filter`)."""
        return sum(self.reasons.get(f"rejected: {flaw}", 0) for flaw in FLAWS)

    @property
    def filtered_fraction(self) -> float:
        """Share of the groups that were ever complete."""
        complete = self.filtered + self.became_ready
        return self.filtered / complete if complete else 0.0

    @property
    def length_bias(self) -> float:
        """Mean length of what was trained on / mean length of what arrived; 1 = long ones are not left behind."""
        if not self.trained or not self.accepted_tokens:
            return 1.0
        return (self.trained_tokens / self.trained) / (self.accepted_tokens / self.accepted)

    @property
    def waste_fraction(self) -> float:
        """Share of the generated tokens that arrived and were let go without a step; masked ones come on top."""
        arrived = self.accepted_tokens + self.superseded_tokens
        return (self.wasted_tokens + self.superseded_tokens) / arrived if arrived else 0.0


class Audit(Record):
    """The books of a run, added up anew from what is stored. Trajectories unless said otherwise.

    Invariant of a sound store: accepted == buffered + claimed + used + retired + rejected + expired + quarantined.
    """

    accepted: int
    """Ever acknowledged as new."""
    buffered: int
    """In open and ready groups."""
    claimed: int
    """With the learner."""
    used: int
    """Trained on, not yet covered by a durable checkpoint."""
    retired: int
    """Covered by a durable checkpoint."""
    rejected: int
    """Refused by the run's filter or the learner."""
    expired: int
    """Too late."""
    quarantined: int
    """Of groups tried too often."""
    lost: int
    """Acknowledged, and nowhere."""
    duplicated: int
    """In two places, or trained on more often than they may be."""
    skipped_prompts: int
    """Prompts that were admitted and are nowhere."""
    problems: list[str] = []
    """A sentence for each thing found wrong."""

    @property
    def is_sound(self) -> bool:
        """Whether nothing was found wrong."""
        return not (self.lost or self.duplicated or self.skipped_prompts or self.problems)
