"""Records that the store accepts and returns: leases, claims, ledger entries, run state, evaluations, events."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Literal

import msgspec
import xxhash

from slipstream.buffer.codec import decode, unpack
from slipstream.buffer.trajectory import Media, Purpose, Trajectory, TrajectoryHeader
from slipstream.configs.base import Record

# --- limits on displayed data -----------------------------------------------------------------------------------------
METRICS_KEPT = 1000
EVENTS_KEPT = 256
EVENT_CHARACTERS_KEPT = 1000
"""Longer texts are truncated."""
ROLES_KEPT = 8192
"""The oldest reports are dropped."""
FRAMES_KEPT = 256
FRAME_BYTES_KEPT = 4096
"""Longer frames are truncated."""

Addressee = Literal["launcher", "broker", "learner"]
Outcome = Literal["retired", "rejected", "expired", "quarantined", "evaluated"]
"""Covered by a durable checkpoint | refused by filter or learner | too late | tried too often, or written by a
quarantined guest | an evaluation answer.
"""
GroupState = Literal["open", "ready", "claimed", "used"] | Outcome


# --- prompts and trajectories ----------------------------------------------------------------------------------------
class Lease(Record):
    """A prompt assigned to a generator.

    Example: Lease(id="17-0", group_id="17", purpose="train", row=4711, ordinal=17, attempt=0, indices=[0, ..., 7])
    """

    id: str
    """See `make_lease_id`."""
    group_id: str
    """Training: the ordinal. Evaluation: `<evaluation id>:<row>`."""
    purpose: Purpose
    row: int
    """Row of the training or held-out file."""
    ordinal: int
    """Position in the endless sequence of seeded epochs; evaluations: the row."""
    attempt: int
    """Earlier leases of this prompt."""
    indices: list[int]
    """Members that the group lacks."""


class Insertion(Record):
    """Outcome of inserting one trajectory. Example: Insertion(outcome="inserted", group_is_ready=True)."""

    outcome: Literal["inserted", "duplicate", "superseded", "refused"]
    """Stored | already stored with equal content | too late: index filled, or group closed | not stored, and not
    acknowledged.
    """
    reason: str = ""
    """Refusal: `content_conflict`, `unknown_group`, `group_size`, `baseline`, `unknown_lease`, `future_version`,
    `other_version` (not the evaluation's), `guest_quarantined`, `store_full`.
    """
    group_is_ready: bool = False
    """Whether it completed its group (or evaluation), which the filter kept."""


class StoredGroup(Record):
    """A group with its trajectories, in a live store or finished.

    Example: StoredGroup(id="380", state="used", reason="", steps=[12], payloads=[b"...", ...])
    """

    id: str
    state: GroupState
    reason: str
    """Reason of the outcome; empty for retired and unfinished groups."""
    steps: list[int]
    """Steps that trained on it, in order."""
    payloads: list[bytes]
    """Encoded trajectories by index, without missing members."""


# --- steps -----------------------------------------------------------------------------------------------------------
class LagSplit(Record):
    """Lag of a claim by origin, versions, averaged over the trajectories' oldest tokens.

    Example: LagSplit(in_flight=0.4, publish=0.2, queue=1.1), of a mean lag of 1.7
    """

    in_flight: float = 0.0
    """Applied by all generators between sampling and arrival."""
    publish: float = 0.0
    """Announced at arrival, but not yet applied by all generators."""
    queue: float = 0.0
    """Produced while the group waited in the store."""


class Claim(Record):
    """Groups handed to the learner for one step.

    Example: Claim(step=12, fence=31, group_ids=["380", "377"], weights=[1.0, 1.0], reused=[False, False])
    """

    step: int
    fence: int
    """Grows with every claim; commits with an older one are rejected."""
    group_ids: list[str]
    """Groups of the step, in sampling order."""
    weights: list[float] = []
    """Factor on each group's loss; empty: all 1."""
    reused: list[bool] = []
    """Whether each group was trained on before; empty: none."""
    lag: LagSplit = LagSplit()
    num_spare: int = 0
    """Ready groups left for later steps."""


class StepEntry(Record):
    """Entry of the step ledger; see also Claim.

    Example: StepEntry(step=12, version=11, fence=31, seed=0, config_hash="9f2c...", group_ids=["380", "377"],
        trajectory_ids=[["380-0-0", "380-0-1"], ["377-1-0", "377-0-1"]])
    """

    step: int
    version: int
    """Policy version at the start, to which lags are relative."""
    fence: int
    seed: int
    config_hash: str
    """First 16 hexadecimal digits of the SHA-256 of the run's settings."""
    group_ids: list[str]
    trajectory_ids: list[list[str]]
    """Per group, by index."""
    weights: list[float] = []
    reused: list[bool] = []
    mixed_group_ids: list[str] = []
    """Groups from another run's archive."""


class _TrajectoryId(msgspec.Struct):
    """Decodes only the id of a Trajectory."""

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
    """Build the ledger entry of a step that trained on `payloads`."""
    return StepEntry(
        step=claim.step,
        version=version,
        fence=claim.fence,
        seed=seed,
        config_hash=config_hash,
        group_ids=claim.group_ids,
        trajectory_ids=[[decode(payload, _TrajectoryId).id for payload in group] for group in payloads],
        weights=claim.weights,
        reused=claim.reused,
        mixed_group_ids=list(mixed_group_ids),
    )


class _MediaOf(msgspec.Struct):
    """Decodes only the media of a Trajectory."""

    media: list[Media] = []


def image_names(payloads: Iterable[bytes]) -> set[str]:
    """Stored names of the trajectories' images."""
    found = chain.from_iterable(decode(payload, _MediaOf).media for payload in payloads)
    return {media.checksum for media in found if media.kind == "image"}


class CheckpointPointer(Record):
    """The newest durable checkpoint. Example: CheckpointPointer(step=50, version=50, name="step-00000050")."""

    step: int
    version: int
    name: str
    """Folder within the run's checkpoints."""


# --- the run ---------------------------------------------------------------------------------------------------------
Phase = Literal["starting", "training", "finishing", "finished", "failed"]
"""starting: no batch yet | finishing: no more training prompts are leased."""


class RunState(Record):
    """State of the run.

    Example: RunState(run_id="digits_cpu", phase="training", step=12, version=12, announced_version=13)
    """

    run_id: str
    phase: Phase
    step: int
    """Number of the last committed step."""
    version: int
    """Newest version that all members applied and verified."""
    announced_version: int
    """Newest version with a started broadcast; tokens of later ones are rejected."""
    consumed: int = 0
    """Groups first trained on up to `version`; the base of pacing."""
    checkpoint: CheckpointPointer | None = None
    """To resume from; None before the first."""
    detail: str = ""
    stepped_at: float | None = None
    """Last commit, seconds of the store's clock; None before the first."""
    fence: int = 0
    """Fence of the last commit or rollback; only its learner may record a checkpoint."""
    next_ordinal: int = 0
    admitted: int = 0
    """See `StoreCounts.admitted`."""
    target_lag: float | None = None
    """Lag that the learner chose for pacing (`staleness.target_lag=auto`), versions; None before the first."""


class VersionEntry(Record):
    """A published set of weights. Example: VersionEntry(version=12, step=12, checksum="9f86d081884c7d65")."""

    version: int
    """Recorded again if published again after a resume."""
    step: int
    """Last step included in the weights; 0 = initial weights."""
    checksum: str
    """xxh3-64 over all buckets' checksums, hexadecimal; equal for equal weights."""


class EvaluationResult(Record):
    """Running totals of an evaluation.

    Example: EvaluationResult(id="final-sampled", purpose="sampled", version=120, num_asked=512, num_answered=512,
        num_correct=490)
    """

    id: str
    purpose: Purpose
    version: int
    """Version of every token."""
    num_asked: int
    """Held-out rows times samples per row."""
    num_answered: int
    num_correct: int
    num_failed: int = 0
    """Answers with a failed reward function; not correct."""

    @property
    def is_complete(self) -> bool:
        return self.num_answered >= self.num_asked

    @property
    def accuracy(self) -> float:
        """Fraction of fully correct answers; 0 without answers."""
        return self.num_correct / self.num_answered if self.num_answered else 0.0


class EvaluationAnswer(Record):
    """An answer to a held-out prompt, without its tokens.

    Example: EvaluationAnswer(row=17, reward=1.0, is_correct=True, status="ok", data_source="openai/gsm8k",
        stop_reason="stop", num_tokens=212, version=40, answer="42")
    """

    row: int
    reward: float
    is_correct: bool
    """False unless the status is ok."""
    status: str
    data_source: str
    stop_reason: str
    num_tokens: int
    """Model-written tokens."""
    version: int
    """Version of the last token."""
    answer: str = ""
    """Key for majority votes: the extracted answer, else the response or its hash; empty = no vote."""


def make_answer(row: int, trajectory: Trajectory, *, text: str = "") -> EvaluationAnswer:
    """Build the answer of a trajectory. `text`: vote if no answer was extracted."""
    reward = trajectory.reward
    is_ok = reward.status == "ok"
    return EvaluationAnswer(
        row=row,
        reward=reward.total,
        is_correct=is_ok and reward.is_correct,
        status=reward.status,
        data_source=trajectory.data_source,
        stop_reason=trajectory.stop_reason,
        num_tokens=int(trajectory.model_mask.sum()),
        version=trajectory.version_spans[-1].version,
        answer=(reward.detail or text) if is_ok else "",
    )


def stored_answer(header: TrajectoryHeader, payload: bytes) -> EvaluationAnswer:
    """Build the answer of an arrived trajectory, with a hash of its tokens as fallback vote."""
    trajectory = unpack(payload)
    row = int(header.group_id.rpartition(":")[2].partition(".")[0])
    written = trajectory.token_ids[trajectory.model_mask]
    return make_answer(row, trajectory, text=xxhash.xxh3_64_hexdigest(written.tobytes()))


# --- monitoring ------------------------------------------------------------------------------------------------------
class Event(Record):
    """A failure or recovery of a role, for display.

    Example: Event(at=1763718000.25, role="generator-1", text="died (signal SIGKILL); restarting in 1 s")
    """

    at: float
    """Seconds of the store's clock."""
    role: str
    text: str
    """One sentence."""


class MetricsRows(Record):
    """Metrics rows, oldest first. Example: MetricsRows(last=1002, rows=[{"step": 1001}, {"step": 1002}])."""

    last: int
    """Rows ever appended; pass it as `after` to continue reading."""
    rows: list[dict[str, Any]]


PROGRESS_GAUGES = ("version", "tokens", "trajectories", "updates", "groups", "last_step")
"""Gauges that grow with the work of generators, learner, or archiver."""


class Heartbeat(Record):
    """Report of a live role.

    Example: Heartbeat("generator-0", {"version": 3, "tokens": 512.0}, owner="generator-0/9f3c", lease_ids=["17-0"])
    """

    role_id: str
    gauges: dict[str, Any]
    owner: str = ""
    """Lease owner; empty for a role without leases."""
    lease_ids: list[str] = []


def progress_mark(gauges: dict[str, Any]) -> str:
    """Progress gauges as one string; empty without any, or with only version -1: joining is not progress.

    Example: progress_mark({"version": 3, "tokens": 512.0, "running": 7}) == "version=3 tokens=512.0"
    """
    known = {name: gauges[name] for name in PROGRESS_GAUGES if gauges.get(name) is not None}
    if known.get("version") == -1 and len(known) == 1:
        return ""
    return " ".join(f"{name}={number}" for name, number in known.items())
