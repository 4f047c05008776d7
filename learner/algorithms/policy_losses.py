"""Policy losses: one number per token, negated so that lower is better."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def ppo_clip(
    ratio: Float[Tensor, "N"], advantages: Float[Tensor, "N"], *, clip_low: float, clip_high: float
) -> Float[Tensor, "N"]:
    """Clipped surrogate around the proximal policy.

    loss = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), ratio = pi_learner / pi_proximal

    Source: PPO, arXiv:1707.06347, eq. 7; clip_high > clip_low is DAPO's clip-higher, arXiv:2503.14476, eq. 10.
    """
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def is_clipped(
    ratio: Float[Tensor, "N"], advantages: Float[Tensor, "N"], *, clip_low: float, clip_high: float
) -> Bool[Tensor, "N"]:
    """Where `ppo_clip` has no gradient: (A > 0 and ratio > 1 + clip_high) or (A < 0 and ratio < 1 - clip_low)."""
    return ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))


def reinforce(learner_logprobs: Float[Tensor, "N"], advantages: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Score-function surrogate.

    loss = -A * log pi_learner

    Source: REINFORCE, Williams 1992, eq. 11.
    """
    return -advantages * learner_logprobs
