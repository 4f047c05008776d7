"""What the store answers with: leases, outcomes, claims, counts, the run's state, evaluations."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from slipstream.buffer.codec import decode
from slipstream.buffer.trajectory import Purpose, Record


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
    """Why it was refused: `content_conflict`, `unknown_group`, `group_size`, `baseline`, `future_version`,
    `store_full`."""
    group_is_ready: bool = False
    """Whether this one completed its group, and no filter rejected it."""


class LagSplit(Record):
    """Where the lag of a claim came from: means over its trajectories' oldest tokens, versions.

    Example: LagSplit(in_flight=0.4, publish=0.2, queue=1.1), of a mean lag of 1.7
    """

    in_flight: float = 0.0
    """Adopted by all generators between the sampling of the token and the arrival of its trajectory."""
    publish: float = 0.0
    """Made by the learner, but not yet adopted by all, when it arrived."""
    queue: float = 0.0
    """Made while it waited in the buffer."""


class Claim(Record):
    """Groups handed to the learner for one step.

    Example: Claim(step=12, fence=31, group_ids=["380", "377"], weights=[1.0, 1.0], reused=[False, False])
    """

    step: int
    """The step they are claimed for."""
    fence: int
    """Grows with every claim; a commit with an older one is refused."""
    group_ids: list[str]
    """In the order drawn."""
    weights: list[float] = []
    """What each group's loss is multiplied by, as the sampler demands; empty: all 1."""
    reused: list[bool] = []
    """Which were trained on before; empty: none."""
    lag: LagSplit = LagSplit()
    """How old they are, and why."""


Addressee = Literal["launcher", "broker"]
"""Who may be asked for something through the store."""
Outcome = Literal["retired", "rejected", "expired", "quarantined"]
"""How a group's life ends: covered by a durable checkpoint | refused by the run's filter or the learner | too late |
tried too often."""


GroupState = Literal["open", "ready", "claimed", "used"] | Outcome
"""State of a stored group, or how it ended."""


class StoredGroup(Record):
    """A group of a live store, with all that is stored of it.

    Example: StoredGroup(id="380", state="used", reason="", steps=[12], payloads=[b"...", ...])
    """

    id: str
    """Group id."""
    state: GroupState
    """As it was when the group was read."""
    reason: str
    """Why it ended; empty for retired groups and those that are not over."""
    steps: list[int]
    """Steps that trained on it, in order."""
    payloads: list[bytes]
    """Encoded trajectories by index; missing members are left out."""


class FinishedGroup(Record):
    """A group that is over, with all that was stored of it: what the archive keeps.

    Example: FinishedGroup(id="380", outcome="retired", reason="", steps=[12], payloads=[b"...", ...])
    """

    id: str
    """The group."""
    outcome: Outcome
    """How it ended."""
    reason: str
    """Why; empty for retired."""
    steps: list[int]
    """Steps that trained on it, in order."""
    payloads: list[bytes]
    """Encoded trajectories by index; those that never came are left out."""


class StepEntry(Record):
    """A step in the ledger: what it trained on, and as what.

    Example: StepEntry(step=12, version=11, fence=31, seed=0, config_hash="9f2c...", group_ids=["380", "377"],
        trajectory_ids=[["380-0-0", "380-0-1"], ["377-1-0", "377-0-1"]])
    """

    step: int
    """Counted from 1."""
    version: int
    """The learner's policy version at the start of the step: what lags are counted from."""
    fence: int
    """Of the claim that was committed."""
    seed: int
    """Of the run."""
    config_hash: str
    """SHA-256 of the run's settings, its first 16 hexadecimal digits."""
    group_ids: list[str]
    """In the order drawn."""
    trajectory_ids: list[list[str]]
    """Of each group, by index."""
    weights: list[float] = []
    """What each group's loss was multiplied by; empty: all 1."""
    reused: list[bool] = []
    """Which were trained on before; empty: none."""
    mixed_group_ids: list[str] = []
    """Groups of another run's archive that were trained on beside them, in order."""


class VersionEntry(Record):
    """A published set of weights. Example: VersionEntry(version=12, step=12, checksum="9f86d081884c7d65")."""

    version: int
    """The policy version; published again after a resume, it is entered again."""
    step: int
    """Last step that is in the weights; 0 = initial weights."""
    checksum: str
    """xxh3-64 over the checksums of all buckets as sent, hexadecimal: equal for equal weights."""


class CheckpointPointer(Record):
    """The newest durable checkpoint. Example: CheckpointPointer(step=50, version=50, name="step-00000050")."""

    step: int
    """Last step it covers."""
    version: int
    """Policy version of its weights."""
    name: str
    """Its folder in the run's checkpoints."""


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
    consumed: int = 0
    """Groups trained on for the first time in the steps that are in `version`; pacing counts from it."""
    checkpoint: CheckpointPointer | None = None
    """What a resumed run starts from; None before the first."""
    detail: str = ""
    """Why the phase is what it is."""
    stepped_at: float | None = None
    """When the newest step was committed, in seconds of the store's clock; None before the first."""
    fence: int = 0
    """Of the newest commit or roll back: only the learner that did it may declare a checkpoint."""


class Event(Record):
    """Something that went wrong, for people.

    Example: Event(at=1763718000.25, role="generator-1", text="died (signal SIGKILL); restarting in 1 s")
    """

    at: float
    """When, in seconds of the store's clock."""
    role: str
    """Whom it befell."""
    text: str
    """What happened, in a sentence; a long one is cut."""


class MetricsRows(Record):
    """Rows of metrics, oldest first. Example: MetricsRows(last=1002, rows=[{"step": 1001}, {"step": 1002}])."""

    last: int
    """How many were ever appended; to go on from here, ask for those after it."""
    rows: list[dict[str, Any]]
    """Those that were asked for and are kept."""


class EvaluationResult(Record):
    """One evaluation, complete when `num_answered == num_prompts`.

    Example: EvaluationResult(id="final-sampled", purpose="sampled", version=120, num_prompts=512, num_answered=512,
        num_correct=490)
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


# @@ The step ledger: an entry from a claim and what was fetched for it.
class _Named(msgspec.Struct):
    """Reads an encoded Trajectory's id and skips the rest."""

    id: str


def make_entry(
    claim: Claim,
    payloads: list[list[bytes]],
    *,
    version: int,
    seed: int,
    config_hash: str,
    mixed_group_ids: Sequence[str] = (),
) -> StepEntry:
    """The entry of a step that trained on `payloads`, and on archived groups, at the learner's `version`."""
    return StepEntry(
        step=claim.step,
        version=version,
        fence=claim.fence,
        seed=seed,
        config_hash=config_hash,
        group_ids=claim.group_ids,
        trajectory_ids=[[decode(payload, _Named).id for payload in group] for group in payloads],
        weights=claim.weights,
        reused=claim.reused,
        mixed_group_ids=list(mixed_group_ids),
    )


# @@ How much the store keeps of what is only for people to look at.
METRICS_KEPT = 1000
"""Newest rows of metrics."""
EVENTS_KEPT = 256
"""Newest events."""
EVENT_CHARACTERS_KEPT = 1000
"""First characters of each event."""
ROLES_KEPT = 1024
"""Roles reported of last; living ones report every second, so that those which left long ago go first."""
FRAMES_KEPT = 256
"""Newest refused frames."""
FRAME_BYTES_KEPT = 4096
"""First bytes of each refused frame."""


# @@ Progress of a role: the numbers among its gauges that grow with its work.
PROGRESS_GAUGES = ("version", "tokens", "trajectories", "updates", "groups", "last_step")
"""What a generator, the learner or the archiver gets further in; the broker and the launcher have none of them."""


def progress_mark(gauges: dict[str, Any]) -> str:
    """How far the gauges say the role has got, as one text; empty when they do not say.

    A peer that has just joined says nothing yet (version -1 and no totals): joining again is no progress.

    Example: progress_mark({"version": 3, "tokens": 512.0, "running": 7}) == "version=3 tokens=512.0"
    """
    known = {name: gauges[name] for name in PROGRESS_GAUGES if gauges.get(name) is not None}
    if known.get("version") == -1 and len(known) == 1:
        return ""
    return " ".join(f"{name}={number}" for name, number in known.items())
