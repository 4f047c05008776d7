"""WeightLayout: which tensors an update must hold for a model, known before any arrives.

A checksum says that what was sent arrived, not that the right things were sent, and a probe does not see a small tensor
that stayed old. The names, in their order, do not depend on luck.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import Update
from slipstream.broker.weights import buckets
from slipstream.broker.weights.records import TensorSlot
from slipstream.broker.weights.shared_buckets import SharedBuckets
from slipstream.broker.weights.transport import WeightReceiver


class WeightLayout:
    """Of one model, in one dtype."""

    def __init__(self, module: nn.Module, *, dtype: str) -> None:
        """Only names, shapes and ties of `module` are looked at: it may be on the meta device."""
        parameters = list(module.named_parameters(remove_duplicate=False))
        self._shapes = {name: list(parameter.shape) for name, parameter in parameters}
        self._dtype = dtype
        self.tied = tied_names(parameters)
        """Names that must come with the same bytes, one list for each tensor that has several."""

    def check(self, slots: Sequence[TensorSlot]) -> None:
        """Raises WeightTransferError unless exactly the model's parameters are sent, in the model's order and dtype."""
        self._check_names([slot.name for slot in slots])
        for slot in slots:
            if slot.shape != self._shapes[slot.name]:
                raise WeightTransferError(
                    f"tensor {slot.name} must have shape {self._shapes[slot.name]} as in this generator's model, got "
                    f"{slot.shape}: learner and generator must start from the same model.path"
                )
            if slot.dtype != self._dtype:
                raise WeightTransferError(
                    f"tensor {slot.name} must travel as the engine computes, in {self._dtype}, got {slot.dtype}"
                )

    def _check_names(self, names: list[str]) -> None:
        wanted, sent = list(self._shapes), set(names)
        if missing := [name for name in wanted if name not in sent]:
            raise WeightTransferError(
                f"every parameter must be sent, {missing[0]} and {len(missing) - 1} more were not"
            )
        if unknown := [name for name in names if name not in self._shapes]:
            raise WeightTransferError(
                f"every tensor must belong to a parameter of the model, {unknown[0]} and {len(unknown) - 1} more do not"
            )
        for place, (name, want) in enumerate(zip(names, wanted, strict=False)):
            if name != want:
                raise WeightTransferError(
                    f"tensors must come in the model's order, which has {want} at place {place}, got {name}: names "
                    "were swapped or the models differ"
                )
        if len(names) > len(wanted):
            raise WeightTransferError(f"every parameter must be sent once, got {len(names)} tensors for {len(wanted)}")


def check_tied(tensors: Sequence[tuple[str, Tensor]], tied: Sequence[Sequence[str]]) -> None:
    """Raises WeightTransferError when two names of one tensor come with different bytes: one of them is old."""
    sent = dict(tensors)
    for names in tied:
        for name, other in pairwise(name for name in names if name in sent):
            if not torch.equal(sent[name], sent[other]):
                raise WeightTransferError(
                    f"{name} and {other} are one tensor of the model and must come with the same bytes, they differ: "
                    "one of them was not updated"
                )


def tied_names(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[list[str]]:
    """All names of each parameter that has several."""
    names = defaultdict(list)
    for name, parameter in parameters:
        names[id(parameter)].append(name)
    return [several for several in names.values() if len(several) > 1]


# @@ load_into: named tensors into a transformers module, all or nothing.
@torch.no_grad()
def load_into(module: nn.Module, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Copy tensors into the parameters of these names.

    Tied parameters may come under either name, or both with the same bytes. Raises WeightTransferError, before anything
    is changed, when a name or shape is unknown, a parameter would keep its old value, or a tied one comes with two.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, tensor in tensors:
        if name not in parameters:
            raise WeightTransferError(f"every tensor must belong to a parameter of the model, {name} does not")
        if parameters[name].shape != tensor.shape:
            raise WeightTransferError(
                f"tensor {name} must have shape {list(parameters[name].shape)}, got {list(tensor.shape)}"
            )
    covered = {id(parameters[name]) for name, _ in tensors}
    missing = [name for name, parameter in parameters.items() if id(parameter) not in covered]
    if missing:
        raise WeightTransferError(f"every parameter must be sent, {missing[0]} and {len(missing) - 1} more were not")
    check_tied(tensors, tied_names(parameters.items()))
    for name, tensor in tensors:
        parameters[name].copy_(tensor)


# @@ receiving: an update's tensors, from the weight group or from what was fetched.
def receive(receiver: WeightReceiver, update: Update, fetched: SharedBuckets | None) -> list[tuple[str, Tensor]]:
    """Named and verified, as views to be loaded at once. Blocks for a broadcast. Raises WeightTransferError."""
    if fetched is not None:
        buckets.verify(fetched.tensors, expected=update.checksums)
        return buckets.unpack(fetched.tensors, update.slots)
    return receiver.receive(
        update.slots, bucket_bytes=update.bucket_bytes, checksums=update.checksums, timeout_s=update.timeout_s
    )
