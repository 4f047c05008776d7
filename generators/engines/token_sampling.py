"""Token sampling: logits -> token and its log-probability, as vLLM's sampler does it.

temperature, then top-k, then top-p; the log-probability is that of the distribution left over. Temperature 0 takes the
likeliest token and reports its log-probability at temperature 1, unfiltered.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from buffer.trajectory import Sampling


def draw_uniforms(sampling: Sampling) -> Tensor:
    """float64[max_tokens] in [0, 1): all the chance a request needs, from its own seed, whatever it is batched with."""
    generator = torch.Generator().manual_seed(sampling.seed)
    return torch.rand(sampling.max_tokens, generator=generator, dtype=torch.float64)


def sample(logits: Tensor, samplings: Sequence[Sampling], uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """float[B, V] logits, one Sampling and one number in [0, 1) per row -> int64[B] tokens, float32[B] log-probs."""
    is_greedy = torch.tensor([s.temperature == 0 for s in samplings])
    temperatures = torch.tensor([s.temperature or 1.0 for s in samplings])
    logits = logits.float() / temperatures[:, None]
    for row, sampling in enumerate(samplings):
        if not is_greedy[row] and (sampling.top_k > 0 or sampling.top_p < 1):
            logits[row] = _filtered(logits[row], sampling)
    logprobs = logits.log_softmax(-1)
    tokens = torch.where(is_greedy, logprobs.argmax(-1), _invert_cdf(logprobs, uniforms))
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def _filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    if 0 < sampling.top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -torch.inf)
    if sampling.top_p < 1:
        logits = logits.masked_fill(~_nucleus(logits, sampling.top_p), -torch.inf)
    return logits


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    """The smallest set of likeliest tokens that holds at least `top_p` of the mass."""
    ordered, order = logits.softmax(-1).sort(descending=True)
    mass_before = ordered.cumsum(-1) - ordered
    kept = torch.zeros_like(logits, dtype=torch.bool)
    kept[order] = mass_before < top_p
    return kept


def _invert_cdf(logprobs: Tensor, uniforms: Tensor) -> Tensor:
    # float64, scaled to what the sum really is, and kept below it by one rounding step: a token of probability zero can
    # then never be hit.
    cdf = logprobs.double().exp().cumsum(-1)
    targets = uniforms.clamp(max=1 - 2**-52)[:, None] * cdf[:, -1:]
    return torch.searchsorted(cdf, targets, right=True)[:, 0]
