"""TrajectoryFilter: selects trajectories of a live store or of an archive."""

import re
import shlex
from collections.abc import Callable
from difflib import get_close_matches
from functools import cached_property, reduce
from operator import and_
from typing import get_args

import msgspec
import numpy as np
import pyarrow.compute as pc

from slipstream.buffer.archive.index import ShardEntry
from slipstream.buffer.records import GroupState, Outcome
from slipstream.buffer.trajectory import Trajectory
from slipstream.configs.base import ConfigError, Record

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


_EQUAL = ("id", "group_id", "prompt_uid", "generator_id", "data_source", "stop_reason")
"""Fields of a filter that must equal those of the trajectory."""


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
    min_version: int | None = None
    """Least of the policy versions of which one sampled a token, inclusive."""
    max_version: int | None = None
    """Greatest of these versions, inclusive."""
    step: int | None = None
    """Step that trained on it."""
    min_step: int | None = None
    """First of the steps of which one trained on it."""
    max_step: int | None = None
    """Last of these steps."""
    group_id: str | None = None
    """Its group."""
    prompt_uid: str | None = None
    """Name of its prompt's row, in full."""
    generator_id: str | None = None
    """Generator that made it."""
    data_source: str | None = None
    """Name of the kind of task, in full."""
    outcome: str | None = None
    """State of its group, or how it ended."""
    reward_status: str | None = None
    """Status of its reward: `ok`, `error` or `timeout`."""
    stop_reason: str | None = None
    """Reason why the answer ended, such as `stop` or `length`."""
    text: str | None = None
    """Part of the decoded prompt and response."""

    @property
    def steps(self) -> tuple[int | None, int | None] | None:
        """First and last of the steps of which one must have trained on it, inclusive; None: any or none."""
        return _narrowed(self.step, self.min_step, self.max_step)

    @property
    def versions(self) -> tuple[int | None, int | None] | None:
        """Least and greatest of the versions of which one must have sampled a token, inclusive; None: any."""
        return _narrowed(self.version, self.min_version, self.max_version)

    def matches(self, stored: StoredTrajectory, *, decode: Decode | None) -> bool:
        """Whether the trajectory meets all conditions. `decode` must be given when `text` is set."""
        trajectory = stored.trajectory
        equal = {name: getattr(trajectory, name) for name in _EQUAL} | {
            "outcome": stored.state,
            "reward_status": trajectory.reward.status,
        }
        return (
            all(getattr(self, name) in (None, value) for name, value in equal.items())
            and _is_within(trajectory.reward.total, self.min_reward, self.max_reward)
            and _is_within(trajectory.num_tokens, self.min_tokens, self.max_tokens)
            and (self.steps is None or any(_is_within(step, *self.steps) for step in stored.steps))
            and (self.versions is None or any(_is_within(version, *self.versions) for version in stored.versions))
            and (self.text is None or decode is None or self.text in decode(trajectory.token_ids))
        )

    def may_be_in(self, shard: ShardEntry) -> bool:
        """Whether the shard may hold a matching trajectory, by its line in the manifest."""
        if self.steps is None:
            return True
        if shard.first_step is None or shard.last_step is None:
            return False
        first, last = self.steps
        return (first is None or first <= shard.last_step) and (last is None or last >= shard.first_step)

    def expression(self) -> pc.Expression | None:
        """Return the conditions that columns can decide without building trajectories; `matches` decides the rest."""
        least, greatest = self.versions or (None, None)
        equal = {name: getattr(self, name) for name in (*_EQUAL, "outcome", "reward_status")}
        bounds = [
            *_bounds("reward_total", self.min_reward, self.max_reward),
            *_bounds("num_tokens", self.min_tokens, self.max_tokens),
            *_bounds("oldest_version", None, greatest),
            *_bounds("newest_version", least, None),
            *(pc.field(name) == value for name, value in equal.items() if value is not None),
        ]
        return reduce(and_, bounds) if bounds else None


def _is_within(value: float, low: float | None, high: float | None) -> bool:
    return (low is None or value >= low) and (high is None or value <= high)


def _narrowed(value: int | None, low: int | None, high: int | None) -> tuple[int | None, int | None] | None:
    """Return the range [low, high], of one value if that is given; None for no condition."""
    if value is not None:
        # Outside of the range nothing is left of it: bounds that cross.
        low, high = (value if low is None else max(low, value)), (value if high is None else min(high, value))
    return None if low is None and high is None else (low, high)


def _bounds(column: str, low: float | None, high: float | None) -> list[pc.Expression]:
    field = pc.field(column)
    return ([field >= low] if low is not None else []) + ([field <= high] if high is not None else [])


_RANGES = ("reward", "tokens", "version", "step")
_EQUALS = {
    "id": "id",
    "group": "group_id",
    "prompt": "prompt_uid",
    "generator": "generator_id",
    "source": "data_source",
    "outcome": "outcome",
    "status": "reward_status",
    "stop": "stop_reason",
    "text": "text",
}
"""Word in a condition -> field of TrajectoryFilter."""
NAMES = (*_RANGES, *_EQUALS)
_CONDITION = re.compile(r"(\w+)(>=|<=|=)(.+)", re.DOTALL)


def parse_conditions(line: str) -> TrajectoryFilter:
    """Read conditions that must all hold: `NAME=VALUE`, and `>=`, `<=` for numbers. Raises ConfigError."""
    fields: dict[str, str] = {}
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise ConfigError(f"conditions must have their quotes closed, got {line!r}: {error}.") from None
    for word in words:
        fields |= _fields(word)
    try:
        found = msgspec.convert(fields, TrajectoryFilter, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"a condition must have a value that fits, got {line!r}: {error}.") from None
    if found.outcome not in (None, *GROUP_STATES):
        raise ConfigError(f"outcome must be one of {', '.join(GROUP_STATES)}, got {found.outcome!r}.")
    return found


def format_conditions(where: TrajectoryFilter) -> str:
    """Return the line that `parse_conditions` reads as this filter."""
    values = {name: value for name, value in msgspec.structs.asdict(where).items() if value is not None}
    words = [f"{word}={shlex.quote(values[field])}" for word, field in _EQUALS.items() if field in values]
    for word in _RANGES:
        low, high = values.get(f"min_{word}"), values.get(f"max_{word}")
        words += [f"{word}={values[word]}"] if word in values else []
        if low is not None and low == high:
            words.append(f"{word}={low}")
            continue
        words += [f"{word}>={low}"] if low is not None else []
        words += [f"{word}<={high}"] if high is not None else []
    return " ".join(words)


def _fields(word: str) -> dict[str, str]:
    match = _CONDITION.fullmatch(word)
    if match is None:
        raise ConfigError(f"a condition must read NAME=VALUE, NAME>=VALUE or NAME<=VALUE, got {word!r}.")
    name, relation, value = match.groups()
    if name in _EQUALS and relation == "=":
        return {_EQUALS[name]: value}
    if name in _RANGES:
        sides = {"=": ("min_", "max_"), ">=": ("min_",), "<=": ("max_",)}[relation]
        return {f"{side}{name}": value for side in sides}
    if name in _EQUALS:
        raise ConfigError(f"{name} must be given with =, got {word!r}.")
    near = get_close_matches(name, NAMES, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ConfigError(f"a condition must begin with one of {', '.join(NAMES)}, got {word!r}.{hint}")
