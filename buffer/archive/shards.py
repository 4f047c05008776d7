"""Shards: Parquet files of finished groups, each complete and durable, or absent.

Order of a write: temporary file, fsync, rename, fsync of the folder, line in the manifest, fsync. After a crash before
the line, the next start deletes the unlisted file. The store offers the groups again; `has` detects archived ones.
"""

import fcntl
import io
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import structlog
import xxhash

from slipstream.buffer.archive.columns import SCHEMA, from_batch, known_columns, missing_columns, newer_schema, to_table
from slipstream.buffer.archive.index import ManifestWriter, ShardEntry, next_shard
from slipstream.buffer.archive.trajectory_filter import StoredTrajectory
from slipstream.buffer.codec import encode
from slipstream.buffer.durable_files import checksum, sync_path, write_durably
from slipstream.buffer.errors import ArchiveError, RecordRefusedError, ShardError
from slipstream.buffer.records import StoredGroup

log = structlog.get_logger(__name__)

TRAINABLE = ~pc.field("outcome").isin(["quarantined", "rejected", "evaluated"])
"""Rows of groups that may be trained on."""
_BATCH_ROWS = 256
"""Rows in memory at once."""


@contextmanager
def open_shard(folder: Path, shard: ShardEntry) -> Iterator[ds.Dataset]:
    """Open a shard. Maps all defects, including those found while reading, to ShardError."""
    try:
        yield _open(folder, shard)
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


_ADVICE = "it is damaged; restore it from a copy. The other shards can be read."


def _open(folder: Path, shard: ShardEntry) -> ds.Dataset:
    path = folder / shard.file
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
    return dataset


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
