"""Importance: ratios between two policies' probabilities of the same tokens, and weights made of them.

All ratio arithmetic is in float32 on clamped log-ratios; a log-ratio that is not finite counts as 0 (ratio 1).
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +- this before exp, nats."""


def token_log_ratio(numerator: Float[Tensor, "N"], denominator: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """clamp(numerator - denominator, -20, 20) of two log-probabilities; not finite becomes 0."""
    difference = numerator.float() - denominator.float()
    finite = torch.where(difference.isfinite(), difference, torch.zeros_like(difference))
    return finite.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def token_ratio(numerator: Float[Tensor, "N"], denominator: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """exp(numerator - denominator) of two log-probabilities, clamped, neutral (1) where not finite.

    ratio_t = pi_numerator(a_t | s_t) / pi_denominator(a_t | s_t)
    """
    return token_log_ratio(numerator, denominator).exp()


def nonfinite(numerator: Float[Tensor, "N"], denominator: Float[Tensor, "N"]) -> Bool[Tensor, "N"]:
    """Where `token_ratio` had to put a neutral 1."""
    return ~(numerator - denominator).isfinite()


def token_tis(ratio: Float[Tensor, "N"], *, cap: float) -> Float[Tensor, "N"]:
    """Truncated importance weights, per token, without gradient.

    w_t = min(ratio_t, cap)

    Source: Truncated Importance Sampling, Ionides 2008 (arXiv:1606.02647 for RL); per token, Yao et al. 2025.
    """
    return ratio.detach().clamp(max=cap)


def token_mask(ratio: Float[Tensor, "N"], *, low: float, high: float) -> Float[Tensor, "N"]:
    """Importance weights that drop a token outside the bounds, without gradient.

    w_t = ratio_t if low <= ratio_t <= high else 0

    Source: IcePop, Ring-1T, arXiv:2510.18855, section 3.
    """
    weights = ratio.detach()
    return torch.where((weights >= low) & (weights <= high), weights, torch.zeros_like(weights))


def effective_sample_size(weights: Float[Tensor, "N"]) -> Float[Tensor, ""]:
    """Share of the samples that carry the estimate: 1 when all weights are equal, 1/N when one dominates.

    ESS = (sum w)^2 / (N * sum w^2)

    Source: Kong 1992; used per batch in VCPO, arXiv:2602.17616.
    """
    return weights.sum().square() / (weights.numel() * weights.square().sum())
