"""Fetcher: a generator's end of the snapshot and delta transports.

It reads from the learner's folder if it can, else over the network, and falls back from a delta to the whole snapshot
whatever the reason. The result always has the checksums of the update.
"""

import time
from itertools import zip_longest
from pathlib import Path
from threading import Event

import structlog

from slipstream.broker.credentials import Keys
from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import SnapshotSource, Update
from slipstream.broker.weights import buckets as flat
from slipstream.broker.weights import snapshot
from slipstream.broker.weights.host_weights import HostWeights
from slipstream.broker.weights.shared_buckets import SharedBuckets
from slipstream.broker.weights.snapshot_store import SnapshotStore, WeightFiles
from slipstream.broker.weights.stream import WeightStream
from slipstream.runtime.clock import Deadline

_POLL_INTERVAL_S = 0.05
_DIAGNOSE_TIMEOUT_S = 2.0
"""Extra seconds to find out which version is there instead of the requested one."""

log = structlog.get_logger(__name__)


class Fetcher:
    """Fetches versions into host memory. Belongs to one thread."""

    def __init__(self, keys: Keys | None) -> None:
        """`keys`: of the run; None in a process that fetches nothing."""
        self._keys = keys
        self._stream: WeightStream | None = None
        self._address = ""
        self._host_weights = HostWeights()

    @property
    def num_bytes(self) -> int:
        """Bytes read by the last `fetch`."""
        return self._host_weights.num_bytes

    def fetch(self, update: Update, *, cancelled: Event) -> SharedBuckets:
        """Fetch and verify the version of an update that has a source; the result is valid until the next call.

        Blocks at most `update.timeout_s`, and ends soon after `cancelled` is set. Raises WeightTransferError.
        """
        assert update.source is not None, "a version that is broadcast cannot be fetched"
        deadline = Deadline(update.timeout_s, what=f"version {update.version}")
        try:
            self._update(update, self._sources(update.source, cancelled), deadline)
        except WeightTransferError as error:
            raise WeightTransferError(f"version {update.version} could not be fetched: {error}") from error
        buckets = self._host_weights.buckets
        assert buckets is not None, "a fetched version is held"
        if buckets.sizes != update.bucket_bytes:
            raise WeightTransferError(
                f"buckets must have the announced sizes {update.bucket_bytes}, got {buckets.sizes}"
            )
        return buckets

    def release(self) -> None:
        """Free the memory once the buckets are no longer used; the next version is fetched whole."""
        self._host_weights.release()

    def close(self) -> None:
        """Free the memory and disconnect. Idempotent."""
        self.release()
        self._disconnect()

    def _sources(self, source: SnapshotSource, cancelled: Event) -> list[WeightFiles]:
        """Return the sources to try, the folder before the network."""
        if self._stream is None or source.address != self._address:
            self._disconnect()
            assert self._keys is not None, "a fetcher must have the run's keys"
            self._stream, self._address = WeightStream(source.address, keys=self._keys), source.address
        self._stream.cancelled = cancelled
        folder = Path(source.folder)
        return [SnapshotStore(folder), self._stream] if _is_visible(folder) else [self._stream]

    def _disconnect(self) -> None:
        if self._stream:
            self._stream.close()
            self._stream = None

    def _update(self, update: Update, sources: list[WeightFiles], deadline: Deadline) -> None:
        checksum = flat.combine(update.checksums)
        if self._host_weights.checksum == checksum:
            return
        # The update may arrive before the learner has written the version.
        while not self._try_sources(checksum, update, sources, deadline):
            if deadline.is_over:
                raise _missing_version(update, sources[-1])
            time.sleep(_POLL_INTERVAL_S)

    def _try_sources(self, checksum: str, update: Update, sources: list[WeightFiles], deadline: Deadline) -> bool:
        """Read the version from the first source that has it; False if none does. Raises WeightTransferError."""
        failure: WeightTransferError | None = None
        for files in sources:
            try:
                version = files.find(checksum, timeout_s=max(_DIAGNOSE_TIMEOUT_S, deadline.left_s))
                if version is not None:
                    self._read(files, version, update, deadline)
                    return True
            except (WeightTransferError, OSError) as error:
                # The next source may be intact: a damaged file in the folder does not concern the server.
                log.warning("weights_not_read", source=type(files).__name__, reason=str(error))
                failure = error if isinstance(error, WeightTransferError) else WeightTransferError(str(error))
        if failure:
            raise failure
        return False

    def _read(self, files: WeightFiles, version: int, update: Update, deadline: Deadline) -> None:
        with_deltas = update.source is not None and update.source.has_deltas
        self._host_weights.update_to(
            files, version, slots=update.slots, with_deltas=with_deltas, timeout_s=deadline.left_s
        )


def _is_visible(folder: Path) -> bool:
    try:
        return folder.is_dir()
    except OSError:  # of a parent folder without search permission
        return False


def _missing_version(update: Update, files: WeightFiles) -> WeightTransferError:
    """Build the error for a version that did not appear, with how the newest one differs from it."""
    after, checksums = f"within {update.timeout_s:g} s", update.checksums
    newest = files.newest(timeout_s=_DIAGNOSE_TIMEOUT_S)
    if newest is None:
        return WeightTransferError(f"it must be available {after}, got no version at all")
    manifest = snapshot.parse_manifest(files.read(newest, snapshot.MANIFEST, timeout_s=_DIAGNOSE_TIMEOUT_S))
    pairs = list(zip_longest(manifest.checksums, checksums, fillvalue=0))
    index = next((index for index, (got, expected) in enumerate(pairs) if got != expected), 0)
    return WeightTransferError(
        f"bucket {index} of {len(checksums)} must have checksum {pairs[index][1]:#018x} {after}, got "
        f"{pairs[index][0]:#018x} in the newest version {newest}; nothing was loaded"
    )
