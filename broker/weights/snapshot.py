"""Snapshots: a version of the weights as files, for generators that do not take part in its broadcast.

version-00000012/
    manifest.json       the version's tensors, buckets and their checksums
    bucket-0000.bin     the bytes of one bucket, as in a broadcast
Invariant: a folder of this name is complete, whenever its writer was killed; readers verify everything they read.
"""

import mmap
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import TensorSlot, Update
from slipstream.broker.weights import buckets as flat
from slipstream.buffer.durable_files import sync_path, write_synced
from slipstream.buffer.trajectory import Record
from slipstream.runtime.disk import describe_disk

MANIFEST = "manifest.json"
_FOLDER = re.compile(r"version-(\d{8,})")
_UNFINISHED = ".tmp"


class Manifest(Record):
    """Contents of a snapshot. Example: Manifest(12, "ab12...", slots=[...], bucket_bytes=[4096], checksums=[7])."""

    version: int
    checksum: str
    """Checksum over the checksums of all buckets; the store keeps it with the version."""
    slots: list[TensorSlot]
    bucket_bytes: list[int]
    checksums: list[int]
    """xxh3-64 of the bytes of each bucket."""

    @classmethod
    def of(cls, update: Update) -> "Manifest":
        """Build the manifest of the version that an update announces."""
        checksum = flat.combine(update.checksums)
        return cls(update.version, checksum, update.slots, update.bucket_bytes, update.checksums)


def folder_name(version: int) -> str:
    """Return the folder of a version, like `version-00000012`."""
    return f"version-{version:08d}"


def bucket_name(index: int) -> str:
    """Return the file of a bucket, like `bucket-0003.bin`."""
    return f"bucket-{index:04d}.bin"


def versions(folder: Path) -> list[int]:
    """Return the versions of the snapshots in a folder, ascending."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(found[1]) for name in names if (found := _FOLDER.fullmatch(name)))


def write(path: Path, manifest: Manifest, buckets: Sequence[Tensor], *, more: Iterable[tuple[str, bytes]] = ()) -> None:
    """Write a snapshot and `more` files (name, content) into the folder `path`, replacing an existing one.

    Raises WeightTransferError if the disk is full or the folder not writable; nothing is left behind then.
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
        # Files and folder are on disk before the rename publishes them, so that no crash leaves a partial version.
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


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the snapshot at `path`. Raises WeightTransferError."""
    try:
        return parse_manifest((path / MANIFEST).read_bytes())
    except OSError as error:
        raise WeightTransferError(f"a snapshot must be at {path} with its {MANIFEST}, got {error}") from error


def parse_manifest(content: bytes) -> Manifest:
    """Decode a manifest. Raises WeightTransferError if it is damaged or inconsistent."""
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
        # Raises OverflowError for a checksum that is not a 64-bit number.
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
    """Map a bucket from its file, unverified; writes do not reach the file. Raises WeightTransferError."""
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
    """Delete a snapshot. Renamed first, so that a crash leaves no part of it under its name."""
    aside = path.with_name(f".{path.name}.old{_UNFINISHED}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def remove_unfinished(folder: Path) -> None:
    """Delete leftovers of killed writers. For the only writer of the folder."""
    for path in folder.glob(f".version-*{_UNFINISHED}"):
        shutil.rmtree(path, ignore_errors=True)
