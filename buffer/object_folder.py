"""ObjectFolder: a folder in an object store or another file system of `pyarrow.fs`.

Invariant: a folder is complete iff it has a manifest, which is written last and deleted first.

<uri>/upload-0.json     first: checksums of sender 0's files, so that a retry sends only missing ones
<uri>/<file>            objects, each complete or absent
<uri>/checksums.json    last: the manifest, checksums of all files
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit

import msgspec
import pyarrow as pa
import structlog
import xxhash
from pyarrow.fs import FileInfo, FileSelector, FileSystem, FileType

from slipstream.buffer.durable_files import CHECKSUMS, checksum, sync_path, write_durably
from slipstream.buffer.errors import DamagedObjectError, StorageError
from slipstream.configs.base import ConfigError
from slipstream.configs.run import RunConfig

T = TypeVar("T")

_INTENT = "upload-{}.json"
_PROBE = "write-probe"
_BLOCK_BYTES = 16 * 2**20
_BLOCKS_IN_FLIGHT = 8
"""Concurrent parts of a multipart upload, which pyarrow does not limit."""
_OUTAGE_S = 1800.0
"""Time for which the object store may fail before the learner exits: most outages are shorter."""
UPLOAD_TIMEOUT_S = 60.0
"""For a stopping role to finish its uploads."""
_FIRST_DELAY_S, _LONGEST_DELAY_S = 1.0, 30.0
_WITH_FOLDERS = ("local", "hdfs")
"""File systems where a file needs its parent folder."""

log = structlog.get_logger(__name__)


class StorageWait:
    """Retries operations with back-off. Used by one thread; any thread may read `reason`."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: from an operation's first failure until it is given up."""
        self._timeout_s = timeout_s
        self.reason = ""
        """Current wait, such as `waiting 12 s of 60 s for s3://...: <error>`; else empty."""

    def repeat(self, what: str, call: Callable[[], T]) -> T:
        """Call until it succeeds. Raises StorageError, which names `what`, at the timeout."""
        failing_since, delay_s = 0.0, _FIRST_DELAY_S
        while True:
            try:
                result = call()
                self.reason = ""
                return result
            except (OSError, pa.ArrowException) as error:
                now = time.monotonic()
                failing_since = failing_since or now
                if now - failing_since >= self._timeout_s:
                    self.reason = ""
                    raise StorageError(
                        f"{what} must be reachable in storage.uri, but has failed for {now - failing_since:.0f} s: "
                        f"{error}. Check the server, the bucket and the credentials in the environment."
                    ) from error
                self.reason = f"waiting {now - failing_since:.0f} s of {self._timeout_s:g} s for {what}: {error}"
                log.warning("storage_failed", path=what, again_in_s=delay_s, error=str(error))
                time.sleep(delay_s)
                delay_s = min(2 * delay_s, _LONGEST_DELAY_S)


class ObjectFolder:
    """One folder. To upload, all senders call `upload`, then one calls `seal`. Methods raise StorageError."""

    def __init__(self, uri: str, wait: StorageWait) -> None:
        """Open the file system of `uri`; the folder need not exist."""
        self.uri = uri.rstrip("/")
        self.wait = wait
        try:
            located = self.uri
            endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
            if uri.startswith("s3://") and endpoint:
                # pyarrow reads the endpoint from the environment only for other services.
                parts = urlsplit(endpoint)
                region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
                settings = {"endpoint_override": parts.netloc, "scheme": parts.scheme, "region": region}
                located += f"?{urlencode(settings)}"
            self._files, self._path = FileSystem.from_uri(located)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise StorageError(f"storage.uri must name a folder that pyarrow.fs opens, got {uri}: {error}") from None

    def child(self, name: str) -> "ObjectFolder":
        child = copy(self)
        child.uri, child._path = f"{self.uri}/{name}", f"{self._path}/{name}"
        return child

    # --- whole folders -------------------------------------------------------------------------------------------
    def check_writable(self) -> None:
        self.write(_PROBE, b"")
        self.remove(_PROBE)

    def names(self) -> list[str]:
        """Names of complete subfolders, sorted."""
        return sorted(str(path.parent) for path in map(PurePosixPath, self.objects()) if path.parts[1:] == (CHECKSUMS,))

    def manifest(self) -> dict[str, str] | None:
        """Name -> checksum of the files; None if the folder is incomplete."""
        data = self.read(CHECKSUMS)
        return None if data is None else _parse(data, where=f"{self.uri}/{CHECKSUMS}")

    def upload(self, folder: Path, checksums: Mapping[str, str], *, sender: int = 0) -> None:
        """Send the missing files of `checksums`. Several senders may upload into one folder."""
        intent, data = _INTENT.format(sender), msgspec.json.encode(dict(sorted(checksums.items())))
        found = self.objects()
        if self.read(intent) != data:
            # Delete older objects first: with an intent, objects of the right size count as sent.
            for name in (CHECKSUMS, intent, *checksums):
                if name in found:
                    self.remove(name)
                    del found[name]
            self.write(intent, data)
        for name, expected in checksums.items():
            if name not in found or found[name].size != (folder / name).stat().st_size:
                self.send(folder / name, name, expected=expected)

    def seal(self, *, senders: Sequence[int] = (0,)) -> None:
        """Write the manifest, which completes the folder, and delete all other objects."""
        checksums = dict[str, str]()
        for name in map(_INTENT.format, senders):
            checksums |= _parse(self.read(name) or b"", where=f"{self.uri}/{name}")
        self.write(CHECKSUMS, msgspec.json.encode(checksums))
        for name in self.objects().keys() - checksums.keys() - {CHECKSUMS}:
            self.remove(name)

    def download(self, into: Path) -> None:
        """Fetch missing or different files into `into`, then the manifest, durably.

        Raises DamagedObjectError for an incomplete folder or damaged object, and OSError.
        """
        manifest = self.manifest()
        if manifest is None:
            raise DamagedObjectError(f"{self.uri} must be a completely uploaded folder, but has no {CHECKSUMS}.")
        for name, expected in manifest.items():
            target = into / name
            if not target.is_file() or checksum(target) != expected:
                target.parent.mkdir(parents=True, exist_ok=True)
                self.fetch(name, target, expected=expected)
        write_durably(into / CHECKSUMS, msgspec.json.encode(manifest))
        for path in (*(path for path in into.rglob("*") if path.is_dir()), into):
            sync_path(path)

    def prune(self, *, is_kept: Callable[[str], bool]) -> None:
        """Delete all subfolders that are not kept, including incomplete uploads."""
        for name in sorted({PurePosixPath(name).parts[0] for name in self.objects()}):
            if not is_kept(name):
                self.child(name).delete()

    def delete(self) -> None:
        """Delete the folder, manifest first."""
        self.remove(CHECKSUMS)

        def call() -> None:
            with suppress(FileNotFoundError):
                self._files.delete_dir(self._path)

        self.wait.repeat(self.uri, call)

    # --- single objects ------------------------------------------------------------------------------------------
    def objects(self) -> dict[str, FileInfo]:
        """Relative name -> info of all files below."""
        selector = FileSelector(self._path, recursive=True, allow_not_found=True)
        infos = self.wait.repeat(self.uri, lambda: self._files.get_file_info(selector))
        files = (info for info in infos if info.type == FileType.File)
        return {str(PurePosixPath(info.path).relative_to(self._path)): info for info in files}

    def read(self, name: str) -> bytes | None:
        """Content of a small object; None if absent."""

        def call() -> bytes | None:
            try:
                with self._files.open_input_stream(self._at(name)) as source:
                    return bytes(source.read())
            except FileNotFoundError:
                return None

        return self.wait.repeat(f"{self.uri}/{name}", call)

    def write(self, name: str, data: bytes) -> None:
        def call() -> None:
            with self._open_sink(name) as sink:
                sink.write(data)
            self._sync(name)

        self.wait.repeat(f"{self.uri}/{name}", call)

    def send(self, path: Path, name: str, *, expected: str = "") -> None:
        """Upload a file. Raises DamagedObjectError unless its checksum is `expected`, if given."""

        def call() -> str:
            with path.open("rb", buffering=0) as source, self._open_sink(name) as sink:
                digest = _copy(source, sink)
            self._sync(name)
            return digest

        found = self.wait.repeat(f"{self.uri}/{name}", call)
        if expected and found != expected:
            self.remove(name)
            raise DamagedObjectError(f"{path} must have the checksum it was written with ({expected}), got {found}.")

    def fetch(self, name: str, path: Path, *, expected: str = "") -> None:
        """Download an object durably. Raises DamagedObjectError as `send` does."""

        def call() -> str:
            with self._files.open_input_stream(self._at(name)) as source, path.open("wb") as sink:
                digest = _copy(source, sink)
                os.fsync(sink.fileno())
            return digest

        found = self.wait.repeat(f"{self.uri}/{name}", call)
        if expected and found != expected:
            path.unlink()
            raise DamagedObjectError(
                f"{self.uri}/{name} must have the checksum it was written with ({expected}), got {found}: restore "
                "it from a copy, or start another run from the model of another checkpoint."
            )

    def remove(self, name: str) -> None:
        def call() -> None:
            with suppress(FileNotFoundError):
                self._files.delete_file(self._at(name))

        self.wait.repeat(f"{self.uri}/{name}", call)

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    def _open_sink(self, name: str) -> Any:
        path = self._at(name)
        if self._files.type_name in _WITH_FOLDERS:
            self._files.create_dir(str(PurePosixPath(path).parent), recursive=True)
        return self._files.open_output_stream(path)

    def _sync(self, name: str) -> None:
        """Sync a local file system; object stores are durable once written."""
        if self._files.type_name == "local":
            sync_path(Path(self._at(name)))


def open_storage(run: RunConfig, *, timeout_s: float = _OUTAGE_S) -> ObjectFolder | None:
    """Run's folder in `storage.uri`, if set. Raises StorageError."""
    if not run.storage.uri:
        return None
    return ObjectFolder(f"{run.storage.uri.rstrip('/')}/{run.name}", StorageWait(timeout_s))


def check_storage(run: RunConfig, *, has_folder: bool) -> None:
    """Raise ConfigError if `storage.uri` is not writable, holds a run that must be new, or lacks one to resume.

    `has_folder`: whether the local run folder holds the run.
    """
    try:
        if not (storage := open_storage(run, timeout_s=0)):
            return
        has_run = bool(storage.objects())
        storage.check_writable()
    except StorageError as error:
        raise ConfigError(str(error)) from None
    if has_run and not run.resume:
        raise ConfigError(
            f"name must be unused in storage.uri, got {run.name!r}, but {storage.uri} has files: choose "
            "another with name=..., continue it with resume=true, or delete them."
        )
    if run.resume is True and not (has_run or has_folder):
        raise ConfigError(
            f"name must be that of an existing run with resume=true, got {run.name!r}, but {run.runs_dir}/ and "
            f"{run.storage.uri} have nothing of it: correct name=..., or start the run with resume=auto."
        )


def _copy(source: Any, sink: Any) -> str:
    digest, num_blocks = xxhash.xxh3_64(), 0
    while block := source.read(_BLOCK_BYTES):
        digest.update(block)
        sink.write(block)
        num_blocks += 1
        if num_blocks % _BLOCKS_IN_FLIGHT == 0:
            sink.flush()
    sink.flush()
    return digest.hexdigest()


def _parse(data: bytes, *, where: str) -> dict[str, str]:
    try:
        checksums = msgspec.json.decode(data, type=dict[str, str])
    except ValueError as error:
        raise DamagedObjectError(f"{where} must hold checksums by file, got {error}") from None
    for name in checksums:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise DamagedObjectError(f"{where} must name files within its folder, got {name!r}")
    return checksums
