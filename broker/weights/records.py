"""Records of the weight plane: transports, the layout of tensors in buckets, the location of a snapshot."""

from typing import Literal

import msgspec

from slipstream.buffer.trajectory import Record

WeightTransport = Literal["collective", "snapshot", "delta", "memory"]
"""Transport of new weights to a generator; see configs/broker.py."""


class TensorSlot(msgspec.Struct, frozen=True, array_like=True):
    """Position of a tensor in the flat buckets. Example: TensorSlot("lm_head.weight", [16, 128], "float32", 0, 0)."""

    name: str
    """Name of the parameter in transformers' checkpoint."""
    shape: list[int]
    dtype: str
    """Name of the torch dtype on the wire."""
    bucket: int
    offset: int
    """First byte in the bucket."""


class SnapshotSource(Record):
    """Location of a version to fetch.

    Example: SnapshotSource(host="10.0.0.3", port=41234, folder="/runs/a/weights", has_deltas=True)
    """

    host: str
    """Host of the learner's snapshot server."""
    port: int
    """Port of the learner's snapshot server."""
    folder: str
    """Folder with the same files, for generators that can read it."""
    has_deltas: bool = False
    """Whether deltas are written: the next version may be a delta from this one, which is then worth keeping."""
