"""The wire schema: what a generator sends and the learner trains on."""

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

SCHEMA_VERSION = 3
"""Raised with every change a reader of the previous schema would misread."""

Purpose = Literal["train", "sampled", "greedy"]
"""What a trajectory is for: the buffer, or one of the two evaluations (temperature 1, temperature 0)."""
Name = Annotated[str, Meta(max_length=512)]
"""An id. Bounded, because the broker answers with it and the store makes keys of it."""
Count = Annotated[int, Meta(ge=0, le=2**53)]
"""A number that scripts, which know doubles alone, read as it is."""


def make_lease_id(group_id: str, attempt: int) -> str:
    """`<group_id>-<attempt>`."""
    return f"{group_id}-{attempt}"


def make_trajectory_id(lease_id: str, index: int) -> str:
    """`<group_id>-<attempt>-<index>`: of the lease it answers, so that no two trajectories of a run can share one."""
    return f"{lease_id}-{index}"


def lease_of(trajectory_id: str) -> str:
    """The id of the lease that it answers; empty where it is no trajectory's id."""
    return trajectory_id.rpartition("-")[0]


def group_of(lease_id: str) -> str:
    """The id of the group that was leased; empty where it is no lease's id."""
    return lease_id.rpartition("-")[0]


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of everything that crosses a process boundary."""


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """From `first_token` on, tokens were sampled by policy `version`, until the next span begins.

    Example: VersionSpan(first_token=6, version=3)
    """

    first_token: int
    """Index into `token_ids`."""
    version: int
    """Policy version; 0 = initial weights."""


class Reward(Record):
    """What the reward function said.

    Example: Reward(total=0.8, parts={"positions": 0.8}, status="ok", is_correct=False)
    """

    total: float
    """The number trained on; 0.0 when status is not ok, and such a trajectory is masked, never trained as a zero."""
    parts: dict[str, float] = {}
    """Named addends, for the record."""
    status: Literal["ok", "error", "timeout"] = "ok"
    """Whether the reward function answered."""
    is_correct: bool = False
    """Whether the response is entirely right; what `accuracy` counts."""
    detail: str = ""
    """Why status is not ok; empty otherwise."""


class Sampling(Record):
    """How this response was drawn. Example: Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=16, seed=77)."""

    temperature: float
    """0 = greedy."""
    top_p: float
    """1 = off."""
    top_k: int
    """-1 = off."""
    max_tokens: int
    """Longest response, tokens."""
    seed: int
    """Of this request alone."""


class TrajectoryHeader(Record):
    """The small part the broker and the store read; the rest stays opaque to them.

    Example: TrajectoryHeader(id="17-0-3", group_id="17", index=3, purpose="train", attempt=0, lease_id="17-0",
        prompt_uid="reverse/00017", group_size=8, num_tokens=13, written_tokens=6, oldest_version=2, newest_version=3,
        reward=0.8, reward_status="ok", is_correct=False, is_greedy=False, payload_bytes=412, checksum=1234567)
    """

    id: Name
    """Unique in the run, see `make_trajectory_id`."""
    group_id: Name
    """The prompt lease's group."""
    index: Count
    """Place in the group, 0 <= index < group_size."""
    group_size: Count
    """Members the group needs, a greedy one included."""
    purpose: Purpose
    """Training or evaluation."""
    attempt: Count
    """How often the prompt had been leased before this one."""
    lease_id: Name
    """The lease this answers."""
    prompt_uid: str
    """Row of the dataset."""
    num_tokens: Count
    """Prompt + response."""
    written_tokens: Count
    """Those the model wrote."""
    oldest_version: Count
    """Smallest version of a model-written token."""
    newest_version: Count
    """Largest version of a model-written token."""
    reward: float
    """Reward.total."""
    reward_status: Literal["ok", "error", "timeout"]
    """Reward.status."""
    is_correct: bool
    """Reward.is_correct."""
    is_greedy: bool
    """Trajectory.is_greedy."""
    payload_bytes: Count
    """Length of the encoded Trajectory."""
    checksum: int
    """xxh3-64 of the encoded Trajectory."""
    schema_version: int = SCHEMA_VERSION
    """Refused when newer than the reader's."""


class Trajectory(Record):
    """One response to one prompt, token by token, as the engine sampled it.

    Example: Trajectory(id="17-0-3", ..., token_ids=[4, 8, 2, 1, 3, 10, 3, 1, 2, 8, 4, 11],
        model_mask=[0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1], generator_logprobs=[0, 0, 0, 0, 0, 0, -0.1, ...],
        version_spans=[(6, 2), (9, 3)], reward=Reward(total=1.0), stop_reason="stop", ...)
    """

    id: str
    """See TrajectoryHeader."""
    group_id: str
    """See TrajectoryHeader."""
    index: int
    """See TrajectoryHeader."""
    prompt_uid: str
    """See TrajectoryHeader."""
    attempt: int
    """See TrajectoryHeader."""
    token_ids: np.ndarray
    """int32[T], prompt then response."""
    model_mask: np.ndarray
    """bool[T], true where the model wrote the token."""
    generator_logprobs: np.ndarray
    """float32[T], log-probability under the distribution really sampled from; 0 where model_mask is false."""
    version_spans: list[VersionSpan]
    """Which version sampled which token; covers every model-written token, in order."""
    reward: Reward
    """What the reward function said."""
    stop_reason: Literal["stop", "length", "aborted"]
    """End token | max_tokens | cut off by the agent loop."""
    sampling: Sampling
    """How the response was drawn."""
    generator_id: str
    """Who made it."""
    started_at: float
    """Seconds since 1970, the generator's clock."""
    finished_at: float
    """Seconds since 1970, the generator's clock."""
    data_source: str
    """The dataset's name of this kind of task."""
    num_turns: int = 1
    """Model turns."""
    extras: dict[str, Any] = {}
    """Whatever the agent loop wants kept; plain values only."""

    @property
    def num_tokens(self) -> int:
        """Prompt + response."""
        return len(self.token_ids)

    @property
    def is_greedy(self) -> bool:
        """Whether each token was the likeliest; the greedy member of a group is its baseline, and not trained on."""
        return self.sampling.temperature == 0

    def token_versions(self) -> np.ndarray:
        """int32[T]: the version that sampled each token; -1 where the model did not write it."""
        versions = np.full(self.num_tokens, -1, dtype=np.int32)
        for span in self.version_spans:
            versions[span.first_token :] = span.version
        versions[~self.model_mask] = -1
        return versions


# @@ How old tokens are: lag of a token = learner's version - the version that sampled it.
def lag(versions: np.ndarray, learner_version: int) -> np.ndarray:
    """Versions (of model-written tokens) -> lags, same shape.

    Negative after the learner went back to an older checkpoint: such tokens count as fresh.
    """
    return learner_version - versions


def stale_mask(trajectory: Trajectory, *, learner_version: int, max_lag: int) -> np.ndarray:
    """bool[T]: true where the model wrote the token and it is older than `max_lag` versions."""
    too_old = lag(trajectory.token_versions(), learner_version) > max_lag
    return too_old & trajectory.model_mask


def lag_histogram(trajectories: Iterable[Trajectory], *, learner_version: int) -> dict[int, int]:
    """Lag -> number of model-written tokens, in rising order of lag."""
    counts: Counter[int] = Counter()
    for trajectory in trajectories:
        versions = trajectory.token_versions()[trajectory.model_mask]
        lags, tokens = np.unique(lag(versions, learner_version), return_counts=True)
        counts.update(dict(zip(lags.tolist(), tokens.tolist(), strict=True)))
    return dict(sorted(counts.items()))
