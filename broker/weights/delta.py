"""Deltas: lossless, compressed differences between two versions of a bucket, element by element.

A bucket is split into blocks, which bounds memory. A block's payload consists of

    gaps    number of unchanged elements before each changed one: the sum of any number of bytes 255 and a final lower
            byte
    steps   new - old as wrapping integers of the element's width, with the sign in the lowest bit; in byte planes: the
            lowest byte of every step first, then the next bytes

compressed together by zstd. A small learning rate usually moves a weight to the adjacent number, a step of 1 at any
magnitude. Integers reproduce every bit pattern, including NaNs.
"""

import itertools
from collections.abc import Sequence
from typing import Annotated

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
import xxhash
from msgspec import Meta
from torch import Tensor

from slipstream.broker.errors import AlteredWeightsError, WeightTransferError
from slipstream.broker.messages import TensorSlot
from slipstream.configs.base import Record

BLOCK_ELEMENTS = 2**20
_WIDTHS = (8, 4, 2, 1)
_CONTINUED = 255
"""Byte of a gap that continues in the next byte."""
_ZSTD_LEVEL = 1
"""Higher levels take many times longer and save a few percent: the steps are nearly random."""

Count = Annotated[int, Meta(ge=0)]
Bytes = npt.NDArray[np.uint8]
Elements = npt.NDArray[np.unsignedinteger]


class Block(Record, array_like=True):
    """A block of a payload. Example: Block(num_changed=5120, num_gap_bytes=5133, num_bytes=6011)."""

    num_changed: Count
    """Elements that differ; without any, the block has no bytes."""
    num_gap_bytes: Count
    """Size of the gaps before compression."""
    num_bytes: Count
    """Gaps and steps after compression."""


class BucketDelta(Record):
    """Delta of one bucket. Example: BucketDelta(size_bytes=6011, width=2, blocks=[...], checksum=7)."""

    size_bytes: Count
    """Bytes of the payload, or of the whole bucket."""
    is_full: bool = False
    """Whether the whole bucket is transferred, because that is not larger."""
    width: Annotated[int, Meta(ge=1, le=8)] = 1
    """Bytes of one element."""
    blocks: list[Block] = []
    checksum: int = 0
    """xxh3-64 of the payload."""


class Delta(Record):
    """Delta from one version to a later one.

    Example: Delta(version=13, checksum="ab12...", base_version=12, base_checksum="cd34...", buckets=[...])
    """

    version: int
    checksum: str
    """Combined checksum of all buckets."""
    base_version: int
    base_checksum: str
    buckets: list[BucketDelta]

    @property
    def size_bytes(self) -> int:
        return sum(bucket.size_bytes for bucket in self.buckets)

    def check_base(self, held_checksum: str) -> None:
        """Raise WeightTransferError unless the held weights are the base."""
        if held_checksum != self.base_checksum:
            raise WeightTransferError(
                f"the delta to version {self.version} must be applied to version {self.base_version} with checksum "
                f"{self.base_checksum}, got weights with checksum {held_checksum or '(none held)'}: fetch the snapshot"
            )


def width_of(bucket: int, slots: Sequence[TensorSlot]) -> int:
    """Return the bytes of the smallest element in a bucket."""
    return min((getattr(torch, slot.dtype).itemsize for slot in slots if slot.bucket == bucket), default=1)


def encode(base: Tensor, new: Tensor, *, width: int) -> tuple[BucketDelta, bytes]:
    """Encode the change from `base` to `new`, uint8 on the CPU; returns the delta and its payload (empty if full).

    Raises WeightTransferError if the sizes differ.
    """
    before, after = _elements(base, width), _elements(new, width)
    if len(before) != len(after):
        sizes = f"{base.numel()} and {new.numel()}"
        raise WeightTransferError(f"both versions of a bucket must have the same size, got {sizes}")
    blocks: list[Block] = []
    parts: list[bytes] = []
    for start in range(0, len(after), BLOCK_ELEMENTS):
        block, part = _encode_block(before[start : start + BLOCK_ELEMENTS], after[start : start + BLOCK_ELEMENTS])
        blocks.append(block)
        parts.append(part)
        # The payload is already as large as the bucket.
        if sum(map(len, parts)) >= new.numel():
            return BucketDelta(new.numel(), is_full=True), b""
    payload = b"".join(parts)
    return BucketDelta(len(payload), False, width, blocks, xxhash.xxh3_64_intdigest(payload)), payload


def apply(delta: BucketDelta, payload: bytes, *, onto: Tensor) -> None:
    """Apply a delta in place to a uint8 CPU bucket. Raises AlteredWeightsError, leaving it undefined."""
    if len(payload) != delta.size_bytes or xxhash.xxh3_64_intdigest(payload) != delta.checksum:
        raise AlteredWeightsError(
            f"a delta must arrive as it was sent ({delta.size_bytes} bytes with checksum {delta.checksum:#018x}), "
            f"got {len(payload)} bytes with checksum {xxhash.xxh3_64_intdigest(payload):#018x}"
        )
    # The base needs no check, because the caller verifies the result.
    elements = _elements(onto, delta.width)
    starts = range(0, len(elements), BLOCK_ELEMENTS)
    ends = list(itertools.accumulate((block.num_bytes for block in delta.blocks), initial=0))
    if len(delta.blocks) != len(starts) or ends[-1] != len(payload):
        raise _damaged(f"{len(starts)} blocks in {len(payload)} bytes", f"{len(delta.blocks)} in {ends[-1]}")
    for start, block, (begin, end) in zip(starts, delta.blocks, itertools.pairwise(ends), strict=True):
        _apply_block(block, payload[begin:end], onto=elements[start : start + BLOCK_ELEMENTS])


def _encode_block(before: Elements, after: Elements) -> tuple[Block, bytes]:
    changed = np.flatnonzero(before != after)
    if not len(changed):
        return Block(0, 0, 0), b""
    gaps = _pack_gaps(np.diff(changed, prepend=-1) - 1)
    steps = _fold_sign(after[changed] - before[changed])
    planes = np.ascontiguousarray(steps.view(np.uint8).reshape(len(steps), -1).T)
    compressed = _codec().compress(gaps.tobytes() + planes.tobytes(), asbytes=True)
    return Block(len(changed), len(gaps), len(compressed)), compressed


def _apply_block(block: Block, part: bytes, *, onto: Elements) -> None:
    if block.num_changed == 0:
        return
    width = onto.dtype.itemsize
    # Before allocating: the numbers come from another process.
    if block.num_changed > len(onto) or block.num_gap_bytes > block.num_changed + len(onto) // _CONTINUED:
        raise _damaged(f"at most {len(onto)} changes in a block", f"{block.num_changed} in {block.num_gap_bytes} bytes")
    size_bytes = block.num_gap_bytes + width * block.num_changed
    try:
        plain: Bytes = np.frombuffer(_codec().decompress(part, decompressed_size=size_bytes), dtype=np.uint8)
    except (pa.ArrowException, OSError, ValueError) as error:
        got = f"bytes that zstd cannot decompress: {error}"
        raise AlteredWeightsError(f"a delta must be readable, got {got}") from error
    changed = _unpack_gaps(plain[: block.num_gap_bytes])
    if len(changed) != block.num_changed or changed[-1] >= len(onto):
        raise _damaged(f"{block.num_changed} indices below {len(onto)}", f"{len(changed)}")
    planes = plain[block.num_gap_bytes :].reshape(width, block.num_changed)
    onto[changed] += _unfold_sign(np.ascontiguousarray(planes.T).view(onto.dtype).reshape(-1))


def _pack_gaps(gaps: npt.NDArray[np.int64]) -> Bytes:
    far, rest = np.divmod(gaps, _CONTINUED)
    ends = np.cumsum(far + 1) - 1
    packed = np.full(ends[-1] + 1, _CONTINUED, dtype=np.uint8)
    packed[ends] = rest
    return packed


def _unpack_gaps(packed: Bytes) -> npt.NDArray[np.int64]:
    ends = np.flatnonzero(packed != _CONTINUED)
    return np.cumsum(packed, dtype=np.int64)[ends] + np.arange(len(ends))


def _fold_sign(steps: Elements) -> Elements:
    """Map 1, -1, 2, -2, ... to 2, 1, 4, 3, ..., so that the high bytes of small steps are zero."""
    return (steps << 1) ^ np.negative(steps >> (8 * steps.dtype.itemsize - 1))


def _unfold_sign(folded: Elements) -> Elements:
    return (folded >> 1) ^ np.negative(folded & 1)


def _elements(bucket: Tensor, width: int) -> Elements:
    if width not in _WIDTHS or bucket.numel() % width:
        raise _damaged(f"elements of 1, 2, 4 or 8 bytes in a bucket of {bucket.numel()}", f"{width}")
    return bucket.numpy().view(f"<u{width}")


def _codec() -> pa.Codec:
    return pa.Codec("zstd", compression_level=_ZSTD_LEVEL)


def _damaged(expected: str, got: str) -> AlteredWeightsError:
    return AlteredWeightsError(f"a delta must have {expected}, got {got}: it is damaged or of another model")
