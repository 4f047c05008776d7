"""Fetcher: a generator's end of the snapshot and delta transports.

On the learner's machine, it maps the learner's memory. Otherwise, it reads from the update's lenders, then from the
learner's folder if visible, then from the learner's server; if the learner's deltas fail, the whole snapshot. The
result matches the update's checksums, a lender's bytes also the unforgeable digests. Lenders get half of the time.
"""

import os
import time
from collections.abc import Collection, Sequence
from itertools import zip_longest
from pathlib import Path
from threading import Event

import msgspec
import structlog

from slipstream.broker.errors import AlteredWeightsError, WeightTransferError
from slipstream.broker.messages import LenderError, SnapshotSource, Update
from slipstream.broker.transport.endpoints import is_listening
from slipstream.broker.weights import buckets as flat
from slipstream.broker.weights import snapshots
from slipstream.broker.weights.host_weights import HostWeights
from slipstream.broker.weights.shared_buckets import BucketMaps
from slipstream.broker.weights.snapshots import Manifest, SnapshotStore, WeightFiles
from slipstream.broker.weights.stream import StreamServer, WeightStream
from slipstream.broker.weights.transport import HostBuckets
from slipstream.configs.cluster import LOCAL, ClusterConfig
from slipstream.runtime.clock import Deadline
from slipstream.runtime.credentials import Keys

_POLL_INTERVAL_S = 0.05
_DIAGNOSE_TIMEOUT_S = 2.0
"""Additional time to diagnose which version is available instead."""
_GIVE_UP_S = 10.0
"""Time without progress after which a lender is abandoned."""

log = structlog.get_logger(__name__)


class Fetcher:
    """Fetches versions into host memory. Belongs to one thread."""

    def __init__(
        self,
        keys: Keys | None,
        *,
        lend_at: str = "",
        cluster: ClusterConfig = LOCAL,
        host_weights: HostWeights | None = None,
    ) -> None:
        """`keys`: None in a process that never fetches. `lend_at`: endpoint for lending, bound as by `listen`; empty:
        lend nothing. Raises ConfigError, WeightTransferError."""
        self._keys = keys
        self._streams: dict[str, WeightStream] = {}
        self._host_weights = host_weights or HostWeights()
        self._maps = BucketMaps()
        self._server = (
            StreamServer(self._host_weights, keys=keys, address=lend_at, cluster=cluster) if keys and lend_at else None
        )
        self.num_bytes = 0
        """Bytes read by the last `fetch`."""
        self.lender_errors: list[LenderError] = []
        """Lenders that failed the last `fetch`."""

    @property
    def lends_at(self) -> str:
        """Bound endpoint for lending; empty: none."""
        return self._server.address if self._server else ""

    @property
    def num_bytes_lent(self) -> int:
        return self._server.num_bytes if self._server else 0

    def fetch(self, update: Update, *, cancelled: Event) -> HostBuckets:
        """Fetch and verify the version of an update with a source; valid until the next call.

        Blocks at most `update.timeout_s`, or until soon after `cancelled` is set. Raises WeightTransferError.
        """
        source, manifest, before = update.source, Manifest.of(update), self._host_weights.num_bytes
        assert source is not None, "a version that is broadcast cannot be fetched"
        self.lender_errors, self.num_bytes = [], 0
        if source.memory:
            mapped = self._maps.get(source.memory, sizes=update.bucket_bytes)
            flat.verify(mapped, expected=update.checksums)
            return HostBuckets(mapped, source.memory)
        self._disconnect(kept=[*source.lenders, source.address])
        deadline = Deadline(update.timeout_s, what=f"version {update.version}")
        try:
            with self._host_weights.lending(manifest if source.is_lent else None, with_deltas=source.has_deltas):
                if self._host_weights.checksum != manifest.checksum:
                    lender = self._fetch_from_lenders(update, source, cancelled, deadline)
                    if not lender:
                        self._fetch_from_learner(update, source, cancelled, deadline)
                    log.info("weights_fetched", version=update.version, source=lender or "learner")
        except WeightTransferError as error:
            raise WeightTransferError(f"version {update.version} could not be fetched: {error}") from error
        finally:
            self.num_bytes = self._host_weights.num_bytes - before
        buckets = self._host_weights.buckets
        assert buckets is not None, "a fetched version is held"
        return HostBuckets(buckets.tensors, buckets.path)

    def release(self) -> None:
        """Free the buckets, which must be unused. The next version is fetched whole."""
        self._host_weights.release()

    def close(self) -> None:
        if self._server:
            self._server.close()
        self.release()
        self._disconnect()

    def _connect(self, address: str, cancelled: Event, *, give_up_s: float | None = None) -> WeightStream:
        if address not in self._streams:
            assert self._keys is not None, "a fetcher must have the run's keys"
            self._streams[address] = WeightStream(address, keys=self._keys, give_up_s=give_up_s)
        self._streams[address].cancelled = cancelled
        return self._streams[address]

    def _disconnect(self, *, kept: Collection[str] = ()) -> None:
        for address in self._streams.keys() - set(kept):
            self._streams.pop(address).close()

    # --- from other generators -----------------------------------------------------------------------------------
    def _fetch_from_lenders(self, update: Update, source: SnapshotSource, cancelled: Event, deadline: Deadline) -> str:
        """Lender that provided the version, if any. Raises WeightTransferError when cancelled."""
        half = Deadline(deadline.left_s / 2, what=f"version {update.version} from other generators")
        for address in source.lenders if update.digests else ():
            try:
                self._fetch_from_lender(address, update, cancelled, half)
                return address
            except WeightTransferError as error:
                if cancelled.is_set():
                    raise
                log.warning("lender_failed", version=update.version, lender=address, reason=str(error))
                is_altered = isinstance(error, AlteredWeightsError)
                self.lender_errors.append(LenderError(address, str(error), is_altered))
        return ""

    def _fetch_from_lender(self, address: str, update: Update, cancelled: Event, deadline: Deadline) -> None:
        if not is_listening(address):
            raise WeightTransferError(f"no process listens at {address}")
        stream = self._connect(address, cancelled, give_up_s=_GIVE_UP_S)
        checksum, start = flat.combine(update.checksums), Deadline(_GIVE_UP_S, what="the lender to begin")
        # The lender may still be loading the previous version.
        while (version := stream.find(checksum, timeout_s=deadline.left_s)) is None:
            if start.is_over or deadline.is_over:
                raise WeightTransferError(f"the lender at {address} must begin to fetch it within {_GIVE_UP_S:g} s")
            cancelled.wait(_POLL_INTERVAL_S)
        self._read(stream, version, update, deadline, digests=update.digests)

    # --- from the learner ----------------------------------------------------------------------------------------
    def _fetch_from_learner(self, update: Update, source: SnapshotSource, cancelled: Event, deadline: Deadline) -> None:
        stream, folder = self._connect(source.address, cancelled), source.folder
        # Path.is_dir raises if a parent folder may not be searched.
        is_visible = os.path.isdir(folder)  # noqa: PTH112
        files: list[WeightFiles] = [SnapshotStore(Path(folder)), stream] if is_visible else [stream]
        # The update may arrive before the learner has written the version.
        while not self._try_files(files, update, deadline):
            if deadline.is_over:
                raise _missing_version(update, stream)
            time.sleep(_POLL_INTERVAL_S)

    def _try_files(self, sources: list[WeightFiles], update: Update, deadline: Deadline) -> bool:
        """Read the version from the first source that has it; False if none has. Raises WeightTransferError."""
        failure: WeightTransferError | None = None
        for files in sources:
            try:
                checksum = flat.combine(update.checksums)
                version = files.find(checksum, timeout_s=max(_DIAGNOSE_TIMEOUT_S, deadline.left_s))
                if version is not None:
                    self._read(files, version, update, deadline)
                    return True
            except (WeightTransferError, OSError) as error:
                # A damaged file in the folder does not affect the server.
                log.warning("weights_not_read", source=type(files).__name__, reason=str(error))
                failure = error if isinstance(error, WeightTransferError) else WeightTransferError(str(error))
        if failure:
            raise failure
        return False

    def _read(
        self, files: WeightFiles, version: int, update: Update, deadline: Deadline, *, digests: Sequence[bytes] = ()
    ) -> None:
        with_deltas = update.source is not None and update.source.has_deltas
        # In these files' numbering: the learner may have published equal weights twice.
        manifest = msgspec.structs.replace(Manifest.of(update), version=version)
        self._host_weights.update_to(
            files, manifest, with_deltas=with_deltas, timeout_s=deadline.left_s, digests=digests
        )


def _missing_version(update: Update, files: WeightFiles) -> WeightTransferError:
    after, checksums = f"within {update.timeout_s:g} s", update.checksums
    newest = files.newest(timeout_s=_DIAGNOSE_TIMEOUT_S)
    if newest is None:
        return WeightTransferError(f"it must be available {after}, got no version at all")
    manifest = snapshots.parse_manifest(files.read(newest, snapshots.MANIFEST, timeout_s=_DIAGNOSE_TIMEOUT_S))
    pairs = list(zip_longest(manifest.checksums, checksums, fillvalue=0))
    index = next((index for index, (got, expected) in enumerate(pairs) if got != expected), 0)
    return WeightTransferError(
        f"bucket {index} of {len(checksums)} must have checksum {pairs[index][1]:#018x} {after}, got "
        f"{pairs[index][0]:#018x} in the newest version {newest}; nothing was loaded"
    )
