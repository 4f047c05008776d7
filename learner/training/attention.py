"""Maskless attention for packed rows, sequence parallelism, and compiled layers.

Each run of tokens is a sequence for the kernel: torch's variable-length flash attention on GPUs in half precision,
otherwise one SDPA call per run.

SequenceGroup: ranks that each compute a slice of every sequence and exchange heads for tokens in attention. They get
the same microbatches and gather outputs of all trained tokens. Each has its slice's gradient; gradients add up.

Source: DeepSpeed Ulysses, arXiv:2309.14509. Differs: rows may hold several sequences, and key/value heads that ranks
cannot share evenly are repeated.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_layers import GradientCheckpointingLayer

from slipstream.configs.data import ModelConfig
from slipstream.learner.batching.microbatch import Microbatch, Spans
from slipstream.learner.errors import ModelError

# --- sequence parallelism --------------------------------------------------------------------------------------------
_SOFTMAX = {"full_attention", "sliding_attention"}
_LENGTH_DEPENDENT = {"dynamic", "longrope"}
"""Rotary embeddings that depend on the longest position, unknown to a slice."""


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """One rank's view. `gather`, `total`, and `exchange` are collective."""

    size: int = 1
    rank: int = 0
    members: dist.ProcessGroup | None = None
    """None for a group of one."""

    def take(self, microbatch: Microbatch) -> Microbatch:
        """Slice rows and keep trained tokens predicted there. `spans` describe whole rows."""
        if self.size == 1:
            return microbatch
        rows, length = microbatch.token_ids.shape
        width = length // self.size
        first = self.rank * width
        positions = microbatch.position_ids
        if positions is None:
            positions = torch.arange(length, device=microbatch.token_ids.device).expand(rows, -1)
        mine = self._mine(microbatch)
        sources = microbatch.sources[mine]
        return dataclasses.replace(
            microbatch,
            token_ids=microbatch.token_ids[:, first : first + width],
            position_ids=positions[:, first : first + width],
            sources=sources // length * width + sources % length - first,
            targets=microbatch.targets[mine],
            temperatures=microbatch.temperatures[mine],
            indices=microbatch.indices[mine],
            copies=microbatch.copies[:, first : first + width],
            experts=None if microbatch.experts is None else microbatch.experts[:, first : first + width],
        )

    def own(self, column: Tensor | None, microbatch: Microbatch) -> Tensor | None:
        """This rank's entries of a column over trained tokens."""
        return column if column is None or self.size == 1 else column[self._mine(microbatch)]

    def gather(self, measured: dict[str, Any], microbatch: Microbatch) -> dict[str, Any]:
        """Outputs of all ranks, with gradients for this rank's."""
        if self.size == 1:
            return measured
        mine, found = self._mine(microbatch), {}
        for name, own in measured.items():
            whole = own.new_zeros(len(microbatch.sources), *own.shape[1:])
            whole[mine] = own.detach()
            dist.all_reduce(whole, group=self.members)
            found[name] = whole.index_put((mine,), own)
        return found

    def total(self, part: Tensor) -> Tensor:
        """Sum over ranks, with a gradient for this rank's part."""
        if self.size == 1:
            return part
        whole = part.detach().clone()
        dist.all_reduce(whole, group=self.members)
        return whole + (part - part.detach())

    def _mine(self, microbatch: Microbatch) -> Tensor:
        """Indices of trained tokens predicted in this rank's slice."""
        length = microbatch.token_ids.shape[1]
        return (microbatch.sources % length * self.size // length == self.rank).nonzero()[:, 0]

    def exchange(self, states: Tensor) -> Tensor:
        """Gather axis 2 and split axis 1 over ranks."""
        if self.size == 1:
            return states
        dealt = states.unflatten(1, (self.size, -1)).movedim(1, 0)
        return _Exchange.apply(dealt, self.members).movedim(0, 2).flatten(2, 3)


SINGLE_RANK = SequenceGroup()


class _Exchange(torch.autograd.Function):
    """All-to-all over the first axis."""

    @staticmethod
    def forward(ctx: Any, dealt: Tensor, members: dist.ProcessGroup) -> Tensor:
        ctx.members = members
        dealt = dealt.contiguous()
        received = torch.empty_like(dealt)
        dist.all_to_all_single(received, dealt, group=members)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(*gradients, ctx.members), None


def check_sequence_parallel(
    settings: PreTrainedConfig, model_class: Any, *, size: int, setting: str, path: str
) -> None:
    """Raise ModelError if sequences cannot be split over ranks. `setting`: config key of `path`."""
    text = settings.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    rope = (getattr(text, "rope_parameters", None) or {}).get("rope_type")
    others = sorted(set(getattr(text, "layer_types", None) or ()) - _SOFTMAX)
    reasons = {
        "images": hasattr(settings, "vision_config"),
        "an encoder-decoder": settings.is_encoder_decoder,
        f"layers that are not softmax attention ({', '.join(others) or 'recurrent'})": others
        or not heads
        or getattr(model_class, "_is_stateful", False),
        f"{heads} attention heads, which {size} ranks cannot share": heads and heads % size,
        "attention that needs the model's code (soft cap, sinks or biases)": not can_pack(settings, model_class),
        f"rotary embeddings that depend on the length ({rope})": rope in _LENGTH_DEPENDENT,
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        raise ModelError(
            f"{setting} must name a decoder of softmax attention with a number of heads that "
            f"learner.sequence_parallel={size} divides, got {path!r} ({settings.model_type}) with {reason}: choose "
            "another size, 1 for none."
        )


def can_pack(settings: PreTrainedConfig, model_class: Any) -> bool:
    """True if a transformers class supports `packed_attention`."""
    is_capped = getattr(settings.get_text_config(), "attn_logit_softcapping", None)
    supported = (getattr(model_class, name, False) for name in ("_supports_attention_backend", "_supports_sdpa"))
    return not hasattr(settings, "vision_config") and not is_capped and all(supported)


# --- packed rows -----------------------------------------------------------------------------------------------------
PACKED = "slipstream_packed"
"""transformers' name of `packed_attention`, which gets no mask."""

BACKEND = "inductor"

_MAX_KERNEL_HEAD = 256
_MOST_GRAPHS = 64
"""Compiled graphs per layer: with and without gradients, one row and several."""

LONG = 2048
"""Shortest sequences for which masks cost more on CPUs than a kernel call per run."""

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
    """Indices of `spans` on the device: each copy would stop the GPU."""

    def index(self, name: str, make: Callable[[], Tensor], device: torch.device) -> Tensor:
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
    packed_rows = packed_rows or PackedRows(None, SINGLE_RANK)
    # Repeat key/value heads so that each rank gets complete query-head groups.
    repeats = math.lcm(key.shape[1], packed_rows.group.size) // key.shape[1]
    if repeats > 1:
        key, value = (part.repeat_interleave(repeats, 1) for part in (key, value))
    states = [packed_rows.group.exchange(part) for part in (query, key, value)]
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


def choose_attention(
    settings: PreTrainedConfig, model_class: Any, config: ModelConfig, *, on_gpu: bool, is_sliced: bool
) -> str | None:
    """Attention for transformers. None: SDPA if supported, else eager. `is_sliced`: ranks share sequences."""
    if (on_gpu or is_sliced or config.max_length >= LONG) and can_pack(settings, model_class):
        return PACKED
    # transformers' SDPA silently ignores the soft cap of attention scores.
    return "eager" if getattr(settings.get_text_config(), "attn_logit_softcapping", None) else None


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
    return attend([query, key, value], spans, packed_rows, window=window, scale=scale).unflatten(0, (rows, length))


def _by_kernel(states: list[Tensor], spans: Spans, rows: PackedRows, *, window: int, scale: float | None) -> Tensor:
    ends = (
        rows.index(name, partial(_ends, counts), states[0].device)
        for name, counts in (("query ends", spans.lengths), ("key ends", spans.num_keys))
    )
    # Queries and keys align at their ends.
    sides = (window - 1 if window else -1, 0)
    longest = max(spans.lengths), max(spans.num_keys)
    return varlen_attn(*states, *ends, *longest, scale=scale, window_size=sides, enable_gqa=True)


def _ends(counts: list[int]) -> Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def _run_by_run(states: list[Tensor], spans: Spans, rows: PackedRows, *, window: int, scale: float | None) -> Tensor:
    masks, found = rows.masks, []
    counts = (spans.lengths, spans.num_keys, spans.num_keys)
    for run in zip(*(part.split(count) for part, count in zip(states, counts, strict=True)), strict=True):
        query, key, value = (part.transpose(0, 1)[None] for part in run)
        shape = query.shape[2], key.shape[2], window
        if shape[0] < shape[1] or 0 < window < shape[1]:
            if (mask := masks.get(shape)) is None:
                last = shape[1] - shape[0]
                sees = torch.ones(shape[:2], dtype=torch.bool, device=query.device).tril(last)
                sees = sees.triu(last - window + 1) if window else sees
                # Additive: of a boolean mask, SDPA would keep a copy per layer.
                mask = masks[shape] = torch.zeros_like(sees, dtype=query.dtype).masked_fill_(~sees, -torch.inf)
            out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
        else:
            out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        found.append(out[0].transpose(0, 1))
    return torch.cat(found)


# --- compiled layers -------------------------------------------------------------------------------------------------
def compile_layers(backbone: nn.Module, *, only_norms: bool) -> None:
    """Compile a transformers model's layers in place, or only its norms. Raises ModelError.

    Excludes packed attention, which needs a graph per microbatch. Norms are the largest parts without ZeRO-3's hooks,
    data-dependent shapes of experts, and exchanges between ranks.
    """
    kind = _is_norm if only_norms else lambda part: isinstance(part, GradientCheckpointingLayer)
    if not (parts := [*filter(kind, backbone.modules())]):
        raise ModelError(
            f"learner.compile must be false for {type(backbone).__name__} (model.path), got true: it is not made of "
            "known layers."
        )
    AttentionInterface.register(PACKED, torch.compiler.disable(packed_attention))
    torch._dynamo.config.recompile_limit = _MOST_GRAPHS
    for part in parts:
        if only_norms:
            # Without ZeRO-3's hooks.
            part.forward = torch.compile(part.forward, dynamic=True, backend=BACKEND)
        else:
            # Without the gradient checkpointing around `forward`.
            part.compile(dynamic=True, backend=BACKEND)


def _is_norm(part: nn.Module) -> bool:
    vectors = [len(getattr(each, "ds_shape", each.shape)) == 1 for each in part.parameters()]
    return bool(vectors) and all(vectors) and next(part.children(), None) is None
