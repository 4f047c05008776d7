"""Log-probabilities of chosen tokens, and other numbers per token, from logits, in at least float32.

More than `chunk_elements` logits are worked on in chunks of tokens, recomputed in the backward pass, so that the
float32 copies of one chunk are alive at a time, not a second copy of all logits.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slipstream.learner.algorithms import kl

_CHUNK_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Requested:
    """Numbers per token that are computed from its distribution, besides the log-probability of its target."""

    entropy: bool = False
    """Entropy of the distribution, nats."""
    differentiate_entropy: bool = False
    """Whether the entropy carries a gradient."""
    collision: bool = False
    """Chance that two draws are the same token."""


LOGPROBS = Requested()
"""Log-probabilities of the targets alone."""


def measure_tokens(
    logits: Float[Tensor, "N V"],
    targets: Int[Tensor, "N"],
    temperatures: Float[Tensor, "N"],
    *,
    requested: Requested,
    candidates: Int[Tensor, "N K"] | None = None,
    reference_logits: Float[Tensor, "N V"] | None = None,
    chunk_elements: int = _CHUNK_ELEMENTS,
) -> dict[str, Tensor]:
    """Name -> one number per token, of p = softmax(logits / temperature), and only those requested.

    logprobs             log p(target)
    entropies            -sum_v p_v log p_v, nats                     if requested.entropy
    collisions           sum_v p_v^2, without gradient                if requested.collision
    candidate_logprobs   log p(candidate), float[N K]                 given candidates
    exact_kl             KL(p || softmax(reference / temperature))    given reference_logits, which get no gradient

    Source: collisions serve the optimal token baseline, arXiv:2602.07078.
    """
    num_tokens, vocabulary = logits.shape
    chunk_tokens = max(1, chunk_elements // vocabulary)
    inputs = (logits, targets, temperatures, candidates, reference_logits)
    if num_tokens <= chunk_tokens:
        return _measure(*inputs, requested)
    parts = [
        checkpoint(
            _measure,
            *(None if x is None else x[first : first + chunk_tokens] for x in inputs),
            requested,
            use_reentrant=False,
        )
        for first in range(0, num_tokens, chunk_tokens)
    ]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


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
        measured["entropies"] = _entropy(logprobs if requested.differentiate_entropy else logprobs.detach())
    if requested.collision:
        measured["collisions"] = (2 * logprobs.detach()).exp().sum(dim=-1)
    if candidates is not None:
        measured["candidate_logprobs"] = logprobs.gather(-1, candidates)
    if reference_logits is not None:
        measured["exact_kl"] = kl.exact(logprobs, _log_softmax(reference_logits.detach(), temperatures))
    return measured


def _log_softmax(logits: Float[Tensor, "N V"], temperatures: Float[Tensor, "N"]) -> Float[Tensor, "N V"]:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return (wide / temperatures[:, None]).log_softmax(dim=-1)


def _entropy(logprobs: Float[Tensor, "N V"]) -> Float[Tensor, "N"]:
    """-sum p log p; a token of probability 0 adds 0, where 0 * -inf would be undefined."""
    probabilities = logprobs.exp()
    return -(probabilities * logprobs.clamp(min=torch.finfo(logprobs.dtype).min)).sum(dim=-1)
