"""Snapshots: the weights of a version as files, for generators that do not take part in its broadcast.

    <run folder>/weights/
        version-00000012/       only the newest few versions keep their buckets
            manifest.json       tensors, buckets and their checksums
            bucket-0000.bin     one bucket, as in a broadcast
            delta.json          the delta from the previous version, if any
            delta-0000.bin      the delta's payload for one bucket

Invariant: a version's folder is complete even if its writer was killed. The last written version is the newest: higher
ones, which a resumed learner has rolled back, are deleted.
"""

import mmap
import os
import re
import shutil
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import structlog
import torch
from torch import Tensor

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import TensorSlot, Update
from slipstream.broker.weights import buckets as flat
from slipstream.broker.weights import delta
from slipstream.broker.weights.delta import Delta
from slipstream.buffer.durable_files import sync_path, write_synced
from slipstream.configs.base import Record
from slipstream.runtime.disk import describe_disk

MANIFEST = "manifest.json"
_FOLDER = re.compile(r"version-(\d{8,})")
_UNFINISHED = ".tmp"


class Manifest(Record):
    """Contents of a snapshot. Example: Manifest(12, "ab12...", slots=[...], bucket_bytes=[4096], checksums=[7])."""

    version: int
    checksum: str
    """Combined checksum of all buckets, as in the store."""
    slots: list[TensorSlot]
    bucket_bytes: list[int]
    checksums: list[int]
    """xxh3-64 of each bucket's bytes."""

    @classmethod
    def of(cls, update: Update) -> "Manifest":
        return cls(update.version, flat.combine(update.checksums), update.slots, update.bucket_bytes, update.checksums)


def folder_name(version: int) -> str:
    """Return a version's folder, like `version-00000012`."""
    return f"version-{version:08d}"


def bucket_name(index: int) -> str:
    """Return a bucket's file, like `bucket-0003.bin`."""
    return f"bucket-{index:04d}.bin"


def versions(folder: Path) -> list[int]:
    """Return the versions in a folder, ascending."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(found[1]) for name in names if (found := _FOLDER.fullmatch(name)))


def write(path: Path, manifest: Manifest, buckets: Sequence[Tensor], *, more: Iterable[tuple[str, bytes]] = ()) -> None:
    """Write a snapshot and `more` files (name, content) into the folder `path`, or replace it.

    Raises WeightTransferError, leaving nothing behind.
    """
    unfinished = path.with_name(f".{path.name}{_UNFINISHED}")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for index, bucket in enumerate(buckets):
            write_synced(unfinished / bucket_name(index), bucket.detach().cpu().contiguous().numpy().data)
        for name, content in more:
            write_synced(unfinished / name, content)
        write_synced(unfinished / MANIFEST, msgspec.json.encode(manifest))
        # Before the rename publishes them, so that no crash leaves a partial version.
        sync_path(unfinished)
        if path.exists():
            remove(path)
        unfinished.rename(path)
        # The rename itself must survive a crash of the machine.
        sync_path(path.parent)
    except (OSError, MemoryError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise WeightTransferError(
            f"the snapshot of version {manifest.version} ({sum(manifest.bucket_bytes) / 2**20:.0f} MiB) must fit into "
            f"{describe_disk(path.parent)}, got {error or 'no memory'}: free some space there, keep fewer versions, or "
            "choose another folder"
        ) from error


def parse_manifest(content: bytes) -> Manifest:
    """Decode a manifest. Raises WeightTransferError if it is damaged or inconsistent."""
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
        # OverflowError: a checksum is not a 64-bit number.
        own_checksum = flat.combine(manifest.checksums)
    except (ValueError, OverflowError) as error:
        raise WeightTransferError(f"the {MANIFEST} of a snapshot must be readable, got {error}") from error
    if own_checksum != manifest.checksum or len(manifest.checksums) != len(manifest.bucket_bytes):
        raise WeightTransferError(
            f"the {MANIFEST} of version {manifest.version} must have one checksum for each of its "
            f"{len(manifest.bucket_bytes)} buckets, {manifest.checksum} together, got {len(manifest.checksums)}, "
            f"{own_checksum} together: it is damaged"
        )
    return manifest


def map_bucket(path: Path, manifest: Manifest, index: int) -> Tensor:
    """Map a bucket's file copy-on-write, unverified. Raises WeightTransferError."""
    name, size = path / bucket_name(index), manifest.bucket_bytes[index]
    try:
        with name.open("rb") as file:
            if (got := os.fstat(file.fileno()).st_size) != size:
                raise WeightTransferError(f"{name} must have {size} bytes, got {got}: the snapshot is damaged")
            mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if size else bytearray()
    except (OSError, MemoryError) as error:
        raise WeightTransferError(f"the snapshot must have its file {name}, got {error}") from error
    return torch.from_numpy(np.frombuffer(mapped, dtype=np.uint8))


def remove(path: Path) -> None:
    """Delete a snapshot, after a rename, so that a crash leaves no partial one."""
    aside = path.with_name(f".{path.name}.old{_UNFINISHED}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


DELTA = "delta.json"
_FILE = re.compile(r"manifest\.json|delta\.json|(bucket|delta)-\d{4,6}\.bin")

log = structlog.get_logger(__name__)


class WeightFiles(Protocol):
    """Source of versions for a generator: a SnapshotStore, or a WeightStream from a server."""

    num_arrived: int
    """Bytes received over a network so far."""

    def find(self, checksum: str, *, timeout_s: float) -> int | None:
        """Return the version with this checksum; None if missing. Raises WeightTransferError."""

    def newest(self, *, timeout_s: float) -> int | None:
        """Return the newest version; None without any. Raises WeightTransferError."""

    def read(self, version: int, name: str, *, timeout_s: float) -> bytes:
        """Read a file. Raises WeightTransferError if it is missing or late."""

    def read_into(self, version: int, name: str, into: memoryview, *, timeout_s: float) -> None:
        """Read a file of the size of `into`. Raises WeightTransferError."""


class _Label(msgspec.Struct):
    version: int
    checksum: str


class SnapshotStore:
    """Versions in a folder. Implements WeightFiles, without waiting, and ServedFiles. One process calls `put`."""

    def __init__(self, folder: Path, *, num_kept: int = 2, num_deltas_kept: int = 16) -> None:
        """Keep the buckets of the newest `num_kept` versions and the deltas of the newest `num_deltas_kept`."""
        self.folder = folder
        self.num_arrived = 0
        self._num_kept = num_kept
        self._num_deltas_kept = max(num_kept, num_deltas_kept)
        self._put_lock = threading.Lock()

    # --- writing -------------------------------------------------------------------------------------------------
    def put(
        self, update: Update, buckets: Sequence[Tensor], *, with_delta: bool = False, pinned: Collection[int] = ()
    ) -> None:
        """Write a version durably and, with `with_delta`, the delta from the previous one; a no-op if it exists.

        `pinned` versions keep their buckets. Raises WeightTransferError.
        """
        manifest = Manifest.of(update)
        with self._put_lock:
            # A resumed learner reuses version numbers for different weights.
            label, newest = _Label(manifest.version, manifest.checksum), self.newest()
            if newest == manifest.version and self._label(newest) == label:
                return
            flat.verify(buckets, expected=manifest.checksums)
            # Leftovers of killed writers.
            for leftover in self.folder.glob(f".version-*{_UNFINISHED}"):
                shutil.rmtree(leftover, ignore_errors=True)
            base = self._base_for(manifest) if with_delta else None
            more = self._delta_files(*base, manifest, buckets) if base else ()
            write(self.folder / folder_name(manifest.version), manifest, buckets, more=more)
            try:
                self._prune(newest=manifest.version, pinned=pinned)
            except OSError as error:
                # The next version retries.
                log.warning("snapshots_not_pruned", reason=str(error))

    def _base_for(self, manifest: Manifest) -> tuple[Manifest, list[Tensor]] | None:
        if not (before := [version for version in versions(self.folder) if version < manifest.version]):
            return None
        path = self.folder / folder_name(before[-1])
        try:
            base = parse_manifest((path / MANIFEST).read_bytes())
            if (base.slots, base.bucket_bytes) != (manifest.slots, manifest.bucket_bytes):
                return None
            return base, [map_bucket(path, base, index) for index in range(len(base.bucket_bytes))]
        except (WeightTransferError, OSError) as error:
            log.info("no_delta", version=manifest.version, reason=str(error))
            return None

    def _delta_files(
        self, base: Manifest, before: Sequence[Tensor], manifest: Manifest, buckets: Sequence[Tensor]
    ) -> Iterator[tuple[str, bytes]]:
        """Yield a delta's files one by one, so that only one payload is in memory."""
        entries: list[delta.BucketDelta] = []
        for index, (old, new) in enumerate(zip(before, buckets, strict=True)):
            entry, payload = delta.encode(old, new.detach().cpu(), width=delta.width_of(index, manifest.slots))
            entries.append(entry)
            if payload:
                yield delta_name(index), payload
        step = Delta(manifest.version, manifest.checksum, base.version, base.checksum, entries)
        yield DELTA, msgspec.json.encode(step)

    def _prune(self, *, newest: int, pinned: Collection[int]) -> None:
        held = versions(self.folder)
        kept = [version for version in held if version <= newest]
        for version in set(held) - set(kept[-self._num_deltas_kept :]) - (set(pinned) & set(kept)):
            remove(self.folder / folder_name(version))
        for version in set(kept[-self._num_deltas_kept : -self._num_kept]) - set(pinned):
            for bucket in (self.folder / folder_name(version)).glob("bucket-*.bin"):
                bucket.unlink()

    # --- reading -------------------------------------------------------------------------------------------------
    def find(self, checksum: str, *, timeout_s: float = 0.0) -> int | None:
        # Newest first: most queries ask for the latest version.
        labels = (self._label(version) for version in reversed(versions(self.folder)))
        return next((label.version for label in labels if label and label.checksum == checksum), None)

    def newest(self, *, timeout_s: float = 0.0) -> int | None:
        return max(versions(self.folder), default=None)

    def read(self, version: int, name: str, *, timeout_s: float = 0.0) -> bytes:
        return self.read_part(version, name, offset=0, num_bytes=self.size_bytes(version, name))

    def read_into(self, version: int, name: str, into: memoryview, *, timeout_s: float = 0.0) -> None:
        check_size(version, name, expected=len(into), got=self.size_bytes(version, name))
        with _mapped_errors(path := self._path(version, name)), path.open("rb", buffering=0) as file:
            num_read = 0
            while num_read < len(into) and (part := file.readinto(into[num_read:])):
                num_read += part
        check_size(version, name, expected=len(into), got=num_read)

    def size_bytes(self, version: int, name: str) -> int:
        with _mapped_errors(path := self._path(version, name)):
            return path.stat().st_size

    def read_part(self, version: int, name: str, *, offset: int, num_bytes: int) -> bytes:
        with _mapped_errors(path := self._path(version, name)), path.open("rb") as file:
            return os.pread(file.fileno(), num_bytes, offset)

    def _path(self, version: int, name: str) -> Path:
        # Names come from other processes: open only files of a version.
        if not _FILE.fullmatch(name) or version < 0:
            got = f"{name!r} of version {version}"
            raise WeightTransferError(f"the name of a snapshot's file must match {_FILE.pattern}, got {got}")
        return self.folder / folder_name(version) / name

    def _label(self, version: int) -> _Label | None:
        try:
            return msgspec.json.decode(self._path(version, MANIFEST).read_bytes(), type=_Label)
        except (OSError, ValueError):
            return None


def delta_name(index: int) -> str:
    """Return a delta payload's file, like `delta-0003.bin`."""
    return f"delta-{index:04d}.bin"


def check_size(version: int, name: str, *, expected: int, got: int) -> None:
    """Raise WeightTransferError unless a file has its expected size."""
    if expected != got:
        raise WeightTransferError(f"{name} of version {version} must have {expected} bytes, got {got}: it is damaged")


@contextmanager
def _mapped_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        must = f"{path.name} of {path.parent.name} must be in the snapshot store"
        raise WeightTransferError(f"{must}, got {error}: it was pruned or is damaged") from error
