"""Log-probabilities and entropy of chosen tokens, in at least float32, without a second copy of all logits."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_CHUNK_ELEMENTS = 1 << 24


def token_logprobs_and_entropy(
    logits: Float[Tensor, "N V"],
    targets: Int[Tensor, "N"],
    temperatures: Float[Tensor, "N"],
    *,
    differentiate_entropy: bool,
    chunk_elements: int = _CHUNK_ELEMENTS,
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
    """log softmax(logits / temperature)[target] and the entropy of the same distribution, nats.

    More than `chunk_elements` logits are worked on in chunks of tokens, recomputed in the backward pass, so that the
    float32 copies of one chunk are alive at a time.
    """
    num_tokens, vocabulary = logits.shape
    chunk_tokens = max(1, chunk_elements // vocabulary)
    if num_tokens <= chunk_tokens:
        return _chunk(logits, targets, temperatures, differentiate_entropy)
    parts = [
        checkpoint(_chunk, *pieces, differentiate_entropy, use_reentrant=False)
        for pieces in zip(
            logits.split(chunk_tokens), targets.split(chunk_tokens), temperatures.split(chunk_tokens), strict=True
        )
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(
    logits: Float[Tensor, "N V"],
    targets: Int[Tensor, "N"],
    temperatures: Float[Tensor, "N"],
    differentiate_entropy: bool,
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    logprobs = (wide / temperatures[:, None]).log_softmax(dim=-1)
    chosen = logprobs.gather(-1, targets[:, None])[:, 0]
    return chosen, _entropy(logprobs if differentiate_entropy else logprobs.detach())


def _entropy(logprobs: Float[Tensor, "N V"]) -> Float[Tensor, "N"]:
    """-sum p log p; a token of probability 0 adds 0, where 0 * -inf would be undefined."""
    probabilities = logprobs.exp()
    return -(probabilities * logprobs.clamp(min=torch.finfo(logprobs.dtype).min)).sum(dim=-1)
