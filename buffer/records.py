"""Records that the store takes and returns: leases, claims, ledger entries, the run's state, evaluations, events."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Literal

import msgspec
import xxhash

from slipstream.buffer.codec import decode, unpack
from slipstream.buffer.trajectory import Media, Purpose, Trajectory, TrajectoryHeader
from slipstream.configs.base import Record

# --- limits of what is stored for people only ------------------------------------------------------------------------
METRICS_KEPT = 1000
"""Number of metrics rows stored."""
EVENTS_KEPT = 256
"""Number of events stored."""
EVENT_CHARACTERS_KEPT = 1000
"""First characters of an event."""
ROLES_KEPT = 8192
"""Most recently reported roles; living ones report every second, so those that left long ago are dropped first."""
FRAMES_KEPT = 256
"""Number of rejected frames stored."""
FRAME_BYTES_KEPT = 4096
"""First bytes of a rejected frame."""

Addressee = Literal["launcher", "broker", "learner"]
"""Roles that take requests through the store."""
Outcome = Literal["retired", "rejected", "expired", "quarantined", "evaluated"]
"""End of a group: covered by a durable checkpoint | refused by the run's filter or the learner | too late | tried too
often | an answer to an evaluation, never trained on."""
GroupState = Literal["open", "ready", "claimed", "used"] | Outcome
"""State of a stored group, or its end."""


# --- prompts and trajectories ----------------------------------------------------------------------------------------
class Lease(Record):
    """A prompt handed to a generator, with a deadline.

    Example: Lease(id="17-0", group_id="17", purpose="train", row=4711, ordinal=17, attempt=0, indices=[0, ..., 7])
    """

    id: str
    """Built by `make_lease_id`: `<group_id>-<attempt>`."""
    group_id: str
    """Training: the ordinal. Evaluation: `<evaluation id>:<row>`."""
    purpose: Purpose
    """Training, or one of the evaluations."""
    row: int
    """Row of the training file (of the held-out file for evaluations)."""
    ordinal: int
    """Number of the prompt in the endless sequence of seeded epoch permutations; evaluations: the row."""
    attempt: int
    """Number of earlier leases of this prompt."""
    indices: list[int]
    """Members still missing from the group."""


class Insertion(Record):
    """Outcome of inserting one trajectory. Example: Insertion(outcome="inserted", group_is_ready=True)."""

    outcome: Literal["inserted", "duplicate", "superseded", "refused"]
    """Stored | the same was stored before | its index was filled by another attempt | not stored, see reason.

    All but `refused` are acknowledged to the sender."""
    reason: str = ""
    """Reason of a refusal: `content_conflict`, `unknown_group`, `group_size`, `baseline`, `unknown_lease`,
    `future_version`, `other_version` (than that of its evaluation), `store_full`."""
    group_is_ready: bool = False
    """Whether this trajectory completed its group, and no filter rejected the group."""


class StoredGroup(Record):
    """A group of a live store, with all that is stored of it.

    Example: StoredGroup(id="380", state="used", reason="", steps=[12], payloads=[b"...", ...])
    """

    id: str
    state: GroupState
    """State at the time of reading."""
    reason: str
    """Reason of its end; empty for retired groups and those that are not over."""
    steps: list[int]
    """Steps that trained on it, in order."""
    payloads: list[bytes]
    """Encoded trajectories by index; missing members are left out."""


class FinishedGroup(Record):
    """A group that is over, with all that was stored of it: the unit of the archive.

    Example: FinishedGroup(id="380", outcome="retired", reason="", steps=[12], payloads=[b"...", ...])
    """

    id: str
    outcome: Outcome
    reason: str
    """Reason of its end; empty for retired groups."""
    steps: list[int]
    """Steps that trained on it, in order."""
    payloads: list[bytes]
    """Encoded trajectories by index; missing members are left out."""


# --- steps -----------------------------------------------------------------------------------------------------------
class LagSplit(Record):
    """Origin of a claim's lag: means over its trajectories' oldest tokens, in versions.

    Example: LagSplit(in_flight=0.4, publish=0.2, queue=1.1), of a mean lag of 1.7
    """

    in_flight: float = 0.0
    """Applied by all generators between sampling the token and the arrival of its trajectory."""
    publish: float = 0.0
    """Made by the learner, but not yet applied by all, at the arrival."""
    queue: float = 0.0
    """Made while the group waited in the buffer."""


class Claim(Record):
    """Groups handed to the learner for one step.

    Example: Claim(step=12, fence=31, group_ids=["380", "377"], weights=[1.0, 1.0], reused=[False, False])
    """

    step: int
    """The step that may train on them."""
    fence: int
    """Fencing token: grows with every claim; a commit with an older one is refused."""
    group_ids: list[str]
    """Groups in the order sampled."""
    weights: list[float] = []
    """Factor on each group's loss, as the sampler demands; empty: all 1."""
    reused: list[bool] = []
    """Whether each group was trained on before; empty: none."""
    lag: LagSplit = LagSplit()
    """Age of the groups, by origin."""


class StepEntry(Record):
    """Entry of the step ledger.

    Example: StepEntry(step=12, version=11, fence=31, seed=0, config_hash="9f2c...", group_ids=["380", "377"],
        trajectory_ids=[["380-0-0", "380-0-1"], ["377-1-0", "377-0-1"]])
    """

    step: int
    """Number of the step, counted from 1."""
    version: int
    """Learner's policy version at the start of the step; lags are counted from it."""
    fence: int
    """Fencing token of the committed claim."""
    seed: int
    config_hash: str
    """First 16 hexadecimal digits of the SHA-256 of the run's settings."""
    group_ids: list[str]
    """Groups in the order sampled."""
    trajectory_ids: list[list[str]]
    """Trajectories of each group, by index."""
    weights: list[float] = []
    """Factor on each group's loss; empty: all 1."""
    reused: list[bool] = []
    """Whether each group was trained on before; empty: none."""
    mixed_group_ids: list[str] = []
    """Groups of another run's archive that were trained on beside them, in order."""


class _TrajectoryId(msgspec.Struct):
    """Decodes an encoded Trajectory's id and skips the rest."""

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
    """Build the entry of a step that trained on `payloads`, and on archived groups, at the learner's `version`."""
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
    """Decodes what an encoded Trajectory refers to and skips the rest."""

    media: list[Media] = []


def image_names(payloads: Iterable[bytes]) -> set[str]:
    """Names of the images that encoded trajectories refer to, under which their bytes are stored."""
    found = chain.from_iterable(decode(payload, _MediaOf).media for payload in payloads)
    return {media.checksum for media in found if media.kind == "image"}


class CheckpointPointer(Record):
    """The newest durable checkpoint. Example: CheckpointPointer(step=50, version=50, name="step-00000050")."""

    step: int
    """Last step that the checkpoint covers."""
    version: int
    """Policy version of its weights."""
    name: str
    """Its folder in the run's checkpoints."""


# --- the run ---------------------------------------------------------------------------------------------------------
class RunState(Record):
    """State of the run.

    Example: RunState(run_id="digits_cpu", phase="training", step=12, version=12, announced_version=13)
    """

    run_id: str
    phase: Literal["starting", "training", "finishing", "finished", "failed"]
    """starting: no batch yet | finishing: no more training prompts are leased | finished, failed: over."""
    step: int
    """Last step that was committed."""
    version: int
    """Newest version that all members applied and verified."""
    announced_version: int
    """Newest version whose broadcast has begun; tokens of later ones are refused."""
    consumed: int = 0
    """Groups trained on for the first time in the steps that are in `version`; pacing counts from it."""
    checkpoint: CheckpointPointer | None = None
    """Checkpoint from which a resumed run starts; None before the first."""
    detail: str = ""
    """Reason of the phase, for people."""
    stepped_at: float | None = None
    """Commit of the last step, seconds of the store's clock; None before the first."""
    fence: int = 0
    """Fencing token of the last committed claim; after a rollback and before the first commit, the rollback's.

    Only the learner that holds it may declare a checkpoint."""
    next_ordinal: int = 0
    """Ordinal of the next new training prompt."""
    admitted: int = 0
    """`StoreCounts.admitted`."""


class VersionEntry(Record):
    """A published set of weights. Example: VersionEntry(version=12, step=12, checksum="9f86d081884c7d65")."""

    version: int
    """Policy version; one that is published again after a resume is entered again."""
    step: int
    """Last step that is in the weights; 0 = initial weights."""
    checksum: str
    """xxh3-64 over the checksums of all buckets as sent, hexadecimal: equal for equal weights."""


class EvaluationResult(Record):
    """Running totals of an evaluation, complete when `num_answered == num_asked`.

    Example: EvaluationResult(id="final-sampled", purpose="sampled", version=120, num_asked=512, num_answered=512,
        num_correct=490)
    """

    id: str
    """Name chosen by the role that opened it."""
    purpose: Purpose
    version: int
    """Policy version that samples every token of its answers."""
    num_asked: int
    """Answers asked for: held-out rows, times samples of each."""
    num_answered: int
    """Answers in at the time of reading."""
    num_correct: int
    """Answers that are entirely right."""
    num_failed: int = 0
    """Answers whose reward function failed; not correct."""

    @property
    def is_complete(self) -> bool:
        return self.num_answered >= self.num_asked

    @property
    def accuracy(self) -> float:
        """Share of answers entirely right; 0 before the first."""
        return self.num_correct / self.num_answered if self.num_answered else 0.0


class EvaluationAnswer(Record):
    """One answer to a held-out prompt, without its tokens: the input of scores.

    Example: EvaluationAnswer(row=17, reward=1.0, is_correct=True, status="ok", data_source="openai/gsm8k",
        stop_reason="stop", num_tokens=212, version=40, answer="42")
    """

    row: int
    """Row of the set's file."""
    reward: float
    is_correct: bool
    """Whether it is entirely right; never with a status that is not ok."""
    status: str
    """Status of its reward."""
    data_source: str
    stop_reason: str
    num_tokens: int
    """Tokens that the model wrote."""
    version: int
    """Policy version that sampled its last token."""
    answer: str = ""
    """Answer that counts as one vote of a majority: what the reward function extracted, else another name of the whole
    response, such as its text; empty = it has no vote."""


def make_answer(row: int, trajectory: Trajectory, *, text: str = "") -> EvaluationAnswer:
    """Build the answer of a trajectory; `text` names the response where the reward function extracted nothing."""
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
    """Build the answer of an arrived trajectory, whose tokens name the response."""
    trajectory = unpack(payload)
    row = int(header.group_id.rpartition(":")[2].partition(".")[0])
    written = trajectory.token_ids[trajectory.model_mask]
    return make_answer(row, trajectory, text=xxhash.xxh3_64_hexdigest(written.tobytes()))


# --- monitoring ------------------------------------------------------------------------------------------------------
class Event(Record):
    """A failure or recovery of a role, for people.

    Example: Event(at=1763718000.25, role="generator-1", text="died (signal SIGKILL); restarting in 1 s")
    """

    at: float
    """Time, seconds of the store's clock."""
    role: str
    text: str
    """One sentence; a long one is cut."""


class MetricsRows(Record):
    """Rows of metrics, oldest first. Example: MetricsRows(last=1002, rows=[{"step": 1001}, {"step": 1002}])."""

    last: int
    """Number of rows ever appended; the next read continues after it."""
    rows: list[dict[str, Any]]
    """The rows requested that are still stored."""


PROGRESS_GAUGES = ("version", "tokens", "trajectories", "updates", "groups", "last_step")
"""Gauges that grow with the work of a generator, the learner or the archiver; broker and launcher have none of them."""


class Heartbeat(Record):
    """Sign of life of a role: its newest gauges, and the leases that it still works on.

    Example: Heartbeat("generator-0", {"version": 3, "tokens": 512.0}, owner="generator-0/9f3c", lease_ids=["17-0"])
    """

    role_id: str
    gauges: dict[str, Any]
    """Plain values."""
    owner: str = ""
    """Owner of the leases; empty for a role that holds none."""
    lease_ids: list[str] = []


def progress_mark(gauges: dict[str, Any]) -> str:
    """Return the progress gauges as one text; empty when there are none.

    A peer that has just joined reports version -1 and no totals: joining again is no progress.

    Example: progress_mark({"version": 3, "tokens": 512.0, "running": 7}) == "version=3 tokens=512.0"
    """
    known = {name: gauges[name] for name in PROGRESS_GAUGES if gauges.get(name) is not None}
    if known.get("version") == -1 and len(known) == 1:
        return ""
    return " ".join(f"{name}={number}" for name, number in known.items())
