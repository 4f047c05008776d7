"""TrajectoryFilter: selects trajectories of a live store or of an archive."""

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

GROUP_STATES: tuple[str, ...] = (*get_args(get_args(GroupState)[0]), *get_args(Outcome))
"""In the order in which a group goes through them."""


class StoredTrajectory(msgspec.Struct, frozen=True, dict=True):
    """One trajectory and the state of its group, in a live store or an archive.

    Example: StoredTrajectory(Trajectory(id="17-0-3", ...), state="retired", reason="", steps=[12])
    """

    trajectory: Trajectory
    state: GroupState
    """State of its group, or how it ended."""
    reason: str
    """Reason of the group's end; empty for retired groups and those that are not over."""
    steps: list[int]
    """Steps that trained on it, in order."""
    archived_at: float | None = None
    """Time of archiving, seconds since 1970; None in a live store."""

    @cached_property
    def versions(self) -> list[int]:
        """Policy versions that sampled its model-written tokens, in ascending order."""
        trajectory = self.trajectory
        return np.unique(trajectory.token_versions()[trajectory.model_mask]).tolist()

    @property
    def oldest_version(self) -> int:
        """Version from which its lag is counted."""
        return self.versions[0]

    @property
    def newest_version(self) -> int:
        """Largest version of a token, usually that of its last ones."""
        return self.versions[-1]

    @property
    def response_tokens(self) -> int:
        """Number of tokens that the model wrote."""
        return int(np.count_nonzero(self.trajectory.model_mask))


Decode = Callable[[np.ndarray], str]
"""Turns token ids into text."""


class TrajectoryFilter(Record):
    """Conditions that a trajectory must meet, all that are set.

    Example: TrajectoryFilter(min_reward=0.5, outcome="retired", text="= 42")
    """

    id: str | None = None
    """Id of the one trajectory."""
    min_reward: float | None = None
    """Least total reward, itself included."""
    max_reward: float | None = None
    """Greatest total reward, itself included."""
    min_tokens: int | None = None
    """Fewest tokens of prompt and response, inclusive."""
    max_tokens: int | None = None
    """Most tokens of prompt and response, inclusive."""
    version: int | None = None
    """Policy version that sampled at least one of its tokens."""
    step: int | None = None
    """Step that trained on it."""
    data_source: str | None = None
    """Name of the kind of task, in full."""
    outcome: str | None = None
    """State of its group, or how it ended."""
    text: str | None = None
    """Part of the decoded prompt and response."""

    def matches(self, stored: StoredTrajectory, *, decode: Decode | None) -> bool:
        """Whether the trajectory meets all conditions. `decode` must be given when `text` is set."""
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
        """Whether the shard may hold a matching trajectory, by its line in the manifest."""
        if self.step is None:
            return True
        return shard.first_step is not None and shard.first_step <= self.step <= (shard.last_step or 0)

    def expression(self) -> pc.Expression | None:
        """Return the conditions that columns can decide without building trajectories; `matches` decides the rest."""
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
