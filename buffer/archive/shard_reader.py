"""Reads one shard, after checking it against its line in the manifest; every defect becomes a ShardError."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import xxhash

from slipstream.buffer.archive.columns import from_batch, known_columns, missing_columns, newer_schema
from slipstream.buffer.archive.manifest import ShardEntry
from slipstream.buffer.archive.trajectory_filter import StoredTrajectory
from slipstream.buffer.errors import ShardError

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


def check_shard(folder: Path, shard: ShardEntry) -> None:
    """Read the whole file. Raises ShardError unless size, checksum and rows are those of the manifest."""
    with open_shard(folder, shard) as dataset:
        # Size and columns were checked at opening; only the checksum finds a changed byte.
        checksum = xxhash.xxh3_64_hexdigest((folder / shard.file).read_bytes())
        if checksum != shard.checksum:
            raise ShardError(shard.file, f"must have checksum {shard.checksum}, got {checksum}: {_ADVICE}")
        if (rows := dataset.count_rows()) != shard.rows:
            raise ShardError(shard.file, f"must hold {shard.rows} trajectories, got {rows}: {_ADVICE}")


_ADVICE = "it is damaged; restore it from a copy. The other shards can be read."


def _open(folder: Path, shard: ShardEntry) -> ds.Dataset:
    path = folder / shard.file
    if not path.is_file():
        raise ShardError(shard.file, f"must lie in {folder}, but there is no such file: restore it from a copy.")
    if (size := path.stat().st_size) != shard.bytes:
        raise ShardError(shard.file, f"must have {shard.bytes} bytes, as the manifest says, got {size}: {_ADVICE}")
    dataset = ds.dataset(str(path), format="parquet")
    if reason := newer_schema(dataset.schema):
        raise ShardError(shard.file, f"{reason}.")
    if reason := missing_columns(dataset.schema):
        raise ShardError(shard.file, f"{reason}.")
    return dataset
