"""TrajectoryFilter: which trajectories are wanted, of a live store or of an archive."""

from collections.abc import Callable
from functools import cached_property, reduce
from operator import and_
from typing import get_args

import msgspec
import numpy as np
import pyarrow.compute as pc

from slipstream.buffer.archive.manifest import ShardEntry
from slipstream.buffer.records import GroupState, Outcome
from slipstream.buffer.trajectory import Record, Trajectory

# @@ StoredTrajectory: a trajectory and where it is, alike for a live store and an archive.
GROUP_STATES: tuple[str, ...] = (*get_args(get_args(GroupState)[0]), *get_args(Outcome))
"""In the order in which a group goes through them."""


class StoredTrajectory(msgspec.Struct, frozen=True, dict=True):
    """One trajectory, and what became of its group.

    Example: StoredTrajectory(Trajectory(id="17-0-3", ...), state="retired", reason="", steps=[12])
    """

    trajectory: Trajectory
    """As it was sent."""
    state: GroupState
    """State of its group."""
    reason: str
    """Why the group ended; empty for retired and while it has not ended."""
    steps: list[int]
    """Steps that trained on it, in order."""
    archived_at: float | None = None
    """Seconds since 1970; None in a live store."""

    @cached_property
    def versions(self) -> list[int]:
        """Policy versions that sampled its model-written tokens, rising."""
        trajectory = self.trajectory
        return np.unique(trajectory.token_versions()[trajectory.model_mask]).tolist()

    @property
    def oldest_version(self) -> int:
        """What its lag is counted from."""
        return self.versions[0]

    @property
    def newest_version(self) -> int:
        """Of its last tokens, as a rule."""
        return self.versions[-1]

    @property
    def response_tokens(self) -> int:
        """Tokens the model wrote."""
        return int(np.count_nonzero(self.trajectory.model_mask))


Decode = Callable[[np.ndarray], str]
"""Token ids -> text."""


class TrajectoryFilter(Record):
    """All that are set must hold. Example: TrajectoryFilter(min_reward=0.5, outcome="retired", text="= 42")."""

    id: str | None = None
    """Of the trajectory."""
    min_reward: float | None = None
    """Reward.total, inclusive."""
    max_reward: float | None = None
    """Reward.total, inclusive."""
    min_tokens: int | None = None
    """Prompt + response, inclusive."""
    max_tokens: int | None = None
    """Prompt + response, inclusive."""
    version: int | None = None
    """Sampled at least one of its model-written tokens."""
    step: int | None = None
    """Trained on it."""
    data_source: str | None = None
    """Kind of task, whole name."""
    outcome: str | None = None
    """Where its group is, or how it ended."""
    text: str | None = None
    """Part of the decoded prompt and response."""

    def matches(self, stored: StoredTrajectory, *, decode: Decode | None) -> bool:
        """Whether it is wanted. `decode` must be given when `text` is set."""
        trajectory = stored.trajectory
        return (
            self.id in (None, trajectory.id)
            and _is_within(trajectory.reward.total, self.min_reward, self.max_reward)
            and _is_within(trajectory.num_tokens, self.min_tokens, self.max_tokens)
            and self.data_source in (None, trajectory.data_source)
            and self.outcome in (None, stored.state)
            and (self.step is None or self.step in stored.steps)
            and (self.version is None or self.version in stored.versions)
            and (self.text is None or decode is None or self.text in decode(trajectory.token_ids))
        )

    def may_be_in(self, shard: ShardEntry) -> bool:
        """Whether the shard has to be opened at all."""
        if self.step is None:
            return True
        return shard.first_step is not None and shard.first_step <= self.step <= (shard.last_step or 0)

    def expression(self) -> pc.Expression | None:
        """What the columns of a shard can tell without building trajectories; `matches` tells the rest."""
        bounds = [
            *_bounds("reward_total", self.min_reward, self.max_reward),
            *_bounds("num_tokens", self.min_tokens, self.max_tokens),
            *_bounds("id", self.id, self.id),
            *_bounds("data_source", self.data_source, self.data_source),
            *_bounds("outcome", self.outcome, self.outcome),
            *_bounds("oldest_version", None, self.version),
            *_bounds("newest_version", self.version, None),
        ]
        return reduce(and_, bounds) if bounds else None


def _is_within(value: float, low: float | None, high: float | None) -> bool:
    return (low is None or value >= low) and (high is None or value <= high)


def _bounds(column: str, low: float | str | None, high: float | str | None) -> list[pc.Expression]:
    field = pc.field(column)
    return ([field >= low] if low is not None else []) + ([field <= high] if high is not None else [])
