"""HostWeights: a version of the weights in host memory, updated to later versions by deltas or whole snapshots."""

from collections.abc import Sequence

import msgspec
import structlog
from torch import Tensor

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import TensorSlot
from slipstream.broker.weights import snapshot
from slipstream.broker.weights.delta import Delta, apply
from slipstream.broker.weights.shared_buckets import SharedBuckets
from slipstream.broker.weights.snapshot import MANIFEST, Manifest
from slipstream.broker.weights.snapshot_store import DELTA, WeightFiles, delta_name

_MAX_DELTAS = 16
"""Length of a chain of deltas above which the snapshot is fetched."""

log = structlog.get_logger(__name__)


class HostWeights:
    """Flat buckets, complete and verified while `checksum` is not empty. Belongs to one thread."""

    def __init__(self) -> None:
        self.buckets: SharedBuckets | None = None
        """Updated in place; None while no memory is allocated."""
        self.checksum = ""
        """Combined checksum of the held version; empty while the buckets hold no complete version."""
        self.num_bytes = 0
        """Bytes read by the last `update_to`."""

    def update_to(
        self, files: WeightFiles, version: int, *, slots: Sequence[TensorSlot], with_deltas: bool, timeout_s: float
    ) -> None:
        """Update to a version: by a chain of deltas if one exists and is smaller, else from its snapshot.

        `timeout_s` bounds each file. Raises WeightTransferError; no version is held then.
        """
        self.num_bytes = 0
        manifest = snapshot.parse_manifest(self._read(files, version, MANIFEST, timeout_s=timeout_s))
        snapshot.check_layout(manifest, slots)
        if with_deltas and self.checksum and self._apply_deltas(files, manifest, timeout_s=timeout_s):
            return
        # Cleared while the buckets are overwritten: a failure in between must not leave them labelled as a version.
        self.checksum = ""
        self._allocate(manifest.bucket_bytes)
        for index in range(len(self.tensors)):
            self._read_bucket(files, version, index, timeout_s=timeout_s)
            snapshot.check_bucket(manifest, index, self.tensors[index])
        self.checksum = manifest.checksum

    def release(self) -> None:
        """Free the memory; no version is held then."""
        if self.buckets:
            self.buckets.close()
        self.buckets, self.checksum = None, ""

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors of the buckets; empty without memory."""
        return self.buckets.tensors if self.buckets else []

    def _allocate(self, sizes: list[int]) -> None:
        if self.buckets is None or self.buckets.sizes != sizes:
            self.release()
            self.buckets = SharedBuckets(sizes)

    def _apply_deltas(self, files: WeightFiles, manifest: Manifest, *, timeout_s: float) -> bool:
        """Update by deltas; False if no chain leads to the version, or one of them could not be applied."""
        try:
            deltas = self._chain(files, manifest, timeout_s=timeout_s)
            self.checksum = ""
            for index in range(len(self.tensors)):
                self._update_bucket(files, deltas, index, timeout_s=timeout_s)
                snapshot.check_bucket(manifest, index, self.tensors[index])
        except WeightTransferError as error:
            log.info("delta_not_applied", version=manifest.version, reason=str(error))
            return False
        self.checksum = manifest.checksum
        return True

    def _chain(self, files: WeightFiles, manifest: Manifest, *, timeout_s: float) -> list[Delta]:
        """Return the deltas from the held version to this one, in order. Raises WeightTransferError."""
        deltas: list[Delta] = []
        version, checksum = manifest.version, manifest.checksum
        while not deltas or checksum != self.checksum:
            delta = _parse(self._read(files, version, DELTA, timeout_s=timeout_s))
            if (delta.version, delta.checksum, len(delta.buckets)) != (version, checksum, len(self.tensors)):
                raise WeightTransferError(
                    f"a delta must lead to version {version} with checksum {checksum} and {len(self.tensors)} buckets, "
                    f"got one to version {delta.version} with {delta.checksum} and {len(delta.buckets)}"
                )
            deltas.insert(0, delta)
            version, checksum = delta.base_version, delta.base_checksum
            # A longer chain costs more than the snapshot it replaces.
            if len(deltas) == _MAX_DELTAS or sum(each.size_bytes for each in deltas) >= sum(manifest.bucket_bytes):
                break
        deltas[0].check_base(self.checksum)
        return deltas

    def _update_bucket(self, files: WeightFiles, deltas: Sequence[Delta], index: int, *, timeout_s: float) -> None:
        # The last delta that replaces the bucket whole makes all earlier ones unnecessary.
        full = [i for i, delta in enumerate(deltas) if delta.buckets[index].is_full]
        if full:
            self._read_bucket(files, deltas[full[-1]].version, index, timeout_s=timeout_s)
        for delta in deltas[full[-1] + 1 if full else 0 :]:
            entry = delta.buckets[index]
            is_changed = entry.size_bytes > 0
            payload = self._read(files, delta.version, delta_name(index), timeout_s=timeout_s) if is_changed else b""
            apply(entry, payload, onto=self.tensors[index])

    def _read_bucket(self, files: WeightFiles, version: int, index: int, *, timeout_s: float) -> None:
        bucket = memoryview(self.tensors[index].numpy())
        files.read_into(version, snapshot.bucket_name(index), bucket, timeout_s=timeout_s)
        self.num_bytes += len(bucket)

    def _read(self, files: WeightFiles, version: int, name: str, *, timeout_s: float) -> bytes:
        content = files.read(version, name, timeout_s=timeout_s)
        self.num_bytes += len(content)
        return content


def _parse(content: bytes) -> Delta:
    try:
        return msgspec.json.decode(content, type=Delta)
    except msgspec.DecodeError as error:
        raise WeightTransferError(f"the {DELTA} of a version must be readable, got {error}") from error
