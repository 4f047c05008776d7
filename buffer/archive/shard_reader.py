"""Reads one shard, after checking size and checksum in the manifest; every defect becomes a ShardError."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from slipstream.buffer.archive.columns import from_batch, known_columns, missing_columns, newer_schema
from slipstream.buffer.archive.manifest import ShardEntry
from slipstream.buffer.archive.trajectory_filter import StoredTrajectory
from slipstream.buffer.errors import ShardError
from slipstream.buffer.sealed_folder import checksum

TRAINABLE = ~pc.field("outcome").isin(["quarantined", "rejected", "evaluated"])
"""Groups that may be trained on: neither quarantined nor rejected, and no answers to evaluations."""
_BATCH_ROWS = 256
"""Bounds the rows in memory at once."""


@contextmanager
def open_shard(folder: Path, shard: ShardEntry) -> Iterator[ds.Dataset]:
    """Open a shard to read its columns; defects, of the reading too, become a ShardError."""
    try:
        yield _open(folder, shard)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ShardError(shard.file, f"cannot be read ({reason}): {_ADVICE}") from None


def read_shard(folder: Path, shard: ShardEntry, *, where: pc.Expression | None = None) -> Iterator[StoredTrajectory]:
    """Yield the trajectories for which `where` (over the columns) holds, in order. Raises ShardError."""
    with open_shard(folder, shard) as dataset:
        columns = known_columns(dataset.schema)
        for batch in dataset.to_batches(columns=columns, filter=where, batch_size=_BATCH_ROWS, use_threads=False):
            yield from from_batch(batch)


def read_column(folder: Path, shard: ShardEntry, name: str, *, where: pc.Expression | None = None) -> list[str]:
    """Return a column of text of the trajectories for which `where` holds, in order. Raises ShardError."""
    with open_shard(folder, shard) as dataset:
        return dataset.to_table(columns=[name], filter=where)[name].to_pylist()


_ADVICE = "it is damaged; restore it from a copy. The other shards can be read."


def _open(folder: Path, shard: ShardEntry) -> ds.Dataset:
    path = folder / shard.file
    if not path.is_file():
        raise ShardError(shard.file, f"must lie in {folder}, but there is no such file: restore it from a copy.")
    found = path.stat()
    if found.st_size != shard.bytes:
        raise ShardError(
            shard.file, f"must have {shard.bytes} bytes, as the manifest says, got {found.st_size}: {_ADVICE}"
        )
    if (written := _checksum(path, found.st_size, found.st_mtime_ns)) != shard.checksum:
        raise ShardError(shard.file, f"must have checksum {shard.checksum}, got {written}: {_ADVICE}")
    dataset = ds.dataset(str(path), format="parquet")
    if reason := newer_schema(dataset.schema):
        raise ShardError(shard.file, f"{reason}.")
    if reason := missing_columns(dataset.schema):
        raise ShardError(shard.file, f"{reason}.")
    return dataset


@cache
def _checksum(path: Path, _size: int, _modified_ns: int) -> str:
    """Checksum of a file, computed once per process while size and time of modification stay the same."""
    return checksum(path)
