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
"""In life-cycle order."""


class StoredTrajectory(msgspec.Struct, frozen=True, dict=True):
    """A trajectory in a live store or an archive.

    Example: StoredTrajectory(Trajectory(id="17-0-3", ...), state="retired", reason="", steps=[12])
    """

    trajectory: Trajectory
    state: GroupState
    """State or outcome of its group."""
    reason: str
    """Reason of the outcome; empty for retired and unfinished groups."""
    steps: list[int]
    """Steps that trained on it, in order."""
    archived_at: float | None = None
    """Seconds since 1970; None in a live store."""

    @cached_property
    def versions(self) -> list[int]:
        """Policy versions that sampled its tokens, ascending."""
        trajectory = self.trajectory
        return np.unique(trajectory.token_versions()[trajectory.model_mask]).tolist()

    @property
    def oldest_version(self) -> int:
        return self.versions[0]

    @property
    def newest_version(self) -> int:
        return self.versions[-1]

    @property
    def response_tokens(self) -> int:
        return int(np.count_nonzero(self.trajectory.model_mask))


Decode = Callable[[np.ndarray], str]


_EQUAL = ("id", "group_id", "prompt_uid", "generator_id", "data_source", "stop_reason")
"""Fields compared for equality with the trajectory's."""


class TrajectoryFilter(Record):
    """Conditions on a trajectory; all must hold. Bounds are inclusive; None = no condition.

    Example: TrajectoryFilter(min_reward=0.5, outcome="retired", text="= 42")
    """

    id: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_tokens: int | None = None
    """Prompt and response tokens together."""
    max_tokens: int | None = None
    version: int | None = None
    """Version that sampled at least one token."""
    min_version: int | None = None
    """A version from min_version to max_version must have sampled a token."""
    max_version: int | None = None
    step: int | None = None
    min_step: int | None = None
    """A step from min_step to max_step must have trained on it."""
    max_step: int | None = None
    group_id: str | None = None
    prompt_uid: str | None = None
    """Name of the dataset row."""
    generator_id: str | None = None
    data_source: str | None = None
    outcome: str | None = None
    """State or outcome of its group."""
    reward_status: str | None = None
    stop_reason: str | None = None
    text: str | None = None
    """Substring of the decoded prompt and response."""

    @property
    def steps(self) -> tuple[int | None, int | None] | None:
        """Required range of training steps; None: trained on or not."""
        return _narrowed(self.step, self.min_step, self.max_step)

    @property
    def versions(self) -> tuple[int | None, int | None] | None:
        """Required range of versions; None: any."""
        return _narrowed(self.version, self.min_version, self.max_version)

    def matches(self, stored: StoredTrajectory, *, decode: Decode | None) -> bool:
        """Whether the trajectory meets all conditions. `text` is ignored without `decode`."""
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
        """Whether a shard's steps allow a match."""
        if self.steps is None:
            return True
        if shard.first_step is None or shard.last_step is None:
            return False
        first, last = self.steps
        return (first is None or first <= shard.last_step) and (last is None or last >= shard.first_step)

    def expression(self) -> pc.Expression | None:
        """Conditions that columns can express; `matches` evaluates all."""
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
    """Intersect `value` (if given) with [low, high]; None = no condition."""
    if value is not None:
        low, high = (value if low is None else max(low, value)), (value if high is None else min(high, value))
    return None if low is None and high is None else (low, high)


def _bounds(column: str, low: float | None, high: float | None) -> list[pc.Expression]:
    field = pc.field(column)
    return ([field >= low] if low is not None else []) + ([field <= high] if high is not None else [])


# --- conditions as text -----------------------------------------------------------------------------------------------
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
    """Parse conditions such as `reward>=0.5 source=math`. Raises ConfigError."""
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
    """Render a filter as text that `parse_conditions` reads."""
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
