from collections.abc import Callable

import msgspec
import pytest
import torch

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import TensorSlot
from slipstream.broker.weights import buckets
from slipstream.generators.engines.weight_layout import WeightLayout, check_tied, load_into
from tests.tiny_model import make_tiny_module

UP, GATE = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"
Change = Callable[[list[TensorSlot]], list[TensorSlot]]


def slots_of(module: torch.nn.Module) -> list[TensorSlot]:
    metadata = [(name, p.shape, p.dtype) for name, p in module.named_parameters(remove_duplicate=False)]
    return buckets.plan(metadata, bucket_bytes=40_000)[0]


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_learners_layout_of_the_same_model_is_accepted(is_tied: bool):
    with torch.device("meta"):
        layout = WeightLayout(make_tiny_module(is_tied=is_tied), dtype="float32")
    layout.check(slots_of(make_tiny_module(is_tied=is_tied)))
    assert layout.tied == ([["model.embed_tokens.weight", "lm_head.weight"]] if is_tied else [])


def without(name: str) -> Change:
    return lambda slots: [slot for slot in slots if slot.name != name]


def renamed(names: dict[str, str]) -> Change:
    return lambda slots: [msgspec.structs.replace(slot, name=names.get(slot.name, slot.name)) for slot in slots]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("model.norm.weight"), "every parameter must be sent, model.norm.weight and 0 more were not"),
        (renamed({UP: GATE, GATE: UP}), f"which has {GATE} at index 8, got {UP}: names were swapped"),
        (lambda slots: [*slots, TensorSlot("model.extra", [1], "float32", 0, 0)], "model.extra and 0 more do not"),
        (lambda slots: [*slots, slots[0]], "every parameter must be sent once, got 28 tensors for 27"),
        (
            lambda slots: [msgspec.structs.replace(slots[0], shape=[50, 64]), *slots[1:]],
            r"must have shape \[41, 64\] as in this generator's model, got \[50, 64\]",
        ),
        (
            lambda slots: [*slots[:-1], msgspec.structs.replace(slots[-1], dtype="bfloat16")],
            "must travel as the engine computes, in float32, got bfloat16",
        ),
    ],
)
def test_any_other_layout_is_rejected_with_the_tensor_named(change: Change, words: str):
    layout = WeightLayout(make_tiny_module(), dtype="float32")
    with pytest.raises(WeightTransferError, match=words):
        layout.check(change(slots_of(make_tiny_module())))


def test_all_names_of_a_tied_tensor_need_the_same_bytes():
    tensors = [("embed", torch.ones(3)), ("head", torch.ones(3))]
    check_tied(tensors, [["embed", "head"]])
    check_tied(tensors[:1], [["embed", "head"]])
    with pytest.raises(WeightTransferError, match="embed and head are one tensor of the model"):
        check_tied([tensors[0], ("head", torch.tensor([1, 1, 1 + 1e-7]))], [["embed", "head"]])


# --- load_into -------------------------------------------------------------------------------------------------------
def tensors_of(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, parameter.detach().clone()) for name, parameter in module.named_parameters()]


@pytest.mark.parametrize("is_tied", [False, True])
def test_load_into_copies_every_tensor(is_tied: bool):
    module, other = make_tiny_module(seed=0, is_tied=is_tied), make_tiny_module(seed=1, is_tied=is_tied)
    load_into(module, tensors_of(other))
    assert all(
        torch.equal(a, b) for a, b in zip(module.state_dict().values(), other.state_dict().values(), strict=True)
    )


def test_a_tied_head_may_be_sent_under_its_own_name():
    module, other = make_tiny_module(seed=0, is_tied=True), make_tiny_module(seed=1, is_tied=True)
    load_into(module, [*tensors_of(other), ("lm_head.weight", other.lm_head.weight.detach())])
    assert torch.equal(module.lm_head.weight, other.model.embed_tokens.weight)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors[1:], "must be sent, model.embed_tokens.weight and 0 more"),
        (lambda tensors: [*tensors, ("model.extra", torch.zeros(1))], "model.extra does not"),
        (lambda tensors: [("lm_head.weight", torch.zeros(2, 2)), *tensors], r"shape \[41, 64\], got \[2, 2\]"),
    ],
)
def test_a_rejected_set_of_tensors_changes_nothing(change, words: str):
    module = make_tiny_module(seed=0)
    before = tensors_of(module)
    with pytest.raises(WeightTransferError, match=words):
        load_into(module, change(tensors_of(make_tiny_module(seed=1))))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(before, tensors_of(module), strict=True))


def test_a_stale_tied_head_is_rejected():
    module, other = make_tiny_module(seed=0, is_tied=True), make_tiny_module(seed=1, is_tied=True)
    old_head = module.lm_head.weight.detach().clone()
    with pytest.raises(WeightTransferError, match=r"model.embed_tokens.weight and lm_head.weight are one tensor"):
        load_into(module, [*tensors_of(other), ("lm_head.weight", old_head)])
    assert torch.equal(module.lm_head.weight, old_head)
