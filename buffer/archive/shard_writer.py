"""ShardWriter: finished groups -> a shard that is whole and durable, or that is not there.

Order of a write: temporary file, fsync, rename, fsync of the folder, line in the manifest, fsync. A crash before the
line leaves a file the manifest does not name: the next start removes it, and its groups, not forgotten by the store
yet, come again. A crash after the line leaves groups that come again though they are archived: `has` knows them.
"""

import fcntl
import io
import os
import time
from collections import deque
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import structlog
import xxhash

from slipstream.buffer.archive.columns import SCHEMA, to_table
from slipstream.buffer.archive.manifest import MANIFEST, Manifest, ShardEntry, shard_name, shard_number
from slipstream.buffer.archive.shard_reader import group_ids_of
from slipstream.buffer.codec import encode
from slipstream.buffer.errors import ArchiveError, RecordRefusedError, ShardError
from slipstream.buffer.records import FinishedGroup
from slipstream.buffer.redis.fsync import sync_path

log = structlog.get_logger(__name__)

# @@ What no column can hold: groups of an archive that lie beside its shards, as MessagePack of FinishedGroup.
SET_ASIDE = "set_aside"
"""Their folder in the archive's."""
_PREFIX, _SUFFIX = "group-", ".msgpack"


def aside_path(archive: Path, group_id: str) -> Path:
    """Where a group lies, or would."""
    return archive / SET_ASIDE / f"{_PREFIX}{group_id}{_SUFFIX}"


def groups_aside(archive: Path) -> set[str]:
    """All that lie there."""
    files = (archive / SET_ASIDE).glob(f"{_PREFIX}*{_SUFFIX}")
    return {file.name.removeprefix(_PREFIX).removesuffix(_SUFFIX) for file in files}


_ROWS_PER_ROW_GROUP = 1024
_REMEMBERED_SHARDS = 16
"""A store that came back from its disk may offer again what was forgotten in its last two seconds."""
_LOGPROBS = "generator_logprobs.list.element"
"""All different, so a dictionary would only be in the way; but their exponents, apart from the rest, compress well."""
_REPETITIVE = ["token_ids.list.element", "group_id", "prompt_uid", "generator_id", "data_source", "stop_reason"]
_REPETITIVE += ["reward_status", "outcome", "reason"]


class ShardWriter:
    """The one writer of an archive's folder. Not thread-safe.

    Example: writer = ShardWriter(folder); writer.write(store.finished(limit=1024)); writer.close()
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        """Make the folder where it is missing, and clear away what a crash has left.

        `clock` gives seconds since 1970. Raises ArchiveError when somebody else writes here, or when shards are there
        that no crash explains; OSError.
        """
        self._folder = folder
        self._clock = clock
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(folder)
        try:
            self._manifest = self._recover()
            self._recent = deque(map(self._groups_in, self.shards[-_REMEMBERED_SHARDS:]), maxlen=_REMEMBERED_SHARDS)
        except BaseException:
            self.close()
            raise

    @property
    def shards(self) -> list[ShardEntry]:
        """All that were ever written, in order."""
        return self._manifest.shards

    def has(self, group_id: str) -> bool:
        """Whether one of the newest shards holds the group."""
        return any(group_id in groups for groups in self._recent)

    def groups_since(self, step: int) -> set[str]:
        """Groups that are archived, of every shard that may hold one which `step` or a later one trained on."""
        shards = [shard for shard in self.shards if shard.last_step is not None and shard.last_step >= step]
        return groups_aside(self._folder).union(*map(self._groups_in, shards))

    def write(self, groups: list[FinishedGroup]) -> ShardEntry | None:
        """Write one shard; durable when this returns. Groups that do not fit the columns are set aside.

        Returns None when none fits. Raises OSError, and can be called again then.
        """
        now = self._clock()
        table, groups = self._tabulate(groups, archived_at=now)
        if not table.num_rows:
            return None
        data = _to_parquet(table)
        steps = [step for group in groups for step in group.steps]
        shard = ShardEntry(
            file=shard_name(self._manifest.next_number),
            rows=table.num_rows,
            groups=sum(bool(group.payloads) for group in groups),
            first_step=min(steps, default=None),
            last_step=max(steps, default=None),
            bytes=len(data),
            checksum=xxhash.xxh3_64_hexdigest(data),
            archived_at=now,
        )
        write_durably(self._folder / shard.file, data)
        self._manifest.append(shard)
        self._recent.append({group.id for group in groups})
        return shard

    def close(self) -> None:
        """Let others write here."""
        self._lock.close()

    def _recover(self) -> Manifest:
        found = {file.name for file in self._folder.iterdir() if shard_number(file.name) is not None}
        if found and not (self._folder / MANIFEST).exists():
            raise ArchiveError(
                f"{self._folder} must have a {MANIFEST} beside its {len(found)} shards, but has none: restore it, or "
                "move the shards away."
            )
        manifest = Manifest(self._folder)
        orphans = found - {shard.file for shard in manifest.shards}
        if orphans - {shard_name(manifest.next_number)}:
            raise ArchiveError(
                f"{self._folder / MANIFEST} must name every shard but the one after its last "
                f"({shard_name(manifest.next_number)}), got others too: {', '.join(sorted(orphans))}. A crash leaves "
                "one at most: restore the manifest, or move these shards away."
            )
        for path in chain(map(self._folder.joinpath, orphans), self._folder.glob("*.tmp")):
            path.unlink()
            log.info("removed_unfinished", file=path.name)
        sync_path(self._folder)
        return manifest

    def _groups_in(self, shard: ShardEntry) -> set[str]:
        try:
            return group_ids_of(self._folder, shard)
        except ShardError as refused:
            log.warning("shard_refused", reason=str(refused))
            return set()

    def _tabulate(self, groups: list[FinishedGroup], *, archived_at: float) -> tuple[pa.Table, list[FinishedGroup]]:
        """(table, the groups in it): one bad group costs its own place, not the shard."""
        try:
            return to_table(groups, archived_at=archived_at), groups
        except (RecordRefusedError, pa.ArrowException, OverflowError) as error:
            if len(groups) == 1:
                self._set_aside(groups[0], error)
                return SCHEMA.empty_table(), []
        half = len(groups) // 2
        parts = [self._tabulate(part, archived_at=archived_at) for part in (groups[:half], groups[half:])]
        return pa.concat_tables([table for table, _ in parts]), [group for _, fit in parts for group in fit]

    def _set_aside(self, group: FinishedGroup, error: Exception) -> None:
        path = aside_path(self._folder, group.id)
        path.parent.mkdir(exist_ok=True)
        write_durably(path, encode(group))
        log.warning("group_set_aside", group=group.id, file=str(path), reason=str(error))


def write_durably(path: Path, data: bytes | memoryview) -> None:
    """Write a file that is whole or not there: temporary name, fsync, rename, fsync of its folder. Raises OSError."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


def _to_parquet(table: pa.Table) -> memoryview:
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        compression="zstd",
        row_group_size=_ROWS_PER_ROW_GROUP,
        use_dictionary=_REPETITIVE,
        use_byte_stream_split=[_LOGPROBS],
    )
    return memoryview(sink.getvalue())


def _lock(folder: Path) -> io.TextIOWrapper:
    lock = (folder / "writer.lock").open("w")
    try:
        fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ArchiveError(f"{folder} must have one writer, but another process writes there: stop it first.") from None
    return lock
