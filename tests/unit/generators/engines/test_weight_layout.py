from collections.abc import Callable

import msgspec
import pytest
import torch

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import TensorSlot
from slipstream.broker.weights import buckets
from slipstream.broker.weights.checkpoint_names import CheckpointNames
from slipstream.generators.engines.checks import check_layout
from tests.tiny_model import make_tiny_module

UP, GATE = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"
Change = Callable[[list[TensorSlot]], list[TensorSlot]]


def slots_of(module: torch.nn.Module) -> list[TensorSlot]:
    return buckets.plan(CheckpointNames(module).metadata(torch.float32), bucket_bytes=40_000)[0]


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_learners_layout_of_the_same_model_is_accepted(is_tied: bool):
    with torch.device("meta"):
        names = CheckpointNames(make_tiny_module(is_tied=is_tied))
    check_layout(slots_of(make_tiny_module(is_tied=is_tied)), names, dtype="float32")
    assert names.tied == ([["model.embed_tokens.weight", "lm_head.weight"]] if is_tied else [])


def without(name: str) -> Change:
    return lambda slots: [slot for slot in slots if slot.name != name]


def renamed(names: dict[str, str]) -> Change:
    return lambda slots: [msgspec.structs.replace(slot, name=names.get(slot.name, slot.name)) for slot in slots]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("model.norm.weight"), "every parameter must be sent, model.norm.weight and 0 more were not"),
        (renamed({UP: GATE, GATE: UP}), f"with {GATE} at index 8, got {UP}: names were swapped"),
        (lambda slots: [*slots, TensorSlot("model.extra", [1], "float32", 0, 0)], "model.extra and 0 more do not"),
        (lambda slots: [*slots, slots[0]], "every parameter must be sent once, got 28 tensors for 27"),
        (
            lambda slots: [msgspec.structs.replace(slots[0], shape=[50, 64]), *slots[1:]],
            r"must have this generator's shape \[41, 64\], got \[50, 64\]",
        ),
        (
            lambda slots: [*slots[:-1], msgspec.structs.replace(slots[-1], dtype="bfloat16")],
            "must have the engine's dtype float32, got bfloat16",
        ),
    ],
)
def test_any_other_layout_is_rejected_with_the_tensor_named(change: Change, words: str):
    names = CheckpointNames(make_tiny_module())
    with pytest.raises(WeightTransferError, match=words):
        check_layout(change(slots_of(make_tiny_module())), names, dtype="float32")
