"""SnapshotStore: the newest versions of the weights in a folder, each with the delta that leads to it.

<run folder>/weights/
    version-00000012/       a snapshot: see broker/weights/snapshot.py; the newest few have their buckets
        delta.json          what it is a delta from, if it has one
        delta-0000.bin      the payload for one bucket
One process puts versions there; any number read, each for itself or through broker/weights/stream.py.
Invariant: what was put last is the newest, and nothing above it is kept: a learner that resumed has taken that back.
"""

import os
import re
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec
import structlog
from torch import Tensor

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import Update
from slipstream.broker.weights import buckets as flat
from slipstream.broker.weights import delta, snapshot
from slipstream.broker.weights.delta import Delta
from slipstream.broker.weights.snapshot import MANIFEST, Manifest

DELTA = "delta.json"
_FILE = re.compile(r"manifest\.json|delta\.json|(bucket|delta)-\d{4,6}\.bin")

log = structlog.get_logger(__name__)


class WeightFiles(Protocol):
    """What a generator reads versions from: a shelf, or the stream from somebody who has one."""

    def find(self, checksum: str, *, timeout_s: float) -> int | None:
        """The version with this checksum. None when it is not there. Raises WeightTransferError."""
        ...

    def newest(self, *, timeout_s: float) -> int | None:
        """The newest version. Raises WeightTransferError."""
        ...

    def read(self, version: int, name: str, *, timeout_s: float) -> bytes:
        """A whole file. Raises WeightTransferError when it is not there, or has not come in time."""
        ...

    def read_into(self, version: int, name: str, into: memoryview, *, timeout_s: float) -> None:
        """A whole file of this very size. Raises WeightTransferError."""
        ...


class _Label(msgspec.Struct):
    """Of a manifest, what a search needs."""

    version: int
    checksum: str


class SnapshotStore:
    """The versions in one folder. Fulfils WeightFiles. `put` belongs to one process; all else may be called by any."""

    def __init__(self, folder: Path, *, num_kept: int = 2, num_deltas_kept: int = 16) -> None:
        """The last `num_kept` versions keep their buckets, the last `num_deltas_kept` their deltas."""
        self.folder = folder
        """Where."""
        self._num_kept = num_kept
        self._num_deltas_kept = max(num_kept, num_deltas_kept)
        self._putting = threading.Lock()

    # --- the learner's end ---------------------------------------------------------------------------------------
    def put(
        self, update: Update, buckets: Sequence[Tensor], *, with_delta: bool = False, pinned: Collection[int] = ()
    ) -> None:
        """Write a version, with the delta from the newest one if wanted; does nothing when it is there already.

        Versions of `pinned` stay whole, however old. Blocks while it writes and waits for the disk. Raises
        WeightTransferError: there is no room, or the buckets are not what the update says.
        """
        manifest = Manifest.of(update)
        with self._putting:
            if self._is_newest(manifest):
                return
            flat.verify(buckets, expected=manifest.checksums)
            snapshot.remove_unfinished(self.folder)
            base = self._base_for(manifest) if with_delta else None
            more = self._delta_files(*base, manifest, buckets) if base else ()
            snapshot.write(self.folder / snapshot.folder_name(manifest.version), manifest, buckets, more=more)
            try:
                self._prune(newest=manifest.version, pinned=pinned)
            except OSError as error:
                # What is too old is tried again with the next version.
                log.warning("shelf_not_pruned", reason=str(error))

    def _is_newest(self, manifest: Manifest) -> bool:
        newest = self.newest()
        return newest == manifest.version and self._label(newest) == _Label(manifest.version, manifest.checksum)

    def _base_for(self, manifest: Manifest) -> tuple[Manifest, list[Tensor]] | None:
        """The version before and its buckets, if they are there and have the same layout."""
        before = [version for version in snapshot.versions(self.folder) if version < manifest.version]
        if not before:
            return None
        path = self.folder / snapshot.folder_name(before[-1])
        try:
            base = snapshot.read_manifest(path)
            if (base.slots, base.bucket_bytes) != (manifest.slots, manifest.bucket_bytes):
                return None
            return base, [snapshot.map_bucket(path, base, index) for index in range(len(base.bucket_bytes))]
        except WeightTransferError as fault:
            log.info("no_delta", version=manifest.version, reason=str(fault))
            return None

    def _delta_files(
        self, base: Manifest, before: Sequence[Tensor], manifest: Manifest, buckets: Sequence[Tensor]
    ) -> Iterator[tuple[str, bytes]]:
        """One bucket after the other, so that one payload at a time is in memory."""
        entries: list[delta.BucketDelta] = []
        for index, (old, new) in enumerate(zip(before, buckets, strict=True)):
            entry, payload = delta.encode(old, new.detach().cpu(), width=delta.width_of(index, manifest.slots))
            entries.append(entry)
            if payload:
                yield delta_name(index), payload
        step = Delta(manifest.version, manifest.checksum, base.version, base.checksum, entries)
        yield DELTA, msgspec.json.encode(step)

    def _prune(self, *, newest: int, pinned: Collection[int]) -> None:
        """Delete what is too old, and what is above the newest."""
        held = snapshot.versions(self.folder)
        kept = [version for version in held if version <= newest]
        for version in set(held) - set(kept[-self._num_deltas_kept :]) - (set(pinned) & set(kept)):
            snapshot.remove(self.folder / snapshot.folder_name(version))
        for version in set(kept[-self._num_deltas_kept : -self._num_kept]) - set(pinned):
            for bucket in (self.folder / snapshot.folder_name(version)).glob("bucket-*.bin"):
                bucket.unlink()

    # --- a reader's end ------------------------------------------------------------------------------------------
    def find(self, checksum: str, *, timeout_s: float = 0.0) -> int | None:
        """The version with this checksum; None when it is not there. Does not wait."""
        labels = (self._label(version) for version in reversed(snapshot.versions(self.folder)))
        return next((label.version for label in labels if label and label.checksum == checksum), None)

    def newest(self, *, timeout_s: float = 0.0) -> int | None:
        """The newest version. Does not wait."""
        return max(snapshot.versions(self.folder), default=None)

    def read(self, version: int, name: str, *, timeout_s: float = 0.0) -> bytes:
        """A whole file. Raises WeightTransferError."""
        return self.read_part(version, name, offset=0, num_bytes=self.size_bytes(version, name))

    def read_into(self, version: int, name: str, into: memoryview, *, timeout_s: float = 0.0) -> None:
        """A whole file of this very size. Raises WeightTransferError."""
        check_size(version, name, wanted=len(into), got=self.size_bytes(version, name))
        with _told(path := self._path(version, name)), path.open("rb", buffering=0) as file:
            num_read = 0
            while num_read < len(into) and (part := file.readinto(into[num_read:])):
                num_read += part
        check_size(version, name, wanted=len(into), got=num_read)

    def size_bytes(self, version: int, name: str) -> int:
        """Of a file. Raises WeightTransferError when it is not there."""
        with _told(path := self._path(version, name)):
            return path.stat().st_size

    def read_part(self, version: int, name: str, *, offset: int, num_bytes: int) -> bytes:
        """Up to `num_bytes` from `offset` on; less at the end of the file. Raises WeightTransferError."""
        with _told(path := self._path(version, name)), path.open("rb") as file:
            return os.pread(file.fileno(), num_bytes, offset)

    def _path(self, version: int, name: str) -> Path:
        """Names come from other processes too: nothing but the files of a version is ever opened."""
        if not _FILE.fullmatch(name) or version < 0:
            raise WeightTransferError(f"a file of a snapshot must be asked for, got {name!r} of version {version}")
        return self.folder / snapshot.folder_name(version) / name

    def _label(self, version: int) -> _Label | None:
        try:
            return msgspec.json.decode(self._path(version, MANIFEST).read_bytes(), type=_Label)
        except (OSError, msgspec.DecodeError):
            return None


def delta_name(index: int) -> str:
    """`delta-0003.bin`."""
    return f"delta-{index:04d}.bin"


def check_size(version: int, name: str, *, wanted: int, got: int) -> None:
    """Raises WeightTransferError unless they are the same."""
    if wanted != got:
        raise WeightTransferError(f"{name} of version {version} must have {wanted} bytes, got {got}: it is damaged")


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WeightTransferError(
            f"{path.name} of {path.parent.name} must be on the shelf, got {error}: it was pruned, or is damaged"
        ) from error
