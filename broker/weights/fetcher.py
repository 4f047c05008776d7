"""Fetcher: a generator's end of the weights that it fetches for itself, whole or as what changed since the last ones.

It reads from the learner's folder where it sees that, and else over the network. What cannot be had as a delta, for
whatever reason, is taken whole; what it returns has the checksums of the update, whichever way it came.
"""

import time
from itertools import zip_longest
from pathlib import Path
from threading import Event

import structlog

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import Update
from slipstream.broker.weights import buckets as flat
from slipstream.broker.weights import snapshot
from slipstream.broker.weights.host_weights import HostWeights
from slipstream.broker.weights.records import SnapshotSource
from slipstream.broker.weights.shared_buckets import SharedBuckets
from slipstream.broker.weights.snapshot_store import SnapshotStore, WeightFiles
from slipstream.broker.weights.stream import WeightStream
from slipstream.runtime.clock import Deadline

_LOOK_EVERY_S = 0.05
"""Between two looks whether a version has come."""
_LAST_WORD_S = 2.0
"""To find out what is there instead."""

log = structlog.get_logger(__name__)


class Fetcher:
    """Belongs to one thread."""

    def __init__(self) -> None:
        self._stream: WeightStream | None = None
        self._address = ""
        self._host_weights = HostWeights()

    @property
    def num_bytes(self) -> int:
        """What the last `fetch` read."""
        return self._host_weights.num_bytes

    def fetch(self, update: Update, *, cancelled: Event) -> SharedBuckets:
        """The version of an update that has a source, verified; good until the next call.

        `update.timeout_s` bounds it all; soon after `cancelled` is set it ends. Raises WeightTransferError.
        """
        assert update.source is not None, "what is broadcast cannot be fetched"
        deadline = Deadline(update.timeout_s, what=f"version {update.version}")
        try:
            self._bring_up(update, self._sources(update.source, cancelled), deadline)
        except WeightTransferError as fault:
            raise WeightTransferError(f"version {update.version} could not be fetched: {fault}") from fault
        buckets = self._host_weights.buckets
        assert buckets is not None, "what was brought up is held"
        if buckets.sizes != update.bucket_bytes:
            raise WeightTransferError(
                f"buckets must have the announced sizes {update.bucket_bytes}, got {buckets.sizes}"
            )
        return buckets

    def release(self) -> None:
        """Free the memory, once the buckets are no longer used; the next version comes whole."""
        self._host_weights.release()

    def close(self) -> None:
        """Let everything go. May be called again."""
        self.release()
        self._disconnect()

    def _sources(self, source: SnapshotSource, cancelled: Event) -> list[WeightFiles]:
        """Nearest first."""
        address = f"tcp://{source.host}:{source.port}"
        if self._stream is None or address != self._address:
            self._disconnect()
            self._stream, self._address = WeightStream(address), address
        self._stream.cancelled = cancelled
        folder = Path(source.folder)
        return [SnapshotStore(folder), self._stream] if _is_visible(folder) else [self._stream]

    def _disconnect(self) -> None:
        if self._stream:
            self._stream.close()
            self._stream = None

    def _bring_up(self, update: Update, sources: list[WeightFiles], deadline: Deadline) -> None:
        wanted = flat.combine(update.checksums)
        if self._host_weights.checksum == wanted:
            return
        while not self._has_come(wanted, update, sources, deadline):
            if deadline.is_over:
                raise _not_there(update, sources[-1])
            time.sleep(_LOOK_EVERY_S)

    def _has_come(self, wanted: str, update: Update, sources: list[WeightFiles], deadline: Deadline) -> bool:
        """Take the version from the first that has it whole; False when none has it. Raises WeightTransferError."""
        fault: WeightTransferError | None = None
        for files in sources:
            try:
                version = files.find(wanted, timeout_s=max(_LAST_WORD_S, deadline.left_s))
                if version is not None:
                    self._take(files, version, update, deadline)
                    return True
            except (WeightTransferError, OSError) as error:
                log.warning("weights_not_read", source=type(files).__name__, reason=str(error))
                fault = error if isinstance(error, WeightTransferError) else WeightTransferError(str(error))
        if fault:
            raise fault
        return False

    def _take(self, files: WeightFiles, version: int, update: Update, deadline: Deadline) -> None:
        with_deltas = update.source is not None and update.source.has_deltas
        self._host_weights.update_to(
            files, version, slots=update.slots, with_deltas=with_deltas, timeout_s=deadline.left_s
        )


def _is_visible(folder: Path) -> bool:
    """Also one whose parents may not be searched is not."""
    try:
        return folder.is_dir()
    except OSError:
        return False


def _not_there(update: Update, files: WeightFiles) -> WeightTransferError:
    """Says how the newest version differs from the one that was announced."""
    after, checksums = f"within {update.timeout_s:g} s", update.checksums
    newest = files.newest(timeout_s=_LAST_WORD_S)
    if newest is None:
        return WeightTransferError(f"it must be there {after}, got none at all")
    manifest = snapshot.parse_manifest(files.read(newest, snapshot.MANIFEST, timeout_s=_LAST_WORD_S))
    pairs = list(zip_longest(manifest.checksums, checksums, fillvalue=0))
    index = next((index for index, (got, wanted) in enumerate(pairs) if got != wanted), 0)
    return WeightTransferError(
        f"bucket {index} of {len(checksums)} must have checksum {pairs[index][1]:#018x} {after}, got "
        f"{pairs[index][0]:#018x} in version {newest}, the newest there; nothing was loaded"
    )
