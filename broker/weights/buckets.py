"""Flat buckets: pack named tensors into a few contiguous byte buffers, and unpack them without copying.

`Update` carries the layout, a weight transport the bytes. Checksums include the gaps between tensors.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
import xxhash
from torch import Tensor

from slipstream.broker.errors import AlteredWeightsError, WeightTransferError
from slipstream.broker.messages import TensorSlot

ALIGNMENT_BYTES = 64
"""Alignment of every tensor, so that any dtype can be viewed in place."""

SLOWEST_BYTES_PER_S = 1e8
"""Rate below which an update counts as hung. Loading and comparing it on two busy cores reaches 1.5e8, page-locking its
memory 1e9."""

TensorMeta = tuple[str, Sequence[int], torch.dtype]
"""Name, shape and dtype on the wire."""


def plan(tensors: Iterable[TensorMeta], *, bucket_bytes: int) -> tuple[list[TensorSlot], list[int]]:
    """Lay out tensors in order; returns their slots and the size of each bucket in bytes.

    A bucket ends where the next tensor would exceed `bucket_bytes`; a larger tensor gets its own. Raises
    WeightTransferError for a repeated name.
    """
    slots: list[TensorSlot] = []
    sizes: list[int] = []
    for name, shape, dtype in tensors:
        num_bytes = math.prod(shape) * dtype.itemsize
        offset = -(-sizes[-1] // ALIGNMENT_BYTES) * ALIGNMENT_BYTES if sizes else 0
        if not sizes or (sizes[-1] > 0 and offset + num_bytes > bucket_bytes):
            sizes.append(0)
            offset = 0
        slots.append(TensorSlot(name, list(shape), dtype_name(dtype), len(sizes) - 1, offset))
        sizes[-1] = offset + num_bytes
    if repeated := [name for name, count in Counter(slot.name for slot in slots).items() if count > 1]:
        raise WeightTransferError(f"tensor names must be unique, got repeated: {_first(repeated)}")
    return slots, sizes


@torch.no_grad()
def pack(tensors: Iterable[tuple[str, Tensor]], slots: Sequence[TensorSlot], *, into: Sequence[Tensor]) -> None:
    """Copy tensors, in any order, into their slots of uint8 buckets, cast to the slots' dtypes.

    Raises WeightTransferError unless every slot is filled once.
    """
    is_queued = False
    open_slots = {slot.name: slot for slot in slots}
    for name, tensor in tensors:
        slot = open_slots.pop(name, None)
        if slot is None or list(tensor.shape) != slot.shape:
            planned = "no further slot" if slot is None else f"shape {slot.shape}"
            must = f"tensor {name} must match the plan, which has {planned}"
            raise WeightTransferError(f"{must}, got shape {list(tensor.shape)}")
        # A copy into page-locked buckets overlaps with gathering the next tensor.
        _view(into, slot).copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        is_queued = tensor.is_cuda and not into[0].is_cuda
    if open_slots:
        raise WeightTransferError(f"every planned tensor must be packed: {_first(open_slots)} not given")
    if is_queued:
        torch.cuda.current_stream().synchronize()


def unpack(buckets: Sequence[Tensor], slots: Sequence[TensorSlot]) -> list[tuple[str, Tensor]]:
    """Return named views into the buckets, in slot order. Raises WeightTransferError for an invalid slot."""
    return [(slot.name, _view(buckets, slot)) for slot in slots]


def checksums(buckets: Iterable[Tensor]) -> list[int]:
    """Return the xxh3-64 of each bucket's bytes."""
    return [xxhash.xxh3_64_intdigest(bucket.detach().contiguous().numpy()) for bucket in buckets]


def combine(checksums: Sequence[int]) -> str:
    """Return one checksum for all buckets, 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(b"".join(checksum.to_bytes(8, "little") for checksum in checksums))


def verify(buckets: Sequence[Tensor], *, expected: Sequence[int]) -> None:
    """Raise WeightTransferError, naming the bucket, unless all checksums match."""
    if len(buckets) != len(expected):
        raise WeightTransferError(f"an update must have one checksum per bucket ({len(buckets)}), got {len(expected)}")
    for index, bucket in enumerate(buckets):
        check_bucket(bucket, index, expected=expected)


def check_bucket(bucket: Tensor, index: int, *, expected: Sequence[int]) -> None:
    """Raise AlteredWeightsError unless the bucket's checksum equals `expected[index]`."""
    (got,) = checksums([bucket])
    if got != expected[index]:
        must = f"bucket {index} of {len(expected)} must have checksum {expected[index]:#018x}"
        raise AlteredWeightsError(f"{must}, got {got:#018x}: it is damaged; nothing was loaded")


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name on the wire, like `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def _view(buckets: Sequence[Tensor], slot: TensorSlot) -> Tensor:
    # Slots come from the wire.
    if not 0 <= slot.bucket < len(buckets):
        must = f"tensor {slot.name} must be in one of {len(buckets)} buckets"
        raise WeightTransferError(f"{must}, got bucket {slot.bucket}")
    bucket, dtype = buckets[slot.bucket], getattr(torch, slot.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightTransferError(f"tensor {slot.name} must have a torch dtype, got {slot.dtype!r}")
    end = slot.offset + math.prod(slot.shape) * dtype.itemsize
    if slot.offset < 0 or slot.offset % ALIGNMENT_BYTES or min(slot.shape, default=0) < 0 or end > bucket.numel():
        raise WeightTransferError(
            f"tensor {slot.name} must start at a multiple of {ALIGNMENT_BYTES} and end within bucket {slot.bucket} "
            f"({bucket.numel()} bytes), got bytes {slot.offset} to {end}"
        )
    return bucket[slot.offset : end].view(dtype).view(slot.shape)


def _first(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")
