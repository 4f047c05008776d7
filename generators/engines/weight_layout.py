"""WeightLayout: the tensors a complete update of a model must hold, checked before any byte arrives.

A checksum shows that the bytes sent are those received, not that they are the right tensors, and a probe may miss a
small tensor that kept its old value. Comparing names, order, shapes and dtype with the model finds both for certain.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import TensorSlot, Update
from slipstream.broker.weights import buckets
from slipstream.broker.weights.checkpoint_names import CheckpointNames
from slipstream.broker.weights.shared_buckets import SharedBuckets
from slipstream.broker.weights.transport import WeightReceiver


class WeightLayout:
    """Names, shapes and dtypes of one model's tensors, as an engine that computes in `dtype` gets them."""

    def __init__(self, names: CheckpointNames, *, dtype: str) -> None:
        self._expected = {
            name: (list(shape), buckets.dtype_name(wire)) for name, shape, wire in names.metadata(getattr(torch, dtype))
        }

    def check(self, slots: Sequence[TensorSlot]) -> None:
        """Raise WeightTransferError unless `slots` are the model's tensors, in its order and dtypes."""
        self._check_names([slot.name for slot in slots])
        for slot in slots:
            shape, dtype = self._expected[slot.name]
            if slot.shape != shape:
                raise WeightTransferError(
                    f"tensor {slot.name} must have shape {shape} as in this generator's model, got {slot.shape}: "
                    "learner and generator must start from the same model.path"
                )
            if slot.dtype != dtype:
                raise WeightTransferError(
                    f"tensor {slot.name} must travel as the engine holds it, in {dtype}, got {slot.dtype}"
                )

    def _check_names(self, names: list[str]) -> None:
        expected, sent = list(self._expected), set(names)
        if missing := [name for name in expected if name not in sent]:
            raise WeightTransferError(
                f"every parameter must be sent, {missing[0]} and {len(missing) - 1} more were not"
            )
        if unknown := [name for name in names if name not in self._expected]:
            raise WeightTransferError(
                f"every tensor must belong to a parameter of the model, {unknown[0]} and {len(unknown) - 1} more do not"
            )
        # Order, because swapped names of equal shape pass every other check.
        for index, (name, expected_name) in enumerate(zip(names, expected, strict=False)):
            if name != expected_name:
                raise WeightTransferError(
                    f"tensors must come in the model's order, which has {expected_name} at index {index}, got {name}: "
                    "names were swapped or the models differ"
                )
        if len(names) > len(expected):
            raise WeightTransferError(
                f"every parameter must be sent once, got {len(names)} tensors for {len(expected)}"
            )


def receive_update(receiver: WeightReceiver, update: Update, fetched: SharedBuckets | None) -> list[tuple[str, Tensor]]:
    """Return an update's tensors, checksums verified, from `fetched` or else from the weight group (blocking).

    The tensors are views of buffers that the next update reuses: load them at once. Raises WeightTransferError.
    """
    if fetched is not None:
        buckets.verify(fetched.tensors, expected=update.checksums)
        return buckets.unpack(fetched.tensors, update.slots)
    return receiver.receive(
        update.slots, bucket_bytes=update.bucket_bytes, checksums=update.checksums, timeout_s=update.timeout_s
    )
