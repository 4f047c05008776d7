"""The store: every operation on the state that must survive, stated once for Redis and its in-memory twin.

Life of a group: open -> ready -> claimed(step, fence) -> used(step) -> retired. A group that falls out of this line
goes to quarantine with a reason. Each transition is one atomic operation below.
"""

from typing import Any, Literal, Protocol

from buffer.trajectory import Purpose, Record, TrajectoryHeader
from configs.buffer import FifoConfig, UniformConfig


class Lease(Record):
    """A prompt handed to a generator, with a deadline.

    Example: Lease(id="17-0", group_id="17", purpose="train", row=4711, ordinal=17, attempt=0, indices=[0, ..., 7])
    """

    id: str
    """`<group_id>-<attempt>`."""
    group_id: str
    """Training: the ordinal. Evaluation: `<evaluation id>:<row>`."""
    purpose: Purpose
    """What the trajectories are for."""
    row: int
    """Row of the train file (or of the held-out file for evaluations)."""
    ordinal: int
    """Place in the endless sequence of seeded epoch permutations; evaluations: the row."""
    attempt: int
    """How often this prompt had been leased before."""
    indices: list[int]
    """Members still missing from the group."""


class Insertion(Record):
    """What became of one inserted trajectory.

    Example: Insertion(outcome="inserted", group_is_ready=True)
    """

    outcome: Literal["inserted", "duplicate", "superseded", "refused"]
    """Stored | the same was stored before | its place was filled by another attempt | not stored, see reason.

    All but `refused` are acknowledged to the sender."""
    reason: str = ""
    """Why it was refused: `content_conflict`, `unknown_group`, `group_size`, `future_version`, `store_full`."""
    group_is_ready: bool = False
    """Whether this one completed its group."""


class Claim(Record):
    """Groups handed to the learner for one step.

    Example: Claim(step=12, fence=31, group_ids=["380", "377"])
    """

    step: int
    """The step they are claimed for."""
    fence: int
    """Grows with every claim; a commit with an older one is refused."""
    group_ids: list[str]
    """In the order drawn."""


class StoreCounts(Record):
    """Where everything is, now. Groups unless said otherwise.

    Invariant: accepted == open_members + group_size * (ready + claimed + used + retired) + quarantined_members.
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
    """Trained on, not yet covered by a durable checkpoint."""
    retired: int
    """Covered by a durable checkpoint."""
    quarantined: int
    """Taken out after too many attempts."""
    accepted: int
    """Trajectories ever stored."""
    duplicates: int
    """Trajectories that came again, unchanged."""
    superseded: int
    """Trajectories whose place was taken."""
    refused: dict[str, int]
    """Frames put into quarantine, by reason."""
    open_members: int = 0
    """Trajectories in open groups."""
    quarantined_members: int = 0
    """Trajectories in quarantined groups."""


class RunState(Record):
    """Where the run stands.

    Example: RunState(run_id="digits_cpu", phase="training", step=12, version=12, announced_version=13)
    """

    run_id: str
    """Name of the run."""
    phase: Literal["starting", "training", "finishing", "finished", "failed"]
    """starting: no batch yet | finishing: no more training prompts are leased | finished, failed: over."""
    step: int
    """Steps committed."""
    version: int
    """Newest version all members adopted and verified."""
    announced_version: int
    """Newest version whose broadcast has begun; tokens above it are refused."""
    detail: str = ""
    """Why the phase is what it is."""


class EvaluationResult(Record):
    """One evaluation, complete when `num_answered == num_prompts`.

    Example: EvaluationResult(id="final-sampled", purpose="sampled", version=120, num_prompts=512, num_answered=512,
        num_correct=490, reward_sum=500.2)
    """

    id: str
    """Chosen by who opened it."""
    purpose: Purpose
    """sampled or greedy."""
    version: int
    """Policy version when it was opened."""
    num_prompts: int
    """Held-out rows asked."""
    num_answered: int
    """Answers in."""
    num_correct: int
    """Answers entirely right."""
    reward_sum: float
    """Sum of rewards."""
    num_failed: int = 0
    """Answers whose reward function failed; not correct."""

    @property
    def is_complete(self) -> bool:
        """Whether every row has been answered."""
        return self.num_answered >= self.num_prompts

    @property
    def accuracy(self) -> float:
        """Share of answers entirely right; 0 before the first."""
        return self.num_correct / self.num_answered if self.num_answered else 0.0


class Store(Protocol):
    """All operations. Synchronous; each is atomic and takes well under a millisecond per hundred ids.

    Time is the store's own clock. Every method raises StoreUnavailable when the store does not answer.
    """

    # --- the run -------------------------------------------------------------------------------------------------
    def open_run(self, run_id: str, *, config_json: str, num_rows: int, seed: int) -> RunState:
        """Create the run, or find it again. Raises RunConflict when another run lives here."""
        ...

    def run_state(self) -> RunState:
        """Where the run stands. Raises RunConflict when no run was opened."""
        ...

    def run_config_json(self) -> str:
        """The config `open_run` was given."""
        ...

    def set_phase(self, phase: str, *, detail: str = "") -> None:
        """Move the run on."""
        ...

    def announce_version(self, version: int) -> None:
        """From now on tokens of `version` may arrive. Never goes back, except through `roll_back`."""
        ...

    def commit_version(self, version: int) -> None:
        """All members adopted and verified `version`."""
        ...

    # --- prompts -------------------------------------------------------------------------------------------------
    def lease(
        self, *, owner: str, max_groups: int, group_size: int, lease_s: float, admission_limit: int
    ) -> list[Lease]:
        """Hand out prompts: open evaluations first, then returned prompts, then new ones.

        New training prompts are admitted only while `admitted < admission_limit` and the phase is starting or
        training; no training prompt at all is leased in later phases.
        """
        ...

    def renew_leases(self, *, owner: str, lease_s: float, lease_ids: list[str] | None = None) -> int:
        """Push the deadline of every lease of `owner`, or of those in `lease_ids` alone; returns how many.

        Naming what the owner still works on lets a lease whose answer got lost on the way lapse by itself.
        """
        ...

    def return_leases(self, *, lease_ids: list[str], reason: str) -> int:
        """Put prompts back, to be leased again with attempt + 1; members already stored stay. Returns how many.

        Ids of leases that are over are skipped.
        """
        ...

    def return_leases_of(self, *, owner: str, reason: str) -> int:
        """The same for everything `owner` holds."""
        ...

    def reap(self) -> list[str]:
        """Return lapsed leases and lapsed claims; quarantine what was tried too often.

        One line per event, for the log.
        """
        ...

    # --- trajectories --------------------------------------------------------------------------------------------
    def insert(self, trajectories: list[tuple[TrajectoryHeader, bytes]]) -> list[Insertion]:
        """Store trajectories, idempotent on id; one outcome each, same order. Durable (as configured) on return.

        Evaluation trajectories are counted into their evaluation and not kept. A refused one leaves no trace: the
        caller has it sent again (`store_full`) or gives it to `quarantine`, which counts it.
        """
        ...

    def quarantine(self, reason: str, frame: bytes) -> None:
        """Keep the (first bytes of a) refused frame for a look, capped in number; counts `refused[reason]`."""
        ...

    # --- batches -------------------------------------------------------------------------------------------------
    def claim(self, *, step: int, num_groups: int, sampler: FifoConfig | UniformConfig, lease_s: float) -> Claim | None:
        """Take exactly `num_groups` ready groups for `step`, or None when there are fewer.

        A step has one claim: an earlier one is taken back first, so that asking again after a lost answer is safe.
        """
        ...

    def wait_ready(self, *, num_groups: int, timeout_s: float) -> bool:
        """Block until at least `num_groups` groups are ready, at most `timeout_s`. Returns whether they are."""
        ...

    def fetch(self, group_ids: list[str]) -> list[list[bytes]]:
        """Encoded trajectories of each group, by index. Raises StaleFence for a group that has none (any more)."""
        ...

    def renew_claim(self, claim: Claim, *, lease_s: float) -> None:
        """Push the claim's deadline. Raises StaleFence."""
        ...

    def commit(self, claim: Claim) -> None:
        """The step used these groups: they are `used`, and RunState.step is claim.step. Raises StaleFence.

        Committing the same claim again changes nothing.
        """
        ...

    def retire(self, *, up_to_step: int) -> int:
        """A durable checkpoint covers every step <= up_to_step: their groups are done. Returns how many."""
        ...

    def roll_back(self, *, to_step: int, to_version: int) -> int:
        """The learner resumes from a checkpoint: groups claimed, or used after `to_step`, are ready again."""
        ...

    # --- evaluation ----------------------------------------------------------------------------------------------
    def open_evaluation(self, evaluation_id: str, *, purpose: Purpose, version: int, rows: list[int]) -> None:
        """Ask generators to answer held-out rows. Idempotent on id."""
        ...

    def evaluation(self, evaluation_id: str) -> EvaluationResult | None:
        """How far it is; None when never opened."""
        ...

    # --- watching ------------------------------------------------------------------------------------------------
    def counts(self) -> StoreCounts:
        """Where everything is."""
        ...

    def report_role(self, role_id: str, gauges: dict[str, Any]) -> None:
        """Publish a role's newest gauges (plain values), stamped with the store's time as `reported_at`."""
        ...

    def roles(self) -> dict[str, dict[str, Any]]:
        """The newest gauges of every role that ever reported."""
        ...

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Append one row (a step); the newest thousand are kept."""
        ...

    def metrics(self, *, after: int = 0) -> list[dict[str, Any]]:
        """Rows appended so far, from the `after`-th on (counted from the first ever appended)."""
        ...

    def close(self) -> None:
        """Let go of connections."""
        ...
