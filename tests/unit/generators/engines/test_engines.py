import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import TensorSlot
from slipstream.broker.weights import buckets
from slipstream.broker.weights.checkpoint_names import CheckpointNames, check_layout
from slipstream.buffer.trajectory import Sampling
from slipstream.generators.engines.hf_engine import sample
from tests.cases import cases
from tests.tiny_model import make_tiny_module


def make_sampling(temperature=1.0, *, top_p=1.0, top_k=-1, seed=0, **others: Any) -> Sampling:
    return Sampling(temperature, top_p, top_k, 4, seed, **others)


def logits_of(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities]).log()


@cases(
    "filters, kept",
    ({}, {0, 1, 2}),
    ({"top_k": 2}, {0, 1}),
    ({"top_p": 0.6}, {0, 1}),
    ({"top_p": 0.4}, {0}),
    ({"min_p": 0.5}, {0, 1}),
    ({"min_p": 0.7}, {0}),
    ({"min_p": 0.3, "temperature": 0.5}, {0, 1}),
)
def test_filters_keep_the_likeliest_tokens_whose_frequencies_match_their_probabilities(filters: dict, kept: set[int]):
    uniforms = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    tokens, logprobs = sample(logits_of(0.5, 0.3, 0.2).repeat(4000, 1), [make_sampling(**filters)] * 4000, uniforms)
    assert set(tokens.tolist()) == kept
    # Of the distribution that was sampled from.
    weights = {token: (0.5, 0.3, 0.2)[token] ** (1 / filters.get("temperature", 1.0)) for token in sorted(kept)}
    shares = {token: weight / sum(weights.values()) for token, weight in weights.items()}
    assert logprobs.exp().tolist() == pytest.approx([shares[token] for token in tokens.tolist()], abs=1e-6)
    assert (torch.bincount(tokens) / len(tokens)).tolist() == pytest.approx([*shares.values()], abs=1e-3)


def test_greedy_and_random_rows_mix_in_a_batch_and_impossible_tokens_are_never_drawn():
    logits = logits_of(0.3, 0.5, 0.2).repeat(2, 1)
    tokens, logprobs = sample(logits, [make_sampling(0.0), make_sampling(2.0)], torch.tensor([0.99, 0.99]).double())
    assert tokens.tolist() == [1, 2]
    weights = [0.3**0.5, 0.5**0.5, 0.2**0.5]
    assert logprobs.exp().tolist() == pytest.approx([0.5, weights[2] / sum(weights)], abs=1e-6)

    # A token of probability zero is never drawn.
    logits = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]])
    uniforms = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    tokens, logprobs = sample(logits.repeat(2, 1), [make_sampling()] * 2, uniforms)
    assert tokens.tolist() == [1, 2]
    assert logprobs.isfinite().all()


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


@cases(
    "change, words",
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
)
def test_any_other_layout_is_rejected_with_the_tensor_named(change: Change, words: str):
    names = CheckpointNames(make_tiny_module())
    with pytest.raises(WeightTransferError, match=words):
        check_layout(change(slots_of(make_tiny_module())), names, dtype="float32")
