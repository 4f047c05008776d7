"""The wire schema: a trajectory as a generator sends it and the learner trains on it."""

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from slipstream.configs.base import Record

SCHEMA_VERSION = 4
"""Raised with every change a reader of the previous schema would misread. What version 3 wrote can be read."""

Purpose = Annotated[str, Meta(max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
"""Use of a trajectory: `train`, or the name of an evaluation, such as `greedy`."""
ShortName = Annotated[str, Meta(min_length=1, max_length=64)]
"""An open name, such as that of a stop reason or of a metric."""
Name = Annotated[str, Meta(max_length=512)]
"""An id; bounded, because the broker echoes it and the store builds keys from it."""
Count = Annotated[int, Meta(ge=0, le=2**53)]
"""A whole number that fits a double exactly: the numbers of the store's scripts are doubles."""


def make_lease_id(group_id: str, attempt: int) -> str:
    """Return the id of a lease, `<group_id>-<attempt>`."""
    return f"{group_id}-{attempt}"


def make_trajectory_id(lease_id: str, index: int) -> str:
    """Return `<group_id>-<attempt>-<index>`, which no two trajectories of a run share."""
    return f"{lease_id}-{index}"


def lease_of(trajectory_id: str) -> str:
    """Return the id of the lease that the trajectory answers; empty for any other text."""
    return trajectory_id.rpartition("-")[0]


def group_of(lease_id: str) -> str:
    """Return the id of the leased group; empty for any other text."""
    return lease_id.rpartition("-")[0]


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens from `first_token` up to the next span, sampled by policy `version`.

    Example: VersionSpan(first_token=6, version=3)
    """

    first_token: int
    """First token of the span, an index into `token_ids`."""
    version: int
    """Policy version; 0 = initial weights."""


class Reward(Record):
    """Result of the reward function.

    Example: Reward(total=0.8, parts={"positions": 0.8}, status="ok", is_correct=False)
    """

    total: float
    """Reward; 0.0 when status is not ok: such a trajectory is masked, never trained on as a zero."""
    parts: dict[str, float] = {}
    """Addends by name, for reports."""
    status: Literal["ok", "error", "timeout"] = "ok"
    is_correct: bool = False
    """Whether the response is entirely right; counted by `accuracy`."""
    detail: str = ""
    """Reason of a status that is not ok; else the answer that the function extracted, if it tells: equal answers are
    one vote in an evaluation's majority."""
    turns: list[float] = []
    """Share of `total` that each turn earned, in order; the rest belongs to the whole. Empty: all of it does."""


class Media(Record):
    """Reference to an image, video or sound that the model saw; its bytes do not travel with the trajectory.

    Example: Media(kind="image", uri="train/00017/0", checksum="9f86d081...", first_token=4, num_tokens=64)
    """

    kind: ShortName
    """`image`, `video`, `audio`."""
    uri: str
    """Name of its row and its number among the row's images, from 0."""
    checksum: Annotated[str, Meta(pattern=r"^[0-9a-f]{1,64}\Z")]
    """SHA-256 of the bytes, hexadecimal: the name under which the store and the archive have them."""
    first_token: int
    """First of its tokens, an index into `token_ids`."""
    num_tokens: int
    """Tokens that stand for it."""


class Sampling(Record):
    """Sampling parameters of a response.

    Example: Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=16, seed=77)
    """

    temperature: float
    """Softmax temperature; 0 = greedy."""
    top_p: float
    """Nucleus probability; 1 = off."""
    top_k: int
    """Number of likeliest tokens; -1 = all."""
    max_tokens: int
    """Limit of the response, tokens."""
    seed: int
    """Seed of this request alone."""


class TrajectoryHeader(Record):
    """Description of a trajectory that broker and store read; the payload stays opaque to them.

    Reward fields repeat those of the payload's Reward.

    Example: TrajectoryHeader(id="17-0-3", group_id="17", index=3, purpose="train", attempt=0, lease_id="17-0",
        prompt_uid="reverse/00017", group_size=8, num_tokens=13, written_tokens=6, oldest_version=2, newest_version=3,
        reward=0.8, reward_status="ok", is_correct=False, is_greedy=False, payload_bytes=412, checksum=1234567)
    """

    id: Name
    """Unique in the run, see `make_trajectory_id`."""
    group_id: Name
    index: Count
    """Index in the group, 0 <= index < group_size."""
    group_size: Count
    """Members that complete the group, a greedy one included."""
    purpose: Purpose
    attempt: Count
    """Number of earlier leases of the prompt."""
    lease_id: Name
    prompt_uid: str
    """Name of the prompt's row in the dataset."""
    num_tokens: Count
    """Tokens of prompt and response."""
    written_tokens: Count
    """Tokens that the model wrote."""
    oldest_version: Count
    """Smallest version that sampled one of its tokens."""
    newest_version: Count
    """Largest version that sampled one of its tokens."""
    reward: float
    reward_status: Literal["ok", "error", "timeout"]
    is_correct: bool
    is_greedy: bool
    payload_bytes: Count
    """Size of the encoded Trajectory, bytes."""
    checksum: int
    """xxh3-64 of the encoded Trajectory."""
    schema_version: int = SCHEMA_VERSION
    """Refused if newer than the reader's."""


class Trajectory(Record):
    """One answer to one prompt, token by token, as the engine sampled it; ids as in TrajectoryHeader.

    It has one context, or several, end to end: a sub-agent's, or those before and after a context was compacted. They
    are delivered, scored and trained on together: one member of the group, with one reward.

    Example: Trajectory(id="17-0-3", ..., token_ids=[4, 8, 2, 1, 3, 10, 3, 1, 2, 8, 4, 11],
        model_mask=[0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1], generator_logprobs=[0, 0, 0, 0, 0, 0, -0.1, ...],
        version_spans=[(6, 2), (9, 3)], reward=Reward(total=1.0), stop_reason="stop", ...)
    """

    id: str
    group_id: str
    index: int
    prompt_uid: str
    attempt: int
    token_ids: np.ndarray
    """Tokens of the prompt, then of the response, int32[T]; of all contexts."""
    model_mask: np.ndarray
    """bool[T], true where the model wrote the token."""
    generator_logprobs: np.ndarray
    """float32[T], log-probability under the distribution really sampled from; 0 where model_mask is false."""
    version_spans: list[VersionSpan]
    """Versions that sampled the tokens; the spans cover every model-written token, in order."""
    reward: Reward
    """Result of the reward function."""
    stop_reason: ShortName
    """`stop` (end token), `length` (max_tokens), `aborted` (cut off by the agent loop), or an agent loop's own, such as
    `stop_string`, `turn_limit`, `context_overflow`, `tool_failure`."""
    sampling: Sampling
    """Sampling parameters of the requests."""
    generator_id: str
    """Logical id of the generator that made it."""
    started_at: float
    """Seconds since 1970, the generator's clock."""
    finished_at: float
    """Seconds since 1970, the generator's clock."""
    data_source: str
    """Name of the kind of task, from the dataset."""
    num_turns: int = 1
    """Turns that the model wrote: runs of model-written tokens within a context."""
    extras: dict[str, Any] = {}
    """Data of the agent loop to be stored; plain values only."""
    context_starts: list[int] = []
    """First token of each context but the first, which starts at 0: indices into `token_ids`."""
    arrays: dict[str, np.ndarray] = {}
    """Further data per token by name, [T, ...], such as the experts that the engine chose, int16[T, layers, k]."""
    media: list[Media] = []
    """Images, videos and sounds that the model saw, in the order of their tokens."""
    metrics: dict[str, float] = {}
    """Numbers of the agent loop for reports, such as `tool_calls`."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response."""
        return len(self.token_ids)

    @property
    def is_greedy(self) -> bool:
        """Whether it was decoded greedily: the greedy member of a group is its baseline, and is not trained on."""
        return self.sampling.temperature == 0

    def context_bounds(self) -> list[int]:
        """Return the first token of each context, and the end of the last."""
        return [0, *self.context_starts, self.num_tokens]

    def turn_starts(self) -> np.ndarray:
        """Return the first token of each run of model-written tokens within a context, int64[num_turns]."""
        goes_on = np.zeros(self.num_tokens, dtype=np.bool_)
        goes_on[1:] = self.model_mask[:-1]
        goes_on[self.context_starts] = False
        return np.flatnonzero(self.model_mask & ~goes_on)

    def token_versions(self) -> np.ndarray:
        """Return the version that sampled each token, int32[T]; -1 where the model did not write it."""
        versions = np.full(self.num_tokens, -1, dtype=np.int32)
        # Spans are in order, so that each overwrites the rest of the one before.
        for span in self.version_spans:
            versions[span.first_token :] = span.version
        versions[~self.model_mask] = -1
        return versions


# --- checks of answers that guests wrote ------------------------------------------------------------------------------
class AnswerCheck(Record):
    """Differences between an answer of a guest and what one's own engine and reward functions make of it.

    Sums are over the tokens that the newest of the answer's versions sampled.

    Example: AnswerCheck("17-0-3", num_tokens=6, logprob_diff=0.004, own_logprob_diff=0.0005, surplus=-0.4,
        variance=0.9, logprob=-4.1, digest="9f3c...")
    """

    id: Name
    """Id of the trajectory."""
    num_tokens: Count = 0
    """Tokens that were scored; 0 where the checking generator has sampled none of that version to compare with."""
    logprob_diff: float = 0.0
    """Sum of the absolute differences of log-probabilities, nats."""
    own_logprob_diff: float = 0.0
    """Mean of the same in answers of one's own with that version, nats: the policy has changed since."""
    surplus: float = 0.0
    """Tokens that are the likeliest of their place, less the number that samples of the policy would have."""
    variance: float = 0.0
    """Variance of the surplus of samples."""
    logprob: float = 0.0
    """Log-probability of all that the model wrote, nats."""
    digest: Annotated[str, Meta(max_length=32)] = ""
    """Hash of all that the model wrote."""
    lie: Annotated[str, Meta(max_length=1024)] = ""
    """Prompt or reward that is not as the answer says, as one sentence; empty: none."""


# --- lag: the learner's version minus the version that sampled the token ----------------------------------------------
def lag(versions: np.ndarray, learner_version: int) -> np.ndarray:
    """Return the lags of model-written tokens, same shape as `versions`.

    Lags are negative after the learner went back to an older checkpoint: such tokens count as fresh.
    """
    return learner_version - versions


def stale_mask(trajectory: Trajectory, *, learner_version: int, max_lag: int) -> np.ndarray:
    """Return where the model wrote a token that is older than `max_lag` versions, bool[T]."""
    too_old = lag(trajectory.token_versions(), learner_version) > max_lag
    return too_old & trajectory.model_mask


def lag_histogram(trajectories: Iterable[Trajectory], *, learner_version: int) -> dict[int, int]:
    """Return lag -> number of model-written tokens, in ascending order of lag."""
    counts: Counter[int] = Counter()
    for trajectory in trajectories:
        starts = [span.first_token for span in trajectory.version_spans]
        for span, end in zip(trajectory.version_spans, [*starts[1:], None], strict=True):
            if num_tokens := int(np.count_nonzero(trajectory.model_mask[span.first_token : end])):
                counts[learner_version - span.version] += num_tokens
    return dict(sorted(counts.items()))
