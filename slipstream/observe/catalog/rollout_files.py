"""Readers of rollout files: trajectories of `export` or another tool, and verl's dumps.

verl's dumps (`trainer.rollout_data_dir`) have texts without tokens. They can be viewed, one token per byte, but not
trained on.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from slipstream.buffer.archive.shards import SCHEMA, from_batch, known_columns, missing_columns, newer_schema
from slipstream.buffer.archive.trajectory_filter import StoredTrajectory
from slipstream.buffer.codec import encode, unpack
from slipstream.buffer.errors import RecordRefusedError
from slipstream.buffer.records import Outcome
from slipstream.buffer.trajectory import (
    SCHEMA_VERSION,
    Media,
    Reward,
    Sampling,
    Trajectory,
    VersionSpan,
    make_lease_id,
    make_trajectory_id,
)
from slipstream.configs.base import ConfigError
from slipstream.observe.catalog.token_decoder import TokenDecoder

_ROWS_AT_ONCE = 256
_OVER = get_args(Outcome)
_SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=0, seed=0)
_LARGEST = 2**31 - 1
"""Largest index, attempt, version, and step."""
_NOT_A_TRAJECTORY = (msgspec.MsgspecError, RecordRefusedError, OverflowError, TypeError, ValueError, KeyError)


class ArrayLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An array in a line of JSON. Example: {"dtype": "int16", "values": [[3, 5], [0, 7]]}"""

    dtype: str
    values: list[Any]


class RolloutLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trajectory as a JSON line. Fields with a default are optional.

    Example: {"group_id": "17", "index": 0, "token_ids": [4, 8, 3], "model_mask": [false, false, true],
        "generator_logprobs": [0, 0, -0.1], "reward": {"total": 1.0}}
    """

    group_id: str
    """An integer, unique per prompt."""
    index: int
    token_ids: list[int]
    model_mask: list[bool]
    generator_logprobs: list[float]
    reward: Reward
    id: str = ""
    """Must be `<group_id>-<attempt>-<index>`, which is also the default."""
    attempt: int = 0
    prompt_uid: str = ""
    """Row in the training data; required for rescoring."""
    version_spans: list[VersionSpan] = []
    """Empty if version 0 sampled all tokens."""
    stop_reason: str = "stop"
    sampling: Sampling = _SAMPLING
    generator_id: str = "imported"
    started_at: float = 0.0
    finished_at: float = 0.0
    data_source: str = ""
    num_turns: int = 1
    extras: dict[str, Any] = {}
    context_starts: list[int] = []
    arrays: dict[str, ArrayLine] = {}
    media: list[Media] = []
    metrics: dict[str, float] = {}
    outcome: str = "retired"
    """Outcome of its group; a replay trains on retired groups."""
    reason: str = ""
    """Empty for retired."""
    steps: list[int] = []
    schema_version: int = SCHEMA_VERSION
    """Rejected if newer than the reader's."""
    archived_at: float | None = None
    """Ignored: the import sets it."""
    prompt: str | None = None
    response: str | None = None
    """Ignored: only the token ids are read."""


_DECODER = msgspec.json.Decoder(RolloutLine)


class SourcedTrajectory(NamedTuple):
    """A trajectory from a file."""

    source: str
    """Position, such as `rollouts.jsonl line 3`."""
    stored: StoredTrajectory


def read_rollouts(path: Path) -> Iterator[SourcedTrajectory]:
    """Yield the trajectories of a .jsonl or .parquet file. Raises ConfigError."""
    if path.suffix not in _READERS:
        raise ConfigError(f"FILE must end in {' or '.join(_READERS)}, got {path}.")
    if not path.is_file():
        raise ConfigError(f"FILE must exist, got {path}.")
    return _READERS[path.suffix](path)


def _read_lines(path: Path) -> Iterator[SourcedTrajectory]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            yield _checked(f"{path} line {number}", partial(_from_line, line))


def _from_line(data: bytes) -> StoredTrajectory:
    line = _DECODER.decode(data)
    if line.schema_version > SCHEMA_VERSION:
        raise ValueError(f"schema_version must be <= {SCHEMA_VERSION}, got {line.schema_version}")
    if any(not 0 <= token <= _LARGEST for token in line.token_ids):
        raise ValueError(f"token ids must be from 0 to {_LARGEST}")
    return _stored(line)


def _stored(line: RolloutLine) -> StoredTrajectory:
    first = int(np.argmax(line.model_mask)) if line.model_mask else 0
    fields = {name: getattr(line, name) for name in Trajectory.__struct_fields__} | {
        "id": line.id or _id_of(line),
        "version_spans": line.version_spans or [VersionSpan(first, 0)],
        "token_ids": np.array(line.token_ids, np.int32),
        "model_mask": np.array(line.model_mask, bool),
        "generator_logprobs": np.array(line.generator_logprobs, np.float32),
        "arrays": {name: np.array(array.values, array.dtype) for name, array in line.arrays.items()},
    }
    return StoredTrajectory(Trajectory(**fields), line.outcome, line.reason, line.steps)  # type: ignore[arg-type]


def _read_rows(path: Path) -> Iterator[SourcedTrajectory]:
    numbers = count(1)
    for batch in _batches(path):
        rows = from_batch(batch)
        for _ in range(batch.num_rows):
            yield _checked(f"{path} row {next(numbers)}", partial(next, rows))


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield batches, cast to an archive's columns and types."""
    with refusing_parquet(path):
        file = pq.ParquetFile(path)
        schema = _known_schema(path, file.schema_arrow)
        for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=schema.names):
            yield from pa.Table.from_batches([batch]).select(schema.names).cast(schema).combine_chunks().to_batches()


def open_parquet(path: Path) -> ds.Dataset:
    """Open a Parquet file with an archive's columns, in place. Raises ConfigError."""
    with refusing_parquet(path):
        return ds.dataset(path, format="parquet", schema=_known_schema(path, pq.read_schema(path)))


def _known_schema(path: Path, schema: pa.Schema) -> pa.Schema:
    if reason := newer_schema(schema) or missing_columns(schema):
        raise ConfigError(f"{path} {reason}.")
    return pa.schema([SCHEMA.field(name) for name in known_columns(schema)])


@contextmanager
def refusing_parquet(path: Path) -> Iterator[None]:
    """Map errors of the Parquet reader to ConfigError."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(
            f"{path} must be a Parquet file with the columns of an archive, but cannot be read: "
            f"{str(error).splitlines()[0]}"
        ) from None


_READERS: dict[str, Callable[[Path], Iterator[SourcedTrajectory]]] = {".jsonl": _read_lines, ".parquet": _read_rows}
FORMATS = tuple(_READERS)


def _checked(source: str, build: Callable[[], StoredTrajectory]) -> SourcedTrajectory:
    try:
        stored = build()
        # Run the codec, which makes the broker's checks.
        trajectory = unpack(encode(stored.trajectory))
        if stored.state != "evaluated":
            _check_numbers(trajectory, stored.steps)
        if trajectory.id != _id_of(trajectory):
            raise ValueError(f"id must be <group_id>-<attempt>-<index>, got {trajectory.id!r}")
        if stored.state not in _OVER:
            raise ValueError(
                f"outcome must be one of {', '.join(_OVER)}, got {stored.state!r}: a group must be over to be imported"
            )
    except _NOT_A_TRAJECTORY as error:
        raise ConfigError(f"{source} must be a trajectory: {str(error) or type(error).__name__}.") from None
    return SourcedTrajectory(source, stored)


def _id_of(made: RolloutLine | Trajectory) -> str:
    return make_trajectory_id(make_lease_id(made.group_id, made.attempt), made.index)


def _check_numbers(trajectory: Trajectory, steps: list[int]) -> None:
    if not (trajectory.group_id.isdecimal() and str(int(trajectory.group_id)) == trajectory.group_id):
        raise ValueError(f"group_id must be a whole number, got {trajectory.group_id!r}")
    versions = [span.version for span in trajectory.version_spans]
    numbers = {"group_id": [int(trajectory.group_id)], "index": [trajectory.index], "attempt": [trajectory.attempt]}
    for name, values in (numbers | {"versions": versions, "steps": steps}).items():
        if not all(0 <= value <= _LARGEST for value in values):
            raise ValueError(f"{name} must be from 0 to {_LARGEST}, got {values}")


class VerlLine(msgspec.Struct, frozen=True):
    """A line of a dump. Example: {"input": "What is 3 + 4?", "output": "7", "gts": "7", "score": 1.0, "step": 12}"""

    input: str
    output: str
    score: float
    step: int = 0
    """Step that trained on it; 0 if none."""
    gts: Any = None


_VERL_DECODER = msgspec.json.Decoder(VerlLine)


class ByteDecoder(TokenDecoder):
    """Decodes texts stored with one byte per token."""

    def __init__(self) -> None:
        pass

    def __call__(self, tokens: np.ndarray) -> str:
        return tokens.astype(np.uint8).tobytes().decode(errors="replace")

    plain = __call__

    @cached_property
    def pieces(self) -> list[bytes]:
        """Every byte, and an empty last entry."""
        return [*(bytes([byte]) for byte in range(256)), b""]


def is_verl_dump(path: Path) -> bool:
    """Return whether the first line is a verl rollout."""
    with path.open("rb") as file, suppress(ValueError):
        return bool(_VERL_DECODER.decode(file.readline()))
    return False


def read_verl_dump(path: Path) -> Iterator[StoredTrajectory]:
    """Yield rollouts, grouped by step and prompt. Raises ConfigError."""
    groups: dict[tuple[int, str], int] = {}
    members: Counter[int] = Counter()
    with path.open("rb") as file:
        for number, data in enumerate(file, start=1):
            try:
                line = _VERL_DECODER.decode(data)
            except ValueError as error:
                raise ConfigError(
                    f"{path} line {number} must be a rollout of verl, as its first line is: {error}."
                ) from None
            group = groups.setdefault((line.step, line.input), len(groups))
            prompt, response = line.input.encode(), line.output.encode() or b"\0"
            rollout = RolloutLine(
                group_id=str(group),
                index=members[group],
                token_ids=list(prompt + response),
                model_mask=[False] * len(prompt) + [True] * len(response),
                generator_logprobs=[0.0] * len(prompt + response),
                reward=Reward(line.score),
                prompt_uid=f"{path.stem}/{group}",
                version_spans=[VersionSpan(len(prompt), max(0, line.step - 1))],
                generator_id="verl",
                data_source=path.parent.name,
                extras={} if line.gts is None else {"ground_truth": line.gts},
                steps=[line.step] if line.step else [],
            )
            yield _stored(rollout)
            members[group] += 1
