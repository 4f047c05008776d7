"""Wire schema of a trajectory, from the generator to the learner."""

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from slipstream.configs.base import Record

SCHEMA_VERSION = 4
"""Increment if older readers would misread the new schema. Version 3 is still readable."""

Purpose = Annotated[str, Meta(max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
"""`train`, or the name of an evaluation, such as `greedy`."""
ShortName = Annotated[str, Meta(min_length=1, max_length=64)]
"""Free-form name of a stop reason, metric, etc."""
Name = Annotated[str, Meta(max_length=512)]
"""An id, bounded because the broker echoes it and keys contain it."""
Count = Annotated[int, Meta(ge=0, le=2**53)]
"""Exact as a double: numbers in the store's scripts are doubles."""


def make_lease_id(group_id: str, attempt: int) -> str:
    """Build the id of a lease, `<group_id>-<attempt>`."""
    return f"{group_id}-{attempt}"


def make_trajectory_id(lease_id: str, index: int) -> str:
    """`<group_id>-<attempt>-<index>`, unique within the run."""
    return f"{lease_id}-{index}"


def lease_of(trajectory_id: str) -> str:
    """Lease id within a trajectory id; empty for other text."""
    return trajectory_id.rpartition("-")[0]


def group_of(lease_id: str) -> str:
    """Group id within a lease id; empty for other text."""
    return lease_id.rpartition("-")[0]


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens up to the next span, all sampled by policy `version`.

    Example: VersionSpan(first_token=6, version=3)
    """

    first_token: int
    """Index into `token_ids`."""
    version: int
    """0 = initial weights."""


class Reward(Record):
    """Result of the reward function.

    Example: Reward(total=0.8, parts={"positions": 0.8}, status="ok", is_correct=False)
    """

    total: float
    """0.0 if the status is not ok; the trajectory is then masked."""
    parts: dict[str, float] = {}
    """Components by name."""
    status: Literal["ok", "error", "timeout"] = "ok"
    is_correct: bool = False
    """Fully correct; counted by `accuracy`."""
    detail: str = ""
    """The reason if the status is not ok; else the extracted answer, if any, for majority votes."""
    turns: list[float] = []
    """Share of `total` earned by each turn; the rest goes to the whole trajectory."""


class Media(Record):
    """An image, video, or sound, without its bytes.

    Example: Media(kind="image", uri="train/00017/0", checksum="9f86d081...", first_token=4, num_tokens=64)
    """

    kind: ShortName
    """`image`, `video`, or `audio`."""
    uri: str
    """Row name and 0-based image number within the row."""
    checksum: Annotated[str, Meta(pattern=r"^[0-9a-f]{1,64}\Z")]
    """SHA-256 of the bytes, hexadecimal; their name in store and archive."""
    first_token: int
    """Index of its first token in `token_ids`."""
    num_tokens: int


class Sampling(Record, omit_defaults=True):
    """Sampling parameters of a response.

    Example: Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=16, seed=77)
    """

    temperature: float
    """Softmax temperature; 0 = greedy."""
    top_p: float
    """Nucleus probability; 1 = off."""
    top_k: int
    """Most likely tokens to keep; -1 = all."""
    max_tokens: int
    seed: int
    """Seed of this request only."""
    min_p: float | None = None
    """Smallest probability, relative to the likeliest token; None = off."""
    ignore_eos: bool = False
    """Whether end tokens don't end the response."""


class TrajectoryHeader(Record):
    """Summary of a trajectory for routing, admission, and accounting.

    Example: TrajectoryHeader(id="17-0-3", group_id="17", index=3, purpose="train", attempt=0, lease_id="17-0",
        prompt_uid="reverse/00017", group_size=8, num_tokens=13, written_tokens=6, oldest_version=2, newest_version=3,
        reward=0.8, reward_status="ok", is_correct=False, is_greedy=False, payload_bytes=412, checksum=1234567)
    """

    id: Name
    """See `make_trajectory_id`."""
    group_id: Name
    index: Count
    """Index in the group, 0 <= index < group_size."""
    group_size: Count
    """Members of a complete group, including a greedy one."""
    purpose: Purpose
    attempt: Count
    """Earlier leases of the prompt."""
    lease_id: Name
    prompt_uid: str
    """Name of the dataset row."""
    num_tokens: Count
    """Tokens of prompt and response."""
    written_tokens: Count
    oldest_version: Count
    """Oldest version that sampled a token."""
    newest_version: Count
    reward: float
    reward_status: Literal["ok", "error", "timeout"]
    is_correct: bool
    is_greedy: bool
    payload_bytes: Count
    """Size of the encoded Trajectory."""
    checksum: int
    """xxh3-64 of the encoded Trajectory."""
    schema_version: int = SCHEMA_VERSION
    """Rejected if newer than the reader's."""


class Trajectory(Record):
    """One response to one prompt, token by token. Ids are as in TrajectoryHeader.

    It concatenates one or more contexts (of sub-agents, or around a compaction) with one reward.

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
    """int32[T], over all contexts; each starts with prompt tokens."""
    model_mask: np.ndarray
    """bool[T], true where the model wrote the token."""
    generator_logprobs: np.ndarray
    """float32[T], log-probability under the distribution actually sampled from; 0 where model_mask is false."""
    version_spans: list[VersionSpan]
    """In token order, covering every model-written token."""
    reward: Reward
    stop_reason: ShortName
    """`stop` (end token), `length` (max_tokens), `aborted`, or defined by an agent loop: `stop_string`, `turn_limit`,
    `context_overflow`, `tool_failure`, etc.
    """
    sampling: Sampling
    generator_id: str
    started_at: float
    """Seconds since 1970, generator's clock."""
    finished_at: float
    data_source: str
    """Task type, from the dataset."""
    num_turns: int = 1
    """Runs of model-written tokens within contexts."""
    extras: dict[str, Any] = {}
    """Plain values of the agent loop."""
    context_starts: list[int] = []
    """Index into `token_ids` of each context's first token, except the first context's."""
    arrays: dict[str, np.ndarray] = {}
    """More per-token data by name, [T, ...], such as the chosen experts, int16[T, layers, k]."""
    media: list[Media] = []
    """In token order."""
    metrics: dict[str, float] = {}
    """Numbers of the agent loop, such as `tool_calls`."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_greedy(self) -> bool:
        """Whether it was decoded greedily, as is a group's baseline, which is not trained on."""
        return self.sampling.temperature == 0

    def context_bounds(self) -> list[int]:
        """First token of each context, and the end of the last."""
        return [0, *self.context_starts, self.num_tokens]

    def turn_starts(self) -> np.ndarray:
        """First token of each turn, int64[num_turns]."""
        continues = np.zeros(self.num_tokens, dtype=np.bool_)
        continues[1:] = self.model_mask[:-1]
        continues[self.context_starts] = False
        return np.flatnonzero(self.model_mask & ~continues)

    def token_versions(self) -> np.ndarray:
        """Version that sampled each token, int32[T]; -1 for tokens not written by the model."""
        versions = np.full(self.num_tokens, -1, dtype=np.int32)
        # Each span overwrites the tail of the previous one.
        for span in self.version_spans:
            versions[span.first_token :] = span.version
        versions[~self.model_mask] = -1
        return versions


# --- checks of answers written by guests ------------------------------------------------------------------------------
class AnswerCheck(Record):
    """Comparison of a guest's answer with our recomputation. Sums run over tokens of its newest version.

    Example: AnswerCheck("17-0-3", num_tokens=6, logprob_diff=0.004, own_logprob_diff=0.0005, surplus=-0.4,
        variance=0.9, logprob=-4.1, digest="9f3c...")
    """

    id: Name
    num_tokens: Count = 0
    """Tokens scored; 0 if the checker has no samples of that version."""
    logprob_diff: float = 0.0
    """Sum of absolute log-probability differences, nats."""
    own_logprob_diff: float = 0.0
    """Mean absolute difference over our own answers, nats: the policy may have changed since."""
    surplus: float = 0.0
    """Number of likeliest tokens among the sampled, minus its expectation under the policy."""
    variance: float = 0.0
    """Variance of `surplus` under the policy."""
    logprob: float = 0.0
    """Log-probability of all model-written tokens, nats."""
    digest: Annotated[str, Meta(max_length=32)] = ""
    """Hash of all model-written tokens."""
    lie: Annotated[str, Meta(max_length=1024)] = ""
    """Sentence on a false prompt or reward; empty: none."""


# --- lag: the learner's version minus the version that sampled the token ----------------------------------------------
def lag(versions: np.ndarray, learner_version: int) -> np.ndarray:
    """Lag of tokens, shaped as `versions`; negative (fresh) after a resume from an older checkpoint."""
    return learner_version - versions


def stale_mask(trajectory: Trajectory, *, learner_version: int, max_lag: int) -> np.ndarray:
    """Whether model-written tokens are more than `max_lag` versions old, bool[T]."""
    return (lag(trajectory.token_versions(), learner_version) > max_lag) & trajectory.model_mask


def lag_histogram(trajectories: Iterable[Trajectory], *, learner_version: int) -> dict[int, int]:
    """Lag -> number of model-written tokens, ascending."""
    counts: Counter[int] = Counter()
    for trajectory in trajectories:
        starts = [span.first_token for span in trajectory.version_spans]
        for span, end in zip(trajectory.version_spans, [*starts[1:], None], strict=True):
            if num_tokens := int(np.count_nonzero(trajectory.model_mask[span.first_token : end])):
                counts[learner_version - span.version] += num_tokens
    return dict(sorted(counts.items()))
