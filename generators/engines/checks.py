"""Checks of a model, and of a weight update's layout."""

from collections.abc import Sequence
from typing import Any

import torch

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import TensorSlot
from slipstream.broker.weights import buckets
from slipstream.broker.weights.checkpoint_names import CheckpointNames
from slipstream.generators.errors import EngineError
from slipstream.runtime.routers import Router, find_routers


def require_routers(module: Any) -> list[Router]:
    """Routers of a model. Raises EngineError if it has none."""
    if routers := find_routers(module):
        return routers
    raise EngineError(
        "model.moe.router_replay must be false for a model without routers that choose by top-k, got "
        f"{type(module).__name__}"
    )


def check_layout(slots: Sequence[TensorSlot], names: CheckpointNames, *, dtype: str) -> None:
    """Check names, order, shapes, and dtypes of an update for an engine that computes in `dtype`.

    Finds errors that the checksum (intact bytes of other tensors) or the probe (a small tensor not sent) misses. Raises
    WeightTransferError.
    """
    metadata = names.metadata(getattr(torch, dtype))
    expected = {name: (list(shape), buckets.dtype_name(wire)) for name, shape, wire in metadata}
    _check_names([slot.name for slot in slots], list(expected))
    for slot in slots:
        shape, own_dtype = expected[slot.name]
        if slot.shape != shape:
            raise WeightTransferError(
                f"tensor {slot.name} must have this generator's shape {shape}, got {slot.shape}: "
                "learner and generator must start from the same model.path"
            )
        if slot.dtype != own_dtype:
            raise WeightTransferError(f"tensor {slot.name} must have the engine's dtype {own_dtype}, got {slot.dtype}")


def _check_names(names: list[str], expected: list[str]) -> None:
    sent, known = set(names), set(expected)
    if missing := [name for name in expected if name not in sent]:
        raise WeightTransferError(f"every parameter must be sent, {missing[0]} and {len(missing) - 1} more were not")
    if unknown := [name for name in names if name not in known]:
        raise WeightTransferError(
            f"every tensor must belong to a parameter of the model, {unknown[0]} and {len(unknown) - 1} more do not"
        )
    # Swapped names with equal shapes pass every other check.
    for index, (name, expected_name) in enumerate(zip(names, expected, strict=False)):
        if name != expected_name:
            raise WeightTransferError(
                f"tensors must be in the model's order, with {expected_name} at index {index}, got {name}: "
                "names were swapped or the models differ"
            )
    if len(names) > len(expected):
        raise WeightTransferError(f"every parameter must be sent once, got {len(names)} tensors for {len(expected)}")
