"""Files of rollouts that `export`, or another tool, has written -> stored trajectories, each one checked."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from slipstream.buffer.archive.columns import SCHEMA, from_batch, newer_schema
from slipstream.buffer.archive.trajectory_filter import StoredTrajectory
from slipstream.buffer.codec import encode, unpack
from slipstream.buffer.errors import RecordRefusedError
from slipstream.buffer.records import Outcome
from slipstream.buffer.trajectory import (
    SCHEMA_VERSION,
    Reward,
    Sampling,
    Trajectory,
    VersionSpan,
    make_lease_id,
    make_trajectory_id,
)
from slipstream.configs.base import ConfigError

_ROWS_AT_ONCE = 256
_OVER = get_args(Outcome)
_LARGEST = 2**31 - 1
"""Of indices, attempts, versions and steps."""
_NOT_A_TRAJECTORY = (msgspec.MsgspecError, RecordRefusedError, OverflowError, TypeError, ValueError, KeyError)


class RolloutLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trajectory as a line of JSON; other tools may leave out what has a default.

    Example: {"group_id": "17", "index": 0, "token_ids": [4, 8, 3], "model_mask": [false, false, true],
        "generator_logprobs": [0, 0, -0.1], "reward": {"total": 1.0}}
    """

    group_id: str
    """A whole number, one for each prompt answered."""
    index: int
    """Place in the group."""
    token_ids: list[int]
    """Prompt, then response."""
    model_mask: list[bool]
    """True where the model wrote the token."""
    generator_logprobs: list[float]
    """Under the distribution sampled from; 0 where it did not."""
    reward: Reward
    """What it was worth."""
    id: str = ""
    """Empty: `<group_id>-<attempt>-<index>`, and it must be that."""
    attempt: int = 0
    """How often the prompt had been leased before."""
    prompt_uid: str = ""
    """The prompt's row of the training data; needed to be scored anew."""
    version_spans: list[VersionSpan] = []
    """Empty: version 0 sampled it all."""
    stop_reason: str = "stop"
    """stop, length or aborted."""
    sampling: Sampling = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=0, seed=0)
    """How it was drawn."""
    generator_id: str = "imported"
    """Who made it."""
    started_at: float = 0.0
    """Seconds since 1970."""
    finished_at: float = 0.0
    """Seconds since 1970."""
    data_source: str = ""
    """Kind of task."""
    num_turns: int = 1
    """Model turns."""
    extras: dict[str, Any] = {}
    """Whatever is to be kept with it."""
    outcome: str = "retired"
    """How its group ended; a replay trains on what is retired."""
    reason: str = ""
    """Why."""
    steps: list[int] = []
    """Steps that trained on it."""
    schema_version: int = SCHEMA_VERSION
    """Refused when newer than ours."""
    archived_at: float | None = None
    """Not kept: it is archived now."""
    prompt: str | None = None
    """Not kept: the token ids count."""
    response: str | None = None
    """Not kept: the token ids count."""


_DECODER = msgspec.json.Decoder(RolloutLine)


class Placed(NamedTuple):
    """A stored trajectory, and where it stood."""

    place: str
    """Such as `rollouts.jsonl line 3`."""
    stored: StoredTrajectory
    """What stood there."""


def read_rollouts(path: Path) -> Iterator[Placed]:
    """The trajectories of a .jsonl or .parquet file, in order.

    Raises ConfigError, which names the line (or row) and what is wrong with it.
    """
    if path.suffix not in _READERS:
        raise ConfigError(f"FILE must end in {' or '.join(_READERS)}, got {path}.")
    if not path.is_file():
        raise ConfigError(f"FILE must be there, got {path}, which is not.")
    return _READERS[path.suffix](path)


def _read_lines(path: Path) -> Iterator[Placed]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            yield _placed(f"{path} line {number}", partial(_from_line, line))


def _from_line(data: bytes) -> StoredTrajectory:
    line = _DECODER.decode(data)
    if line.schema_version > SCHEMA_VERSION:
        raise ValueError(f"schema_version must be <= {SCHEMA_VERSION}, got {line.schema_version}")
    if any(not 0 <= token <= _LARGEST for token in line.token_ids):
        raise ValueError(f"token ids must be from 0 to {_LARGEST}")
    arrays = {
        "token_ids": np.array(line.token_ids, np.int32),
        "model_mask": np.array(line.model_mask, bool),
        "generator_logprobs": np.array(line.generator_logprobs, np.float32),
    }
    first = int(arrays["model_mask"].argmax()) if line.model_mask else 0
    made = {
        "id": line.id or _id_of(line),
        "version_spans": line.version_spans or [VersionSpan(first, 0)],
    }
    names = set(Trajectory.__struct_fields__) - set(arrays) - set(made)
    fields = {name: getattr(line, name) for name in names}
    return StoredTrajectory(Trajectory(**fields, **arrays, **made), line.outcome, line.reason, line.steps)  # type: ignore[arg-type]


def _read_rows(path: Path) -> Iterator[Placed]:
    number = 0
    for batch in _batches(path):
        rows = from_batch(batch)
        for _ in range(batch.num_rows):
            number += 1
            yield _placed(f"{path} row {number}", partial(next, rows))


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    """With the columns of an archive, whatever other tools have made of their types."""
    try:
        file = pq.ParquetFile(path)
        if reason := newer_schema(file.schema_arrow):
            raise ConfigError(f"{path} {reason}.")
        if missing := sorted(set(SCHEMA.names) - set(file.schema_arrow.names)):
            raise ConfigError(f"{path} must have the columns of an archive, but lacks {', '.join(missing)}.")
        for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=SCHEMA.names):
            yield from pa.Table.from_batches([batch]).select(SCHEMA.names).cast(SCHEMA).combine_chunks().to_batches()
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(
            f"{path} must be a Parquet file with the columns of an archive, but cannot be read: "
            f"{str(error).splitlines()[0]}"
        ) from None


_READERS: dict[str, Callable[[Path], Iterator[Placed]]] = {".jsonl": _read_lines, ".parquet": _read_rows}


def _placed(place: str, build: Callable[[], StoredTrajectory]) -> Placed:
    try:
        stored = build()
        _check(stored)
    except _NOT_A_TRAJECTORY as error:
        raise ConfigError(f"{place} must be a trajectory: {str(error) or type(error).__name__}.") from None
    return Placed(place, stored)


def _check(stored: StoredTrajectory) -> None:
    trajectory = unpack(encode(stored.trajectory))
    _check_numbers(trajectory, stored.steps)
    if trajectory.id != _id_of(trajectory):
        raise ValueError(f"id must be <group_id>-<attempt>-<index>, got {trajectory.id!r}")
    if stored.state not in _OVER:
        raise ValueError(
            f"outcome must be one of {', '.join(_OVER)}, got {stored.state!r}: what a store still works on is not over"
        )


def _id_of(made: RolloutLine | Trajectory) -> str:
    return make_trajectory_id(make_lease_id(made.group_id, made.attempt), made.index)


def _check_numbers(trajectory: Trajectory, steps: list[int]) -> None:
    if not (trajectory.group_id.isdecimal() and str(int(trajectory.group_id)) == trajectory.group_id):
        raise ValueError(f"group_id must be a whole number, got {trajectory.group_id!r}")
    numbers = {
        "group_id": [int(trajectory.group_id)],
        "index": [trajectory.index],
        "attempt": [trajectory.attempt],
        "versions": [span.version for span in trajectory.version_spans],
        "steps": steps,
    }
    for name, values in numbers.items():
        if not all(0 <= value <= _LARGEST for value in values):
            raise ValueError(f"{name} must be from 0 to {_LARGEST}, got {values}")
