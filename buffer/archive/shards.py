"""Shards: Parquet files of finished groups, each complete and durable, or absent.

One row per trajectory, which re-encodes to the archived bytes exactly.

Order of a write: temporary file, fsync, rename, fsync of the folder, line in the manifest, fsync. After a crash before
the line, the next start deletes the unlisted file. The store offers the groups again; `has` detects archived ones.
"""

import fcntl
import io
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import structlog
import xxhash

from slipstream.buffer.archive.index import ManifestWriter, ShardEntry, next_shard
from slipstream.buffer.archive.trajectory_filter import StoredTrajectory
from slipstream.buffer.codec import encode, from_wire, to_wire, unpack
from slipstream.buffer.durable_files import checksum, sync_path, write_durably
from slipstream.buffer.errors import ArchiveError, RecordRefusedError, ShardError
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
    columns = _fields(stored, _OUTCOME)
    columns |= _fields(trajectories, [*_PLAIN, "num_tokens", "context_starts"])
    offsets = pa.array([0, *accumulate(trajectory.num_tokens for trajectory in trajectories)], pa.int32())
    for name, kind in _LISTS.items():
        parts = [getattr(trajectory, name) for trajectory in trajectories]
        values = np.concatenate(parts) if parts else np.empty(0, dtype=kind.to_pandas_dtype())
        columns[name] = pa.ListArray.from_arrays(offsets, pa.array(values, kind))
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
    lists: dict[str, list[np.ndarray]] = {}
    for name in _LISTS:
        column = batch.column(name)
        # Copies only booleans, which Arrow stores as bits.
        offsets, values = column.offsets.to_numpy(), column.flatten().to_numpy(zero_copy_only=False)
        lists[name] = [values[start:end] for start, end in pairwise((offsets - offsets[0]).tolist())]
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


log = structlog.get_logger(__name__)

TRAINABLE = ~pc.field("outcome").isin(["quarantined", "rejected", "evaluated"])
"""Rows of groups that may be trained on."""
_ADVICE = "it is damaged; restore it from a copy. The other shards can be read."
_BATCH_ROWS = 256
"""Rows in memory at once."""


@contextmanager
def open_shard(folder: Path, shard: ShardEntry) -> Iterator[ds.Dataset]:
    """Open a shard. Maps all defects, including those found while reading, to ShardError."""
    path = folder / shard.file
    try:
        if not path.is_file():
            raise ShardError(shard.file, f"must be in {folder}, but there is no such file: restore it from a copy.")
        if (found := path.stat()).st_size != shard.bytes:
            must = f"must have {shard.bytes} bytes, as the manifest says"
            raise ShardError(shard.file, f"{must}, got {found.st_size}: {_ADVICE}")
        if (written := _checksum(path, found.st_size, found.st_mtime_ns)) != shard.checksum:
            raise ShardError(shard.file, f"must have checksum {shard.checksum}, got {written}: {_ADVICE}")
        dataset = ds.dataset(str(path), format="parquet")
        if reason := newer_schema(dataset.schema) or missing_columns(dataset.schema):
            raise ShardError(shard.file, f"{reason}.")
        yield dataset
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ShardError(shard.file, f"cannot be read ({reason}): {_ADVICE}") from None


def read_shard(folder: Path, shard: ShardEntry, *, where: pc.Expression | None = None) -> Iterator[StoredTrajectory]:
    """Yield the trajectories that satisfy `where`, in order. Raises ShardError."""
    with open_shard(folder, shard) as dataset:
        columns = known_columns(dataset.schema)
        for batch in dataset.to_batches(columns=columns, filter=where, batch_size=_BATCH_ROWS, use_threads=False):
            yield from from_batch(batch)


def read_column(folder: Path, shard: ShardEntry, name: str, *, where: pc.Expression | None = None) -> list[str]:
    """Text column of the rows that satisfy `where`, in order. Raises ShardError."""
    with open_shard(folder, shard) as dataset:
        return dataset.to_table(columns=[name], filter=where)[name].to_pylist()


@cache
def _checksum(path: Path, _size: int, _modified_ns: int) -> str:
    """Cached until size or modification time change."""
    return checksum(path)


LOCK = "writer.lock"

# --- overflow: groups that no column can hold, as MessagePack of StoredGroup ---------------------------------------
OVERFLOW = "overflow"
_FOLDERS = (OVERFLOW, "set_aside")
"""The first archives used the second name."""
_PREFIX, _SUFFIX = "group-", ".msgpack"


def overflow_groups(archive: Path) -> set[str]:
    """Ids of the groups in the overflow."""
    files = [file for folder in _FOLDERS for file in (archive / folder).glob(f"{_PREFIX}*{_SUFFIX}")]
    return {file.name.removeprefix(_PREFIX).removesuffix(_SUFFIX) for file in files}


# --- shards ----------------------------------------------------------------------------------------------------------
_REMEMBERED_SHARDS = 16
"""A restarted store may offer recently deleted groups again."""
_LOGPROBS = "generator_logprobs.list.element"
"""Distinct values: a byte-stream split groups their exponents, which compress well."""
_REPETITIVE = ["token_ids.list.element", "group_id", "prompt_uid", "generator_id", "data_source", "stop_reason"]
_REPETITIVE += ["reward_status", "outcome", "reason"]
_PARQUET = {"compression": "zstd", "row_group_size": 1024, "use_dictionary": _REPETITIVE}
_PARQUET |= {"use_byte_stream_split": [_LOGPROBS]}


class ShardWriter:
    """The single writer of an archive's folder. Not thread-safe.

    Example: writer = ShardWriter(folder); writer.write(store.finished(limit=1024)); writer.close()
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        """Create the folder if missing, and remove the leftovers of a crash. `clock`: seconds since 1970.

        Raises OSError, or ArchiveError if another process writes here or the folder is damaged.
        """
        self._folder = folder
        self._clock = clock
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(folder)
        try:
            self.manifest = ManifestWriter(folder)
            for path in (*map(folder.joinpath, self.manifest.unnamed), *folder.glob("*.tmp")):
                path.unlink()
                log.info("removed_unfinished", file=path.name)
            sync_path(folder)
            self._recent = deque(map(self._groups_in, self.shards[-_REMEMBERED_SHARDS:]), maxlen=_REMEMBERED_SHARDS)
        except BaseException:
            self.close()
            raise

    @property
    def shards(self) -> list[ShardEntry]:
        return self.manifest.shards

    def has(self, group_id: str) -> bool:
        """Whether one of the newest shards holds the group."""
        return any(group_id in groups for groups in self._recent)

    def groups_since(self, step: int) -> set[str]:
        """Groups of all shards that hold a group trained on at `step` or later, plus the overflow."""
        shards = [shard for shard in self.shards if shard.last_step is not None and shard.last_step >= step]
        return overflow_groups(self._folder).union(*map(self._groups_in, shards))

    def write(self, groups: list[StoredGroup]) -> ShardEntry | None:
        """Write one shard durably. Groups that do not fit the columns go to the overflow.

        Returns None if no row remains. Can be retried after an OSError.
        """
        now = self._clock()
        table, groups = self._tabulate(groups, archived_at=now)
        if not table.num_rows:
            return None
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, **_PARQUET)
        data = memoryview(sink.getvalue())
        steps = [step for group in groups for step in group.steps]
        shard = ShardEntry(
            file=next_shard(self.shards),
            rows=table.num_rows,
            groups=sum(bool(group.payloads) for group in groups),
            first_step=min(steps, default=None),
            last_step=max(steps, default=None),
            bytes=len(data),
            checksum=xxhash.xxh3_64_hexdigest(data),
            archived_at=now,
        )
        # Shard before line: a line without its shard means lost data.
        write_durably(self._folder / shard.file, data)
        self.manifest.append(shard)
        self._recent.append({group.id for group in groups})
        return shard

    def close(self) -> None:
        self._lock.close()

    def _groups_in(self, shard: ShardEntry) -> set[str]:
        try:
            return set(read_column(self._folder, shard, "group_id"))
        except ShardError as error:
            # A damaged old shard must not block archiving new groups.
            log.warning("shard_refused", reason=str(error))
            return set()

    def _tabulate(self, groups: list[StoredGroup], *, archived_at: float) -> tuple[pa.Table, list[StoredGroup]]:
        try:
            return to_table(groups, archived_at=archived_at), groups
        except (RecordRefusedError, pa.ArrowException, OverflowError) as error:
            if len(groups) == 1:
                path = self._folder / OVERFLOW / f"{_PREFIX}{groups[0].id}{_SUFFIX}"
                path.parent.mkdir(exist_ok=True)
                write_durably(path, encode(groups[0]))
                log.warning("group_overflow", group=groups[0].id, file=str(path), reason=str(error))
                return SCHEMA.empty_table(), []
        # Bisect: one bad group among N costs about 2 log2(N) conversions instead of N.
        half = len(groups) // 2
        parts = [self._tabulate(part, archived_at=archived_at) for part in (groups[:half], groups[half:])]
        return pa.concat_tables([table for table, _ in parts]), [group for _, fit in parts for group in fit]


def _lock(folder: Path) -> io.TextIOWrapper:
    lock = (folder / LOCK).open("w")
    try:
        fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ArchiveError(f"{folder} must have one writer, but another process writes there: stop it first.") from None
    return lock
