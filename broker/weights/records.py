"""What is said of weights: how they come to a generator, where tensors lie in buckets, where versions lie."""

from typing import Literal

import msgspec

from slipstream.buffer.trajectory import Record

WeightTransport = Literal["collective", "snapshot", "delta", "memory"]
"""How new weights come to a generator: see configs/broker.py."""


class TensorSlot(msgspec.Struct, frozen=True, array_like=True):
    """Where one tensor lies in a flat bucket. Example: TensorSlot("lm_head.weight", [16, 128], "float32", 0, 0)."""

    name: str
    """Name in transformers' checkpoint."""
    shape: list[int]
    """Its shape."""
    dtype: str
    """torch dtype name on the wire."""
    bucket: int
    """Index of the bucket."""
    offset: int
    """First byte in the bucket."""


class SnapshotSource(Record):
    """Where a version lies. Example: SnapshotSource(host="10.0.0.3", port=41234, folder="/runs/a/weights", has_deltas=True)."""

    host: str
    """Of the learner's weight server."""
    port: int
    """Of the learner's weight server."""
    folder: str
    """The same files; whoever sees this folder need not ask the server."""
    has_deltas: bool = False
    """There may be a delta from the version before. The next one will be fetched too, so this one is worth keeping."""
