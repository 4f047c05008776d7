"""HostWeights: a version of the weights in host memory, updated by deltas or whole snapshots.

A generator can lend a version while it arrives: each bucket once verified, the deltas once all buckets are. A lender
sends only verified bytes, so wrong bytes are its fault. Lending only keeps the deltas of two versions.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

import msgspec
import structlog
from blake3 import blake3
from torch import Tensor

from slipstream.broker.errors import AlteredWeightsError, NotYetError, WeightTransferError
from slipstream.broker.weights import buckets as flat
from slipstream.broker.weights import snapshots as snapshot
from slipstream.broker.weights.delta import Delta, apply
from slipstream.broker.weights.shared_buckets import SharedBuckets
from slipstream.broker.weights.snapshots import DELTA, Manifest, WeightFiles, delta_name
from slipstream.runtime.clock import Deadline

_MAX_DELTAS = 16
"""Maximum length of a delta chain."""
_DELTAS_LENT = 2
"""Newest versions with deltas kept for lending."""
_BUCKET = re.compile(r"bucket-(\d{4,6})\.bin")

log = structlog.get_logger(__name__)

DeltaFiles = dict[tuple[int, str], bytes]
"""(version, name) -> content."""


class HostWeights:
    """Flat buckets, each verified or being overwritten. One thread updates them; others may use it as ServedFiles.

    After a failure, another source continues without reading verified buckets again.
    """

    def __init__(self) -> None:
        self.buckets: SharedBuckets | None = None
        """Updated in place; None while no memory is allocated."""
        self.num_bytes = 0
        """Bytes read so far."""
        self._held: list[int | None] = []
        """Checksum of each bucket; None while it is overwritten."""
        self._base: list[int] = []
        """Bucket checksums of the last complete version, the base of deltas."""
        self._target = ""
        self._source: WeightFiles | None = None
        self._num_arrived = 0
        """Bytes received over a network, except from `_source`."""
        # Prevents lent bytes from being overwritten while they are copied.
        self._lock = Lock()
        self._lent: Manifest | None = None
        self._is_arriving = self._deltas_may_come = False
        self._lent_deltas: DeltaFiles = {}

    @property
    def checksum(self) -> str:
        """Combined checksum of the buckets; empty while one is incomplete."""
        held = [checksum for checksum in self._held if checksum is not None]
        return flat.combine(held) if held and len(held) == len(self._held) else ""

    @property
    def tensors(self) -> list[Tensor]:
        return self.buckets.tensors if self.buckets else []

    def release(self) -> None:
        with self._lock:
            self._lent = None
            self._free()

    def _free(self) -> None:
        if self.buckets:
            self.buckets.close()
        self.buckets, self._held, self._lent_deltas = None, [], {}

    # --- updating ------------------------------------------------------------------------------------------------
    def update_to(
        self,
        files: WeightFiles,
        manifest: Manifest,
        *,
        with_deltas: bool,
        timeout_s: float,
        digests: Sequence[bytes] = (),
    ) -> None:
        """Update to the manifest's version, by a smaller chain of deltas if any, else by whole buckets.

        `timeout_s` limits the whole call. `digests`: BLAKE3 of each bucket, for a lender's files; a lender must have
        the deltas, since the learner has them. Raises WeightTransferError.
        """
        deadline = Deadline(timeout_s, what=f"the weights of version {manifest.version}")
        self._num_arrived, self._source = self._progress - files.num_arrived, files
        if manifest.checksum != self._target:
            self._target = manifest.checksum
            self._base = [checksum for checksum in self._held if checksum is not None]
        if with_deltas and len(self._base) == len(self._held) > 0:
            try:
                self._apply_deltas(files, manifest, deadline=deadline, digests=digests)
                return
            except WeightTransferError as error:
                if digests:
                    raise
                log.info("delta_not_applied", version=manifest.version, reason=str(error))
        self._deltas_may_come = False
        if self.buckets is None or self.buckets.sizes != manifest.bucket_bytes:
            # Lending continues: until then, requests get NotYetError.
            with self._lock:
                self._free()
            fresh = SharedBuckets(manifest.bucket_bytes)
            with self._lock:
                self.buckets, self._held = fresh, [None] * len(manifest.bucket_bytes)
        for index in self._outdated(manifest):
            with self._replacing(index, manifest, digests):
                self._read_bucket(files, manifest.version, index, deadline=deadline)

    def _outdated(self, manifest: Manifest) -> Iterator[int]:
        return (index for index, checksum in enumerate(manifest.checksums) if self._held[index] != checksum)

    @contextmanager
    def _replacing(self, index: int, manifest: Manifest, digests: Sequence[bytes]) -> Iterator[None]:
        """Verify a bucket after the block has overwritten it. Raises AlteredWeightsError."""
        with self._lock:
            self._held[index] = None
        yield
        flat.check_bucket(self.tensors[index], index, expected=manifest.checksums)
        # xxh3 detects damage but can be forged.
        if digests and digest(self.tensors[index]) != digests[index]:
            raise AlteredWeightsError(f"bucket {index} of version {manifest.version} must have the learner's digest")
        with self._lock:
            self._held[index] = manifest.checksums[index]

    def _apply_deltas(
        self, files: WeightFiles, manifest: Manifest, *, deadline: Deadline, digests: Sequence[bytes]
    ) -> None:
        read: DeltaFiles = {}
        deltas = self._chain(files, manifest, read, deadline=deadline)
        for index in self._outdated(manifest):
            # A bucket that failed before, or that a delta replaces, is read whole.
            full = [delta.version for delta in deltas if delta.buckets[index].is_full]
            whole = manifest.version if self._held[index] != self._base[index] else max(full, default=None)
            later = [delta for delta in deltas if whole is None or delta.version > whole]
            payloads = [
                self._read(files, delta.version, delta_name(index), read, deadline=deadline)
                if delta.buckets[index].size_bytes > 0
                else b""
                for delta in later
            ]
            with self._replacing(index, manifest, digests):
                if whole is not None:
                    self._read_bucket(files, whole, index, deadline=deadline)
                for delta, payload in zip(later, payloads, strict=True):
                    apply(delta.buckets[index], payload, onto=self.tensors[index])
        if self._lent:
            self._lend_deltas(read)

    def _chain(self, files: WeightFiles, manifest: Manifest, read: DeltaFiles, *, deadline: Deadline) -> list[Delta]:
        """Return the deltas from the base, in order. Raises WeightTransferError if no chain leads there."""
        deltas: list[Delta] = []
        base = flat.combine(self._base)
        version, checksum = manifest.version, manifest.checksum
        while not deltas or checksum != base:
            content = self._read(files, version, DELTA, read, deadline=deadline)
            try:
                delta = msgspec.json.decode(content, type=Delta)
            except ValueError as error:
                raise AlteredWeightsError(f"the {DELTA} of a version must be readable, got {error}") from error
            if (delta.version, delta.checksum, len(delta.buckets)) != (version, checksum, len(self.tensors)):
                raise AlteredWeightsError(
                    f"a delta must lead to version {version} with checksum {checksum} and {len(self.tensors)} buckets, "
                    f"got one to version {delta.version} with {delta.checksum} and {len(delta.buckets)}"
                )
            deltas.insert(0, delta)
            version, checksum = delta.base_version, delta.base_checksum
            # Beyond this, the snapshot is cheaper.
            if len(deltas) == _MAX_DELTAS or sum(each.size_bytes for each in deltas) >= sum(manifest.bucket_bytes):
                break
        deltas[0].check_base(base)
        return deltas

    def _read_bucket(self, files: WeightFiles, version: int, index: int, *, deadline: Deadline) -> None:
        bucket = memoryview(self.tensors[index].numpy())
        files.read_into(version, snapshot.bucket_name(index), bucket, timeout_s=deadline.left_s)
        self.num_bytes += len(bucket)

    def _read(self, files: WeightFiles, version: int, name: str, read: DeltaFiles, *, deadline: Deadline) -> bytes:
        content = files.read(version, name, timeout_s=deadline.left_s)
        self.num_bytes += len(content)
        if self._lent:
            read[version, name] = content
        return content

    # --- lending -------------------------------------------------------------------------------------------------
    @contextmanager
    def lending(self, manifest: Manifest | None, *, with_deltas: bool = False) -> Iterator[None]:
        """Lend the version that the block fetches, until the next call; None: lend nothing."""
        with self._lock:
            self._lent, self._is_arriving = manifest, True
            self._deltas_may_come = with_deltas and self.checksum != ""
            if manifest is None:
                self._lent_deltas = {}
        try:
            yield
        except BaseException:
            self._lent = None
            raise
        finally:
            self._is_arriving = self._deltas_may_come = False

    def find(self, checksum: str) -> int | None:
        lent = self._lent
        return lent.version if lent and lent.checksum == checksum else None

    def newest(self) -> int | None:
        lent = self._lent
        return lent.version if lent else None

    def size_bytes(self, version: int, name: str) -> int:
        with self._lock:
            return len(self._lent_bytes(version, name))

    def read_part(self, version: int, name: str, *, offset: int, num_bytes: int) -> bytes:
        with self._lock:
            return bytes(self._lent_bytes(version, name)[offset : offset + num_bytes])

    def _lent_bytes(self, version: int, name: str) -> memoryview:
        if (content := self._lent_deltas.get((version, name))) is not None:
            return memoryview(content)
        lent = self._lent
        if lent and lent.version == version:
            bucket = _BUCKET.fullmatch(name)
            index = int(bucket[1]) if bucket else len(lent.checksums)
            if index < min(len(self._held), len(lent.checksums)) and self._held[index] == lent.checksums[index]:
                return memoryview(self.tensors[index].numpy())
            if self._is_arriving and (bool(bucket) or self._deltas_may_come):
                raise NotYetError(self._progress)
        got = f"version {lent.version}" if lent else "nothing"
        raise WeightTransferError(f"{name} of version {version} must be lent here, got {got}")

    @property
    def _progress(self) -> int:
        """Counter that grows while a version arrives, even within a bucket."""
        return self._num_arrived + (self._source.num_arrived if self._source else 0)

    def _lend_deltas(self, read: DeltaFiles) -> None:
        with self._lock:
            known = self._lent_deltas | read
            newest = sorted({version for version, _ in known})[-_DELTAS_LENT:]
            self._lent_deltas = {key: content for key, content in known.items() if key[0] in newest}


def digest(bucket: Tensor) -> bytes:
    """Return a bucket's BLAKE3, computed on all cores."""
    return blake3(bucket.numpy().data, max_threads=blake3.AUTO).digest()
