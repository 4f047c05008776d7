"""Log-probabilities and other numbers per token, computed from logits in at least float32.

More than `CHUNK_ELEMENTS` logits are processed in chunks of tokens. Of `DeferredLogits`, only one chunk is in memory at
a time.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from slipstream.learner.algorithms import kl

CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Logits per chunk by device type. On GPUs, matrix products of 64 MiB (110 x 151,936) are memory-bound."""


@dataclass(frozen=True)
class Requested:
    """Numbers per token besides `logprobs` (see `measure_tokens`)."""

    entropy: bool = False
    differentiate_entropy: bool = False
    collision: bool = False
    top_k: int = 0


LOGPROBS = Requested()


@dataclass(frozen=True, eq=False)
class DeferredLogits:
    """Logits to compute in chunks of tokens: finish(states @ weight.T + bias), [N, V]."""

    states: Float[Tensor, "N D"]
    weight: Float[Tensor, "V D"]
    bias: Float[Tensor, "V"] | None = None
    finish: Callable[[Tensor], Tensor] | None = None
    """Elementwise function of the logits, such as a soft cap."""
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.states), len(self.weight)

    def compute(self) -> Float[Tensor, "N V"]:
        logits = linear(*_cast(self.dtype, self.states, self.weight, self.bias))
        return self.finish(logits) if self.finish else logits

    def chunk(self, tokens: slice) -> "DeferredLogits":
        return replace(self, states=self.states[tokens])


def measure_tokens(
    logits: Float[Tensor, "N V"] | DeferredLogits,
    targets: Int[Tensor, "N"],
    temperatures: Float[Tensor, "N"],
    *,
    requested: Requested,
    candidates: Int[Tensor, "N K"] | None = None,
    reference_logits: Float[Tensor, "N V"] | DeferredLogits | None = None,
    chunk_elements: int | None = None,
) -> dict[str, Tensor]:
    """Requested numbers per token by name, with p = softmax(logits / temperature).

    logprobs             log p(target)
    entropies            -sum_v p_v log p_v, nats                     if requested.entropy
    collisions           sum_v p_v^2, without gradient                if requested.collision
    top_tokens           most likely tokens, int[N K], best first     if requested.top_k
    top_logprobs         log p of top_tokens, without gradient        if requested.top_k
    candidate_logprobs   log p(candidate), float[N K]                 if candidates are given
    exact_kl             KL(p || softmax(reference / temperature))    if reference_logits are given (no gradient)

    Source: collisions are for the optimal token baseline, arXiv:2602.07078.
    """
    num_tokens, vocabulary = logits.shape
    chunk_tokens = max(1, (chunk_elements or CHUNK_ELEMENTS[targets.device.type]) // vocabulary)
    if num_tokens <= chunk_tokens:
        return _measure(_computed(logits), targets, temperatures, candidates, _computed(reference_logits), requested)
    chunks = [slice(first, first + chunk_tokens) for first in range(0, num_tokens, chunk_tokens)]

    def measure(chunk_logits: Tensor, index: int, requested: Requested) -> dict[str, Tensor]:
        tokens = chunks[index]
        few = None if candidates is None else candidates[tokens]
        reference = _computed(reference_logits, tokens)
        return _measure(chunk_logits, targets[tokens], temperatures[tokens], few, reference, requested)

    if isinstance(logits, DeferredLogits):
        names: list[str] = []
        parameters = (logits.states, logits.weight, logits.bias)
        columns = _MeasureDeferred.apply(*parameters, logits, chunks, measure, requested, names)
        return dict(zip(names, columns, strict=True))
    # `split`: the backward pass of a slice would allocate a gradient as large as all logits.
    found = [
        checkpoint(measure, part, index, requested, use_reentrant=False)
        for index, part in enumerate(logits.split(chunk_tokens))
    ]
    return {name: torch.cat([part[name] for part in found]) for name in found[0]}


def _computed(logits: Tensor | DeferredLogits | None, tokens: slice = slice(None)) -> Any:
    if isinstance(logits, DeferredLogits):
        return logits.chunk(tokens).compute()
    return None if logits is None else logits[tokens]


def _measure(
    logits: Float[Tensor, "N V"],
    targets: Int[Tensor, "N"],
    temperatures: Float[Tensor, "N"],
    candidates: Int[Tensor, "N K"] | None,
    reference_logits: Float[Tensor, "N V"] | None,
    requested: Requested,
) -> dict[str, Tensor]:
    logprobs = _log_softmax(logits, temperatures)
    measured = {"logprobs": logprobs.gather(-1, targets[:, None])[:, 0]}
    if requested.entropy:
        kept = logprobs if requested.differentiate_entropy else logprobs.detach()
        # The clamp turns 0 * -inf = NaN into 0.
        measured["entropies"] = -(kept.exp() * kept.clamp(min=torch.finfo(kept.dtype).min)).sum(dim=-1)
    if requested.collision:
        measured["collisions"] = (2 * logprobs.detach()).exp().sum(dim=-1)
    if requested.top_k:
        best = logprobs.detach().topk(min(requested.top_k, logprobs.shape[-1]), dim=-1)
        measured |= {"top_tokens": best.indices, "top_logprobs": best.values}
    if candidates is not None:
        measured["candidate_logprobs"] = logprobs.gather(-1, candidates)
    if reference_logits is not None:
        measured["exact_kl"] = kl.exact(logprobs, _log_softmax(reference_logits.detach(), temperatures))
    return measured


def _log_softmax(logits: Float[Tensor, "N V"], temperatures: Float[Tensor, "N"]) -> Float[Tensor, "N V"]:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return (wide / temperatures[:, None]).log_softmax(dim=-1)


_Measure = Callable[[Tensor, int, Requested], dict[str, Tensor]]
"""(logits, index of the chunk, requested numbers) -> numbers by name."""
_CONSTANT = {"collisions", "top_tokens", "top_logprobs"}


class _MeasureDeferred(torch.autograd.Function):
    """`measure` for all tokens, one chunk at a time in both passes."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        logits: DeferredLogits,
        chunks: list[slice],
        measure: _Measure,
        requested: Requested,
        names: list[str],
    ) -> tuple[Tensor, ...]:
        """Fills `names`. The first three arguments show tensors of `logits` to autograd."""
        # Not casts: ZeRO-3 gathers the parameters again for the backward pass.
        ctx.save_for_backward(states, weight, bias)
        ctx.finish, ctx.dtype, ctx.chunks, ctx.measure, ctx.names = logits.finish, logits.dtype, chunks, measure, names
        cast = replace(logits, weight=weight.to(logits.dtype))
        found = [measure(cast.chunk(tokens).compute(), index, requested) for index, tokens in enumerate(chunks)]
        names.extend(found[0])
        columns = {name: torch.cat([part[name] for part in found]) for name in names}
        constant = _CONSTANT if requested.differentiate_entropy else {*_CONSTANT, "entropies"}
        ctx.mark_non_differentiable(*(column for name, column in columns.items() if name in constant))
        ctx.differentiable = [name for name in names if name not in constant]
        # Numbers without gradient are not computed again.
        ctx.requested = replace(requested, entropy=requested.differentiate_entropy, collision=False, top_k=0)
        return tuple(columns.values())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, bias = ctx.saved_tensors
        outer = dict(zip(ctx.names, gradients, strict=True))
        of_states = torch.empty_like(states)
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        cast_states, cast_weight, cast_bias = _cast(ctx.dtype, states, weight, bias)
        for index, tokens in enumerate(ctx.chunks):
            part = linear(cast_states[tokens], cast_weight, cast_bias).requires_grad_()
            with torch.enable_grad():
                measured = ctx.measure(ctx.finish(part) if ctx.finish else part, index, ctx.requested)
                (of_logits,) = torch.autograd.grad(
                    [measured[name] for name in ctx.differentiable],
                    part,
                    [outer[name][tokens] for name in ctx.differentiable],
                )
            of_states[tokens] = (of_logits @ cast_weight).to(of_states.dtype)
            if of_weight is not None and of_weight.dtype == of_logits.dtype:
                # Without a temporary.
                of_weight.addmm_(of_logits.T, cast_states[tokens])
            elif of_weight is not None:
                of_weight += of_logits.T @ cast_states[tokens]
            if of_bias is not None:
                of_bias += of_logits.sum(0, dtype=of_bias.dtype)
        return of_states, of_weight, of_bias, None, None, None, None, None


def _cast(dtype: torch.dtype, *tensors: Tensor | None) -> list[Any]:
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]
