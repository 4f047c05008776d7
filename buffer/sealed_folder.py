"""Sealed folders: files with their checksums, durable before the folder gets its name, checked before they are read."""

import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import xxhash

from slipstream.buffer.durable_files import sync_path, write_durably

CHECKSUMS = "checksums.json"
_BLOCK_BYTES = 4 * 2**20
_MAX_THREADS = 8
"""One thread reads about as fast as one disk; the hash lets go of the interpreter's lock."""


def checksum(path: Path) -> str:
    """xxh3-64 of a file, in hex."""
    digest = xxhash.xxh3_64()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def seal(folder: Path) -> None:
    """Write the checksums of a folder and sync it all: only a rename is missing then. Raises OSError."""
    (folder / CHECKSUMS).write_bytes(msgspec.json.encode(checksums_of(folder)))
    # Contents before the name: after the rename the folder must survive a power failure.
    for path in (*folder.rglob("*"), folder):
        sync_path(path)


def merge(parts: Sequence[Path], *, into: Path) -> None:
    """Move the files of sealed folders into another one, which is sealed again then. Raises OSError; repeatable."""
    checksums = dict[str, str]()
    for folder in (into, *parts):
        checksums |= read_checksums(folder)
    # First, because it alone takes room on the disk.
    write_durably(into / CHECKSUMS, msgspec.json.encode(checksums))
    for folder in parts:
        for name in read_checksums(folder):
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            if not (into / name).exists():
                (folder / name).rename(into / name)
    for path in (*(path for path in into.rglob("*") if path.is_dir()), into):
        sync_path(path)
    for folder in parts:
        shutil.rmtree(folder, ignore_errors=True)


def find_damage(folder: Path) -> str:
    """Return which file of a sealed folder is not as it was written, as the beginning of a sentence; empty if none."""
    try:
        expected, found = read_checksums(folder), checksums_of(folder)
    except (OSError, msgspec.MsgspecError) as error:
        return f"{folder / CHECKSUMS} must hold the checksums of its checkpoint, got {error}"
    name = next((name for name in sorted(expected | found) if expected.get(name) != found.get(name)), None)
    if name is None:
        return ""
    return (
        f"{folder / name} must have the checksum it was written with ({expected.get(name, 'none')}), got "
        f"{found.get(name, 'no file')}"
    )


def read_checksums(folder: Path) -> dict[str, str]:
    """Checksums that a sealed folder has on file, by path within it. Raises OSError, msgspec.MsgspecError."""
    return msgspec.json.decode((folder / CHECKSUMS).read_bytes(), type=dict[str, str])


def checksums_of(folder: Path) -> dict[str, str]:
    """Compute the checksum of every file but that of the checksums, by its path within the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / CHECKSUMS)
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        return dict(zip((str(path.relative_to(folder)) for path in files), pool.map(checksum, files), strict=True))
