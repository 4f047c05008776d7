"""Policy losses: one number per token, negated so that lower is better; nothing is averaged here.

The proximal policy of `LossInputs.log_ratio` is called anchor where it may be the generator's own. The gradient of the
log-ratio is that of log pi_learner, so a formula with sg(weight) * log pi_learner is written with the log-ratio
instead: another value, the same gradient (sg: without gradient).
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from slipstream.learner.algorithms.inputs import LossInputs, known


def idle_tokens(
    losses: Float[Tensor, "N"], log_ratio: Float[Tensor, "N"], advantages: Float[Tensor, "N"]
) -> Bool[Tensor, "N"]:
    """Tokens that a loss leaves without gradient although their advantage is not zero, as a clip does.

    Read off the gradient of `losses` by their `log_ratio`, so that it holds for any loss and cannot diverge from it.
    """
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(losses.sum(), log_ratio)
    return (gradient == 0) & (advantages != 0)


def ppo_clip(
    inputs: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Float[Tensor, "N"]:
    """Clipped surrogate around the proximal policy.

    loss = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), ratio = pi_learner / pi_proximal
    where A < 0 and with dual_clip > 1: loss = min(loss, -dual_clip * A)

    The two-sided clip of INTELLECT-2, arXiv:2505.07291, is the dual clip at its delta: both hold the ratio of A < 0
    between 1 - clip_low and delta > 1 + clip_high.

    Source: PPO, arXiv:1707.06347, eq. 7; clip_high > clip_low is DAPO's clip-higher, arXiv:2503.14476, eq. 10; dual
    clip, arXiv:1912.09729.
    """
    ratio, advantages = inputs.log_ratio.exp(), inputs.advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    if dual_clip is None:
        return losses
    return torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)


def reinforce(inputs: LossInputs) -> Float[Tensor, "N"]:
    """Score-function surrogate.

    loss = -A * log pi_learner

    Source: REINFORCE, Williams 1992, eq. 11. GPG, arXiv:2504.02546, is this loss with its own advantages.
    """
    # The value of log pi_learner with the gradient of the log-ratio, the only variable that has one.
    learner_logprobs = inputs.learner_logprobs + (inputs.log_ratio - inputs.log_ratio.detach())
    return -inputs.advantages * learner_logprobs


def unclipped(inputs: LossInputs) -> Float[Tensor, "N"]:
    """Importance-weighted surrogate without a trust region of its own.

    loss = -ratio * A

    Source: PPO, arXiv:1707.06347, eq. 6; M2PO, arXiv:2510.01161, multiplies it by `token_masks.m2po_mask`.
    """
    return -inputs.log_ratio.exp() * inputs.advantages


def clip_cov(inputs: LossInputs, *, clip_low: float, clip_high: float) -> Float[Tensor, "N"]:
    """PPO-clip without the tokens that `token_masks.clip_cov_mask` drops.

    loss = ppo_clip * selected

    Source: Clip-Cov, arXiv:2505.22617, eq. 11 and 12.
    """
    return ppo_clip(inputs, clip_low=clip_low, clip_high=clip_high) * known(inputs.is_selected)


def kl_cov(inputs: LossInputs, *, coefficient: float) -> Float[Tensor, "N"]:
    """Surrogate that penalises the tokens whose covariance drives the entropy down, `token_masks.kl_cov_mask`.

    loss = -ratio * A + coefficient * |log ratio| * selected

    Source: KL-Cov, arXiv:2505.22617, eq. 14.
    Differs: the paper writes KL(proximal, learner); per token this takes |log ratio|, as its authors' program does.
    """
    return unclipped(inputs) + coefficient * inputs.log_ratio.abs() * known(inputs.is_selected)


def cispo(inputs: LossInputs, *, clip_low: float | None, clip_high: float) -> Float[Tensor, "N"]:
    """Score function with a clipped importance weight: clipping shrinks a token's gradient, never removes it.

    loss = -sg(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * log pi_learner

    `clip_low` None: no lower bound, as in the paper's runs.
    Source: CISPO, arXiv:2506.13585, eq. 4 and 5.
    """
    low = None if clip_low is None else 1 - clip_low
    weights = inputs.log_ratio.detach().exp().clamp(low, 1 + clip_high)
    return -weights * inputs.advantages * inputs.log_ratio


def sapo(inputs: LossInputs, *, tau_positive: float, tau_negative: float) -> Float[Tensor, "N"]:
    """Soft gate instead of the clip.

    loss = -A * (4 / tau) * sigmoid(tau * (ratio - 1)), tau = tau_positive if A > 0 else tau_negative

    The gate's slope is 1 at ratio 1 and falls off on both sides, faster with a larger tau.
    Source: SAPO, arXiv:2511.20347, eq. 5 and 6.
    """
    advantages = inputs.advantages
    tau = torch.where(advantages > 0, torch.full_like(advantages, tau_positive), tau_negative)
    return -advantages * (4 / tau) * torch.sigmoid(tau * (inputs.log_ratio.exp() - 1))


def dro(inputs: LossInputs, *, beta: float) -> Float[Tensor, "N"]:
    """Score function with a quadratic pull back to the anchor.

    loss = -A * log pi_learner + beta / 2 * (log ratio)^2

    Source: DRO, arXiv:2405.19107, per token and with the advantage for reward minus value.
    """
    return -inputs.advantages * inputs.log_ratio + beta / 2 * inputs.log_ratio.square()


def aspo(inputs: LossInputs, *, clip_low: float, clip_high: float, cap: float) -> Float[Tensor, "N"]:
    """PPO-clip with the ratio inverted where A > 0, so that tokens left behind are raised most.

    A > 0:  loss = -sg(w) * A * log pi_learner, w = min(1 / ratio, cap) if ratio <= 1 + clip_high else 0
    else:   loss = ppo_clip with dual_clip = cap

    The cap of A > 0 is soft: it bounds the weight and leaves the gradient.
    Source: ASPO, arXiv:2510.06062, section 6, eq. 3.
    """
    ratio = inputs.log_ratio.detach().exp()
    weights = (1 / ratio).clamp(max=cap) * (ratio <= 1 + clip_high)
    raised = -weights * inputs.advantages * inputs.log_ratio
    lowered = ppo_clip(inputs, clip_low=clip_low, clip_high=clip_high, dual_clip=cap)
    return torch.where(inputs.advantages > 0, raised, lowered)


def dppo(
    inputs: LossInputs, *, divergence: str, low: float, high: float, ratio_cap: float = 20.0
) -> Float[Tensor, "N"]:
    """Importance-weighted score function that stops where the token's probability has moved too far, not its ratio.

    loss = -sg(min(ratio, ratio_cap) * kept) * A * log pi_learner
    not kept: (A > 0 and ratio > 1 and D > high) or (A < 0 and ratio < 1 and D > low)

    tv:  D = |pi_learner - pi_anchor|
    kl:  D = pi_anchor * log(pi_anchor / pi_learner) + (1 - pi_anchor) * log((1 - pi_anchor) / (1 - pi_learner))

    Both compare "this token" with "any other". The paper's anchor is the generator's policy.
    Source: DPPO, arXiv:2602.04879, eq. 12 with the binary total variation, eq. 13, or the binary KL, eq. 14.
    """
    advantages, log_ratio = inputs.advantages, inputs.log_ratio.detach()
    # At most 1 - 1e-7, so that log(1 - p) is finite.
    learner = inputs.learner_logprobs.exp().clamp(max=1 - 1e-7)
    anchor = (inputs.learner_logprobs - log_ratio).exp().clamp(max=1 - 1e-7)
    if divergence == "tv":
        moved = (learner - anchor).abs()
    else:
        moved = -anchor * log_ratio + (1 - anchor) * (torch.log1p(-anchor) - torch.log1p(-learner))
    is_raised_far = (advantages > 0) & (log_ratio > 0) & (moved > high)
    is_lowered_far = (advantages < 0) & (log_ratio < 0) & (moved > low)
    weights = log_ratio.exp().clamp(max=ratio_cap) * ~(is_raised_far | is_lowered_far)
    return -weights * advantages * inputs.log_ratio
