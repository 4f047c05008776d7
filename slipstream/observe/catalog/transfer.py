"""Export to files, import from files, and copies of archives from an object store."""

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import chain, groupby, islice
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from slipstream.buffer.archive.archive import ArchiveMirror
from slipstream.buffer.archive.index import MANIFEST, ShardEntry, read_manifest
from slipstream.buffer.archive.shards import LOCK, SCHEMA, ShardWriter, tabulate
from slipstream.buffer.archive.trajectory_filter import Decode, StoredTrajectory
from slipstream.buffer.codec import encode
from slipstream.buffer.errors import RecordRefusedError
from slipstream.buffer.object_folder import ObjectFolder, StorageWait
from slipstream.buffer.records import StoredGroup
from slipstream.buffer.trajectory import SCHEMA_VERSION
from slipstream.configs.base import ConfigError, Record, require, require_storage
from slipstream.observe.catalog.rollout_files import SourcedTrajectory, read_rollouts

_ROWS_AT_ONCE = 1024
_FORMATS = (".parquet", ".jsonl")


def export(found: Iterable[StoredTrajectory], target: Path, *, decode: Decode | None) -> int:
    """Write `target` atomically in its suffix's format; return the number of trajectories.

    Parquet has an archive's columns. JSON lines have the same fields and, with `decode`, texts. Raises ConfigError, and
    RecordRefusedError for a value that does not fit its column.
    """
    if target.suffix not in _FORMATS:
        raise ConfigError(f"OUT must end in {' or '.join(_FORMATS)}, got {target}.")
    require(not target.exists(), "OUT", "not exist yet", got=target, why="choose another name, or delete it")
    if not target.parent.is_dir():
        raise ConfigError(f"OUT must lie in a folder that exists, got {target}.")
    # Renamed once complete: readers never see a partial file.
    temporary = target.with_name(f"{target.name}.tmp")
    try:
        with temporary.open("wb") as file:
            written = _write_parquet(found, file) if target.suffix == ".parquet" else _write_lines(found, file, decode)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return written


def _write_parquet(found: Iterable[StoredTrajectory], file: BinaryIO) -> int:
    with pq.ParquetWriter(file, SCHEMA, compression="zstd") as writer:
        count = 0
        remaining = iter(found)
        while rows := list(islice(remaining, _ROWS_AT_ONCE)):
            try:
                writer.write_table(tabulate(rows))
            except (pa.ArrowException, OverflowError) as error:
                raise RecordRefusedError(
                    "columns", f"a number must fit 64 bits to be exported as Parquet: {error}; use .jsonl"
                ) from None
            count += len(rows)
    return count


def _write_lines(found: Iterable[StoredTrajectory], file: BinaryIO, decode: Decode | None) -> int:
    encoder = msgspec.json.Encoder(enc_hook=np.ndarray.tolist)
    count = 0
    for stored in found:
        trajectory, texts = stored.trajectory, {}
        if decode:
            first = int(trajectory.model_mask.argmax())
            texts = {"prompt": decode(trajectory.token_ids[:first]), "response": decode(trajectory.token_ids[first:])}
        outcome = {"outcome": stored.state} | {key: getattr(stored, key) for key in ("reason", "steps", "archived_at")}
        arrays = {name: {"dtype": array.dtype.name, "values": array} for name, array in trajectory.arrays.items()}
        more = {"arrays": arrays, "schema_version": SCHEMA_VERSION}
        file.write(encoder.encode(msgspec.structs.asdict(trajectory) | more | outcome | texts) + b"\n")
        count += 1
    return count


_SHARD_BYTES = 256 * 2**20
_SHARD_GROUPS = 1024


class Imported(Record):
    """Size of an imported or fetched archive."""

    groups: int
    trajectories: int


def import_rollouts(files: list[Path], where: str, *, runs_dir: Path) -> Imported:
    """Create the archive `where` from `files`, or leave nothing behind.

    Raises ConfigError, also for the first invalid line.
    """
    into = Path(where)
    is_run = "://" in where or any((folder / "config.yaml").is_file() for folder in (into, runs_dir / where))
    train = "train on it beside the run's own prompts with replay_mix.archive=ARCHIVE"
    why = f"import into a folder of its own, and {train}, or alone with mode=replay replay.path=ARCHIVE"
    require(not is_run, "--into", "be an archive to be made", got=f"{where}, a run that has a store", why=why)
    why = "choose another name; to join archives, export each and name all the files"
    require(not into.exists(), "--into", "not exist yet", got=where, why=why)
    if not into.parent.is_dir():
        raise ConfigError(f"--into must lie in a folder that exists, got {where}.")
    found = chain.from_iterable(map(read_rollouts, files))
    # Evaluation answers are never trained on.
    groups = _grouped(each for each in found if each.stored.state != "evaluated")
    # In the target's parent, so that it can be renamed.
    unfinished = Path(tempfile.mkdtemp(prefix=f".{into.name}-", dir=into.parent))
    try:
        with closing(ShardWriter(unfinished)) as writer:
            for chunk in _chunks(groups):
                writer.write(chunk)
            shards = writer.shards
        if not shards:
            raise ConfigError("FILE must hold at least one trajectory that is no answer to an evaluation, got none.")
        # `mkdtemp` restricts access to its user.
        unfinished.chmod(0o755)
        unfinished.rename(into)
    except BaseException:
        shutil.rmtree(unfinished)
        raise
    return _content(shards)


def _content(shards: list[ShardEntry]) -> Imported:
    return Imported(groups=sum(shard.groups for shard in shards), trajectories=sum(shard.rows for shard in shards))


def _grouped(found: Iterable[SourcedTrajectory]) -> Iterator[StoredGroup]:
    seen: set[str] = set()
    for group_id, group in groupby(found, key=lambda sourced: sourced.stored.trajectory.group_id):
        members: list[SourcedTrajectory] = []
        # Check each before the next is read, to report the first mistake of a file.
        for sourced in group:
            if members:
                _check_fits(sourced, members)
            else:
                key, why = f"{sourced.source}: the members of a group", "sort by group_id, and name each file once"
                require(group_id not in seen, key, "stand together", got=f"another of group {group_id}", why=why)
            members.append(sourced)
        seen.add(group_id)
        first, trajectories = members[0].stored, [member.stored.trajectory for member in members]
        payloads = [encode(each) for each in sorted(trajectories, key=lambda each: each.index)]
        yield StoredGroup(group_id, first.state, first.reason, first.steps, payloads)


def _check_fits(sourced: SourcedTrajectory, members: list[SourcedTrajectory]) -> None:
    stored, first = sourced.stored, members[0].stored
    if stored.trajectory.index in {member.stored.trajectory.index for member in members}:
        raise ConfigError(
            f"{sourced.source}: a group must have one member per index, got index {stored.trajectory.index} of group "
            f"{stored.trajectory.group_id} again."
        )
    if (stored.state, stored.reason, stored.steps) != (first.state, first.reason, first.steps):
        raise ConfigError(
            f"{sourced.source}: the members of a group must have one outcome, reason and steps, got others than those "
            f"of {members[0].source}."
        )


def _chunks(groups: Iterator[StoredGroup]) -> Iterator[list[StoredGroup]]:
    chunk: list[StoredGroup] = []
    num_bytes = 0
    for group in groups:
        chunk.append(group)
        num_bytes += sum(map(len, group.payloads))
        if len(chunk) >= _SHARD_GROUPS or num_bytes >= _SHARD_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk


_STORAGE_TIMEOUT_S = 60.0


def fetch_archive(uri: str, into: Path) -> Imported:
    """Copy an archive from an object store, skipping files that `into` already has.

    Raises ConfigError if `uri` is not an archive or a run writes to `into`, StorageError, DamagedObjectError,
    ArchiveError if `into` has a different archive.
    """
    require_storage("URI", uri, is_fit=True)
    if (into / LOCK).exists():
        raise ConfigError(f"--into must be a new folder, or one of an earlier fetch, got {into}, which a run writes.")
    remote = ObjectFolder(uri, StorageWait(_STORAGE_TIMEOUT_S))
    if not remote.read(MANIFEST):
        raise ConfigError(
            f"URI must be an archive, got {uri}, which has no {MANIFEST}: name URI/NAME/archive of a run."
        )
    ArchiveMirror(into, remote).fetch()
    return _content(read_manifest(into).shards)
