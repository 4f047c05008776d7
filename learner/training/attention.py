"""Maskless attention for packed rows, and compiled layers.

Each run of tokens is a separate sequence for the kernel: torch's variable-length flash attention on GPUs in half
precision, otherwise one SDPA call per run.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_layers import GradientCheckpointingLayer

from slipstream.learner.batching.microbatch import Spans
from slipstream.learner.errors import ModelError
from slipstream.learner.training.sequence_parallel import SINGLE_RANK, SequenceGroup

PACKED = "slipstream_packed"
"""transformers' name of `packed_attention`, which gets no mask."""

BACKEND = "inductor"

_MAX_KERNEL_HEAD = 256
_MOST_GRAPHS = 64
"""Per layer: with and without gradients, one row and several, for each kind of layer."""

Masks = dict[tuple[int, int, int], Tensor]
"""(queries, keys, window) -> additive mask of a run, shared by all layers."""


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Argument of all attention layers."""

    spans: Spans | None
    """None if each row is one sequence."""
    group: SequenceGroup
    masks: Masks = field(default_factory=dict)
    indices: dict[str, Tensor] = field(default_factory=dict)
    """Indices of `spans` on the device, shared by all layers: each copy would stop the GPU."""

    def index(self, name: str, make: Callable[[], Tensor], device: torch.device) -> Tensor:
        """Return an index of the microbatch, copied to the device at the first call."""
        if name not in self.indices:
            self.indices[name] = make().to(device)
        return self.indices[name]


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed_rows: PackedRows | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers: [R, H, L, D] inputs -> [R, L, H, D]."""
    if attention_mask is not None or not getattr(module, "is_causal", True):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    packed_rows, kind = packed_rows or PackedRows(None, SINGLE_RANK), query.device.type
    # Like SDPA under autocast. Normalized queries may be float32, values in half precision.
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    # Repeat key/value heads so that each rank gets complete query-head groups.
    repeats = math.lcm(key.shape[1], packed_rows.group.size) // key.shape[1]
    if repeats > 1:
        key, value = (part.repeat_interleave(repeats, 1) for part in (key, value))
    states = [packed_rows.group.exchange(part.to(dtype)) for part in (query, key, value)]
    return packed_rows.group.exchange(_attend(states, packed_rows, window=sliding_window or 0, scale=scaling)), None


AttentionInterface.register(PACKED, packed_attention)


@contextmanager
def native_attention(module: PreTrainedModel) -> Iterator[None]:
    """Use transformers' SDPA in place of `packed_attention`."""
    is_packed = module.config._attn_implementation == PACKED
    if is_packed:
        module.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        if is_packed:
            module.set_attn_implementation(PACKED)


def _attend(states: list[Tensor], packed_rows: PackedRows, *, window: int, scale: float | None) -> Tensor:
    rows, _, length, width = states[0].shape
    spans = packed_rows.spans
    if spans is None:
        if not 0 < window < length:
            return scaled_dot_product_attention(*states, is_causal=True, scale=scale, enable_gqa=True).transpose(1, 2)
        spans = Spans([length] * rows, list(range(rows)))
    query, key, value = (part.transpose(1, 2).flatten(0, 1) for part in states)
    if (key_index := spans.key_index) is not None:
        index = packed_rows.index("keys", lambda: key_index, key.device)
        key, value = key[index], value[index]
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    has_kernel = width == value.shape[-1] <= _MAX_KERNEL_HEAD and width % 8 == 0
    attend = _by_kernel if query.is_cuda and is_half and has_kernel else _run_by_run
    found = attend([query, key, value], spans, packed_rows, window=window, scale=scale)
    return found.unflatten(0, (rows, length))


def _by_kernel(
    states: list[Tensor], spans: Spans, packed_rows: PackedRows, *, window: int, scale: float | None
) -> Tensor:
    ends = (
        packed_rows.index(name, partial(_ends, counts), states[0].device)
        for name, counts in (("query ends", spans.lengths), ("key ends", spans.num_keys))
    )
    # Queries and keys align at their ends: with more keys, a run also sees earlier tokens.
    sides = (window - 1 if window else -1, 0)
    longest = max(spans.lengths), max(spans.num_keys)
    return varlen_attn(*states, *ends, *longest, scale=scale, window_size=sides, enable_gqa=True)


def _ends(counts: list[int]) -> Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def _run_by_run(
    states: list[Tensor], spans: Spans, packed_rows: PackedRows, *, window: int, scale: float | None
) -> Tensor:
    masks = packed_rows.masks
    counts = (spans.lengths, spans.num_keys, spans.num_keys)
    runs = zip(*(part.split(count) for part, count in zip(states, counts, strict=True)), strict=True)
    found = []
    for run in runs:
        query, key, value = (part.transpose(0, 1)[None] for part in run)
        shape = query.shape[2], key.shape[2], window
        if shape[0] < shape[1] or 0 < window < shape[1]:
            mask = masks[shape] = masks[shape] if shape in masks else _mask(*shape, like=query)
            out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
        else:
            out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        found.append(out[0].transpose(0, 1))
    return torch.cat(found)


def _mask(num_queries: int, num_keys: int, window: int, *, like: Tensor) -> Tensor:
    """Additive mask [Q, K]. SDPA would convert a boolean one per layer and keep the copies for the backward pass."""
    last = num_keys - num_queries
    sees = torch.ones(num_queries, num_keys, dtype=torch.bool, device=like.device).tril(last)
    if window:
        sees = sees.triu(last - window + 1)
    return torch.zeros(sees.shape, dtype=like.dtype, device=like.device).masked_fill_(~sees, -torch.inf)


# --- compiled layers -------------------------------------------------------------------------------------------------
def compile_layers(backbone: nn.Module, *, has_routers: bool) -> None:
    """Compile a transformers model's layers in place. Raises ModelError.

    Excludes packed attention, which would require a graph per microbatch.
    """
    layers = [module for module in backbone.modules() if isinstance(module, GradientCheckpointingLayer)]
    if has_routers or not layers:
        reason = "a mixture of experts, with data-dependent shapes" if has_routers else "not made of known layers"
        raise ModelError(
            f"learner.compile must be false for {type(backbone).__name__} (model.path), got true: it is {reason}."
        )
    AttentionInterface.register(PACKED, torch.compiler.disable(packed_attention))
    torch._dynamo.config.recompile_limit = _MOST_GRAPHS
    for layer in layers:
        # Compiles only `forward`, not the gradient checkpointing around it.
        layer.compile(dynamic=True, backend=BACKEND)
