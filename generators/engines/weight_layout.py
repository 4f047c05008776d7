"""WeightLayout: the tensors a complete update of a model must hold, checked before any byte arrives.

A checksum shows that the bytes sent are those received, not that they are the right tensors, and a probe may miss a
small tensor that kept its old value. Comparing names, order, shapes and dtype with the model finds both for certain.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import TensorSlot, Update
from slipstream.broker.weights import buckets
from slipstream.broker.weights.shared_buckets import SharedBuckets
from slipstream.broker.weights.transport import WeightReceiver


class WeightLayout:
    """Names, shapes and ties of one model's parameters, in the dtype the engine computes in."""

    def __init__(self, module: nn.Module, *, dtype: str) -> None:
        """`module` may be on the meta device: its values are not read."""
        parameters = list(module.named_parameters(remove_duplicate=False))
        self._shapes = {name: list(parameter.shape) for name, parameter in parameters}
        self._dtype = dtype
        self.tied = tied_names(parameters)
        """Groups of names of one shared tensor; all names of a group must be sent with the same bytes."""

    def check(self, slots: Sequence[TensorSlot]) -> None:
        """Raise WeightTransferError unless `slots` are the model's parameters, in its order and dtype."""
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
        expected, sent = list(self._shapes), set(names)
        if missing := [name for name in expected if name not in sent]:
            raise WeightTransferError(
                f"every parameter must be sent, {missing[0]} and {len(missing) - 1} more were not"
            )
        if unknown := [name for name in names if name not in self._shapes]:
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


def check_tied(tensors: Sequence[tuple[str, Tensor]], tied: Sequence[Sequence[str]]) -> None:
    """Raise WeightTransferError if two names of one shared tensor come with different bytes.

    A stale tied head is silent otherwise: vLLM's CPU build keeps a packed copy of the head, which drifts from the
    embedding without any error.
    """
    sent = dict(tensors)
    for names in tied:
        for name, other in pairwise(name for name in names if name in sent):
            if not torch.equal(sent[name], sent[other]):
                raise WeightTransferError(
                    f"{name} and {other} are one tensor of the model and must come with the same bytes, they differ: "
                    "one of them was not updated"
                )


def tied_names(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[list[str]]:
    """Group the names of each parameter that has more than one."""
    names = defaultdict(list)
    for name, parameter in parameters:
        names[id(parameter)].append(name)
    return [several for several in names.values() if len(several) > 1]


@torch.no_grad()
def load_into(module: nn.Module, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Copy tensors into the transformers module's parameters of the same names, all or none.

    A tied parameter may come under any of its names. Raises WeightTransferError, before anything is changed, for an
    unknown name or shape, for a parameter that would keep its old value, and for a tied one with different bytes.
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
