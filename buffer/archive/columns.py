"""Converts finished groups to an Arrow table, and rows to trajectories.

One row per trajectory, which re-encodes to the archived bytes exactly.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, get_type_hints

import msgspec
import numpy as np
import pyarrow as pa

from slipstream.buffer.archive.trajectory_filter import StoredTrajectory
from slipstream.buffer.codec import encode, from_wire, to_wire, unpack
from slipstream.buffer.records import StoredGroup
from slipstream.buffer.trajectory import SCHEMA_VERSION, Media, Reward, Sampling, Trajectory, VersionSpan

ARCHIVE_SCHEMA = 2
"""Increment when an older reader would misread the columns."""
_ARCHIVE_KEY, _TRAJECTORY_KEY = b"slipstream.archive_schema", b"slipstream.trajectory_schema"

_LISTS: dict[str, pa.DataType] = {"token_ids": pa.int32(), "model_mask": pa.bool_(), "generator_logprobs": pa.float32()}
_TYPES: dict[Any, pa.DataType] = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
_TYPES[float | None] = pa.float64()


def _struct(record: type) -> pa.DataType:
    return pa.struct({name: _TYPES[hint] for name, hint in get_type_hints(record).items()})


_ARRAY = pa.struct({"dtype": pa.string(), "shape": pa.list_(pa.int64()), "data": pa.binary()})
_ADDED = {
    "reward_turns": pa.list_(pa.float64()),
    "context_starts": pa.list_(pa.int64()),
    "arrays": pa.map_(pa.string(), _ARRAY),
    "media": pa.list_(_struct(Media)),
    "metrics": pa.map_(pa.string(), pa.float64()),
}
"""Absent from archives of schema 1."""
SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "group_id": pa.string(),
        "index": pa.int64(),
        "prompt_uid": pa.string(),
        "attempt": pa.int64(),
        **{name: pa.list_(kind) for name, kind in _LISTS.items()},
        "version_spans": pa.list_(_struct(VersionSpan)),
        "reward_total": pa.float64(),
        "reward_parts": pa.map_(pa.string(), pa.float64()),
        "reward_status": pa.string(),
        "is_correct": pa.bool_(),
        "reward_detail": pa.string(),
        "stop_reason": pa.string(),
        "sampling": _struct(Sampling),
        "generator_id": pa.string(),
        "started_at": pa.float64(),
        "finished_at": pa.float64(),
        "data_source": pa.string(),
        "num_turns": pa.int64(),
        "extras": pa.binary(),  # MessagePack, because no column type fits arbitrary values
        "num_tokens": pa.int64(),
        "oldest_version": pa.int64(),
        "newest_version": pa.int64(),
        "outcome": pa.string(),
        "reason": pa.string(),
        "steps": pa.list_(pa.int64()),
        "archived_at": pa.float64(),
        "schema_version": pa.int64(),
        **_ADDED,
    },
    metadata={_ARCHIVE_KEY: str(ARCHIVE_SCHEMA), _TRAJECTORY_KEY: str(SCHEMA_VERSION)},
)
"""`schema_version` is the trajectory's."""

_PLAIN = ["id", "group_id", "index", "prompt_uid", "attempt", "stop_reason", "generator_id", "started_at"]
_PLAIN += ["finished_at", "data_source", "num_turns"]
_OUTCOME = ["oldest_version", "newest_version", "reason", "steps", "archived_at"]
_REWARD = {"total": "reward_total", "status": "reward_status", "is_correct": "is_correct", "detail": "reward_detail"}


def to_table(groups: list[StoredGroup], *, archived_at: float) -> pa.Table:
    """Build a table with one row per payload; `archived_at` in seconds since 1970.

    Raises RecordRefusedError for an invalid payload, and as `tabulate`.
    """
    packed = ((group, payload) for group in groups for payload in group.payloads)
    return tabulate(
        [StoredTrajectory(unpack(data), group.state, group.reason, group.steps, archived_at) for group, data in packed]
    )


def tabulate(stored: list[StoredTrajectory]) -> pa.Table:
    """Build a table with one row per trajectory. Raises pa.ArrowException, OverflowError (beyond 64 bits)."""
    trajectories = [each.trajectory for each in stored]
    rewards = [trajectory.reward for trajectory in trajectories]
    columns = _list_columns(trajectories) | _fields(stored, _OUTCOME)
    columns |= _fields(trajectories, [*_PLAIN, "num_tokens", "context_starts"])
    columns["outcome"] = [each.state for each in stored]
    columns["schema_version"] = [SCHEMA_VERSION] * len(stored)
    columns |= {column: [getattr(reward, name) for reward in rewards] for name, column in _REWARD.items()}
    columns["reward_parts"] = [list(reward.parts.items()) for reward in rewards]
    columns["reward_turns"] = [reward.turns for reward in rewards]
    columns["sampling"] = [msgspec.structs.asdict(trajectory.sampling) for trajectory in trajectories]
    columns["extras"] = [encode(trajectory.extras) for trajectory in trajectories]
    for name in ("version_spans", "media"):
        columns[name] = [list(map(msgspec.structs.asdict, getattr(trajectory, name))) for trajectory in trajectories]
    columns["metrics"] = [list(trajectory.metrics.items()) for trajectory in trajectories]
    columns["arrays"] = [
        [(name, dict(zip(("dtype", "shape", "data"), to_wire(array), strict=True))) for name, array in each.items()]
        for each in (trajectory.arrays for trajectory in trajectories)
    ]
    built = [(columns[field.name], field.type) for field in SCHEMA]
    arrays = [values if isinstance(values, pa.Array) else pa.array(values, kind) for values, kind in built]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def from_batch(batch: pa.RecordBatch) -> Iterator[StoredTrajectory]:
    """Yield the rows of a batch without `missing_columns`. Arrays are views into the batch."""
    lists = {name: _split(batch.column(name)) for name in _LISTS}
    rows = batch.select([name for name in batch.schema.names if name not in lists]).to_pylist()
    for index, row in enumerate(rows):
        yield _stored(row, {name: arrays[index] for name, arrays in lists.items()})


def known_columns(schema: pa.Schema) -> list[str]:
    """Archive's columns that this schema has."""
    return [name for name in SCHEMA.names if name in schema.names]


def missing_columns(schema: pa.Schema) -> str:
    """Error phrase if this schema lacks required columns; else empty."""
    missing = sorted(set(SCHEMA.names) - set(_ADDED) - set(schema.names))
    return f"must have the columns of an archive, but lacks {', '.join(missing)}" if missing else ""


def newer_schema(schema: pa.Schema) -> str:
    """Error phrase if a newer Slipstream wrote this schema; else empty."""
    metadata = schema.metadata or {}
    for key, newest in ((_ARCHIVE_KEY, ARCHIVE_SCHEMA), (_TRAJECTORY_KEY, SCHEMA_VERSION)):
        written = int(metadata.get(key, b"0"))
        if written > newest:
            return f"must have {key.decode()} <= {newest}, got {written}: read it with the Slipstream that wrote it"
    return ""


def _fields(records: Sequence[Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: [getattr(record, name) for record in records] for name in names}


def _list_columns(trajectories: list[Trajectory]) -> dict[str, Any]:
    offsets = pa.array([0, *accumulate(trajectory.num_tokens for trajectory in trajectories)], pa.int32())
    columns: dict[str, Any] = {}
    for name, kind in _LISTS.items():
        arrays = [getattr(trajectory, name) for trajectory in trajectories]
        values = np.concatenate(arrays) if arrays else np.empty(0, dtype=kind.to_pandas_dtype())
        columns[name] = pa.ListArray.from_arrays(offsets, pa.array(values, kind))
    return columns


def _split(lists: pa.ListArray) -> list[np.ndarray]:
    """One array per row; copies only booleans, which Arrow stores as bits."""
    offsets, values = lists.offsets.to_numpy(), lists.flatten().to_numpy(zero_copy_only=False)
    return [values[start:end] for start, end in pairwise((offsets - offsets[0]).tolist())]


def _stored(row: dict[str, Any], arrays: dict[str, Any]) -> StoredTrajectory:
    known = {name: row[column] for name, column in _REWARD.items()}
    reward = Reward(parts=dict(row["reward_parts"]), turns=row.get("reward_turns") or [], **known)
    trajectory = Trajectory(
        **{name: row[name] for name in _PLAIN},
        **arrays,
        version_spans=[VersionSpan(**span) for span in row["version_spans"]],
        reward=reward,
        sampling=Sampling(**{name: value for name, value in row["sampling"].items() if value is not None}),
        extras=msgspec.msgpack.decode(row["extras"]),
        context_starts=row.get("context_starts") or [],
        arrays={name: from_wire(**array) for name, array in row.get("arrays") or ()},
        media=[Media(**media) for media in row.get("media") or ()],
        metrics=dict(row.get("metrics") or ()),
    )
    return StoredTrajectory(trajectory, row["outcome"], row["reason"], row["steps"], row["archived_at"])
