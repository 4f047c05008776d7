"""HostWeights: the version of the weights that a generator has in host memory, and how it gets from there to another."""

from collections.abc import Sequence

import msgspec
import structlog
from torch import Tensor

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.weights import delta, snapshot
from slipstream.broker.weights.delta import Delta
from slipstream.broker.weights.records import TensorSlot
from slipstream.broker.weights.shared_buckets import SharedBuckets
from slipstream.broker.weights.snapshot import MANIFEST, Manifest
from slipstream.broker.weights.snapshot_store import DELTA, WeightFiles, delta_name

_MAX_STEPS = 16
"""Longest chain of deltas."""

log = structlog.get_logger(__name__)


class HostWeights:
    """Flat buckets that are whole and verified while `checksum` is not empty. Belongs to one thread."""

    def __init__(self) -> None:
        self.buckets: SharedBuckets | None = None
        """Changed in place."""
        self.checksum = ""
        """Of all of them. Empty: they are of no version."""
        self.num_bytes = 0
        """What the last `update_to` took from files."""

    def update_to(
        self, files: WeightFiles, version: int, *, slots: Sequence[TensorSlot], with_deltas: bool, timeout_s: float
    ) -> None:
        """Become this version: by deltas from what is held, where they lead there and are smaller, else as a whole.

        `timeout_s` is for each file. Raises WeightTransferError; then nothing is held.
        """
        self.num_bytes = 0
        manifest = snapshot.parse_manifest(self._read(files, version, MANIFEST, timeout_s=timeout_s))
        snapshot.check_layout(manifest, slots)
        if with_deltas and self.checksum and self._has_stepped(files, manifest, timeout_s=timeout_s):
            return
        self.checksum = ""
        self._allocate(manifest.bucket_bytes)
        for index in range(len(self.tensors)):
            self._take_bucket(files, version, index, timeout_s=timeout_s)
            snapshot.check_bucket(manifest, index, self.tensors[index])
        self.checksum = manifest.checksum

    def release(self) -> None:
        """Hold nothing."""
        if self.buckets:
            self.buckets.close()
        self.buckets, self.checksum = None, ""

    @property
    def tensors(self) -> list[Tensor]:
        """Of the buckets; none when nothing is held."""
        return self.buckets.tensors if self.buckets else []

    def _allocate(self, sizes: list[int]) -> None:
        if self.buckets is None or self.buckets.sizes != sizes:
            self.release()
            self.buckets = SharedBuckets(sizes)

    def _has_stepped(self, files: WeightFiles, manifest: Manifest, *, timeout_s: float) -> bool:
        """False when no chain of deltas leads to the version, or it broke."""
        try:
            steps = self._chain(files, manifest, timeout_s=timeout_s)
            self.checksum = ""
            for index in range(len(self.tensors)):
                self._step_bucket(files, steps, index, timeout_s=timeout_s)
                snapshot.check_bucket(manifest, index, self.tensors[index])
        except WeightTransferError as fault:
            log.info("delta_not_taken", version=manifest.version, reason=str(fault))
            return False
        self.checksum = manifest.checksum
        return True

    def _chain(self, files: WeightFiles, manifest: Manifest, *, timeout_s: float) -> list[Delta]:
        """The deltas from what is held to the version, in order. Raises WeightTransferError."""
        steps: list[Delta] = []
        version, checksum = manifest.version, manifest.checksum
        while not steps or checksum != self.checksum:
            step = _parse(self._read(files, version, DELTA, timeout_s=timeout_s))
            if (step.version, step.checksum, len(step.buckets)) != (version, checksum, len(self.tensors)):
                raise WeightTransferError(
                    f"a delta to version {version} with checksum {checksum} and {len(self.tensors)} buckets was asked "
                    f"for, got one to version {step.version} with {step.checksum} and {len(step.buckets)}"
                )
            steps.insert(0, step)
            version, checksum = step.base_version, step.base_checksum
            if len(steps) == _MAX_STEPS or sum(s.size_bytes for s in steps) >= sum(manifest.bucket_bytes):
                break
        steps[0].check_base(self.checksum)
        return steps

    def _step_bucket(self, files: WeightFiles, steps: Sequence[Delta], index: int, *, timeout_s: float) -> None:
        whole = [place for place, step in enumerate(steps) if step.buckets[index].is_full]
        if whole:
            self._take_bucket(files, steps[whole[-1]].version, index, timeout_s=timeout_s)
        for step in steps[whole[-1] + 1 if whole else 0 :]:
            entry = step.buckets[index]
            is_changed = entry.size_bytes > 0
            name = delta_name(index)
            payload = self._read(files, step.version, name, timeout_s=timeout_s) if is_changed else b""
            delta.apply(entry, payload, onto=self.tensors[index])

    def _take_bucket(self, files: WeightFiles, version: int, index: int, *, timeout_s: float) -> None:
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
