"""Policy losses: one number per token, negated so that lower is better; nothing is averaged here.

`log_ratio` = learner - anchor log-probabilities, clamped and finite (`importance.token_log_ratio`); the anchor is the
proximal policy or, without one, the generator's. Its gradient is that of log pi_learner, so a formula with
sg(weight) * log pi_learner is written with `log_ratio` in its place: another value, the same gradient (sg: without
gradient).

Which tokens a method leaves without gradient is asked the same way of every loss, here and elsewhere: `idle_tokens`.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def idle_tokens(
    loss: Callable[[Tensor], Tensor], log_ratio: Float[Tensor, "N"], advantages: Float[Tensor, "N"]
) -> Bool[Tensor, "N"]:
    """Where `loss`, a function of the log-ratio alone, has no gradient although the advantage is not zero.

    It is read off the gradient itself, so it holds for any loss and cannot drift away from it.
    """
    with torch.enable_grad():
        leaf = log_ratio.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(leaf).sum(), leaf)
    return (gradient == 0) & (advantages != 0)


def ppo_clip(
    ratio: Float[Tensor, "N"],
    advantages: Float[Tensor, "N"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Float[Tensor, "N"]:
    """Clipped surrogate around the proximal policy.

    loss = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), ratio = pi_learner / pi_proximal
    where A < 0 and with dual_clip: loss = min(loss, -dual_clip * A)

    Source: PPO, arXiv:1707.06347, eq. 7; clip_high > clip_low is DAPO's clip-higher, arXiv:2503.14476, eq. 10; dual
    clip, arXiv:1912.09729. The two-sided clip of INTELLECT-2, arXiv:2505.07291, is the dual clip at its delta:
    both hold the ratio of A < 0 between 1 - clip_low and delta > 1 + clip_high.
    """
    _check_dual_clip(dual_clip)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    if dual_clip is None:
        return losses
    return torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)


def _check_dual_clip(dual_clip: float | None) -> None:
    if dual_clip is not None and not dual_clip > 1:
        message = f"dual_clip must be > 1, got {dual_clip}: negative advantages would have no gradient at ratio 1"
        raise ValueError(message)


def reinforce(learner_logprobs: Float[Tensor, "N"], advantages: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Score-function surrogate.

    loss = -A * log pi_learner

    Source: REINFORCE, Williams 1992, eq. 11. GPG, arXiv:2504.02546, is this loss with its own advantages.
    """
    return -advantages * learner_logprobs


def unclipped(log_ratio: Float[Tensor, "N"], advantages: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Importance-weighted surrogate without a trust region of its own.

    loss = -ratio * A

    Source: PPO, arXiv:1707.06347, eq. 6; M2PO, arXiv:2510.01161, multiplies it by `token_masks.m2po_mask`.
    """
    return -log_ratio.exp() * advantages


def kl_cov(
    log_ratio: Float[Tensor, "N"], advantages: Float[Tensor, "N"], penalised: Bool[Tensor, "N"], *, coefficient: float
) -> Float[Tensor, "N"]:
    """Surrogate that holds back the tokens whose covariance drives the entropy down, `token_masks.kl_cov_mask`.

    loss = -ratio * A + coefficient * |log ratio| * penalised

    Source: KL-Cov, arXiv:2505.22617, eq. 14.
    Differs: the paper writes KL(proximal, learner); per token this takes |log ratio|, as its authors' program does.
    """
    return unclipped(log_ratio, advantages) + coefficient * log_ratio.abs() * penalised


def cispo(
    log_ratio: Float[Tensor, "N"], advantages: Float[Tensor, "N"], *, clip_low: float | None, clip_high: float
) -> Float[Tensor, "N"]:
    """Score function with a clipped importance weight: clipping shrinks a token's gradient, never removes it.

    loss = -sg(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * log pi_learner

    `clip_low` None: no lower bound, as in the paper's runs.
    Source: CISPO, arXiv:2506.13585, eq. 4 and 5.
    """
    low = None if clip_low is None else 1 - clip_low
    weights = log_ratio.detach().exp().clamp(low, 1 + clip_high)
    return -weights * advantages * log_ratio


def sapo(
    log_ratio: Float[Tensor, "N"], advantages: Float[Tensor, "N"], *, tau_positive: float, tau_negative: float
) -> Float[Tensor, "N"]:
    """Soft gate in place of the clip.

    loss = -A * (4 / tau) * sigmoid(tau * (ratio - 1)), tau = tau_positive if A > 0 else tau_negative

    The gate's slope is 1 at ratio 1 and falls off on both sides, faster with a larger tau.
    Source: SAPO, arXiv:2511.20347, eq. 5 and 6.
    """
    tau = torch.where(advantages > 0, torch.full_like(advantages, tau_positive), tau_negative)
    return -advantages * (4 / tau) * torch.sigmoid(tau * (log_ratio.exp() - 1))


def dro(log_ratio: Float[Tensor, "N"], advantages: Float[Tensor, "N"], *, beta: float) -> Float[Tensor, "N"]:
    """Score function with a quadratic pull back to the anchor.

    loss = -A * log pi_learner + beta / 2 * (log ratio)^2

    Source: DRO, arXiv:2405.19107, per token and with the advantage for reward minus value.
    """
    return -advantages * log_ratio + beta / 2 * log_ratio.square()


def topr_token(log_ratio: Float[Tensor, "N"], advantages: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Tapered REINFORCE per token: what is praised counts fully, what is blamed fades as it becomes unlikely.

    loss = -sg(w) * A * log pi_learner, w = 1 if A > 0 else min(ratio, 1)

    Source: TOPR, arXiv:2503.14286, eq. 7 and 8.
    Differs: token ratios for that of the trajectory (`sequence_losses.topr` has that one); the sign is that of the
    advantage, not of the reward: it is the advantage that pushes a token down, without bound where nothing tapers it.
    """
    weights = torch.where(advantages > 0, 1.0, log_ratio.detach().exp().clamp(max=1))
    return -weights * advantages * log_ratio


def aspo(
    log_ratio: Float[Tensor, "N"], advantages: Float[Tensor, "N"], *, clip_low: float, clip_high: float, cap: float
) -> Float[Tensor, "N"]:
    """PPO-clip with the ratio turned over where A > 0, so that tokens left behind are raised most.

    A > 0:  loss = -sg(w) * A * log pi_learner, w = min(1 / ratio, cap) if ratio <= 1 + clip_high else 0
    else:   loss = ppo_clip with dual_clip = cap

    The cap of A > 0 is soft: it bounds the weight and leaves the gradient.
    Source: ASPO, arXiv:2510.06062, section 6, eq. 3.
    """
    ratio = log_ratio.exp()
    weights = (1 / ratio).clamp(max=cap) * (ratio <= 1 + clip_high)
    raised = -weights.detach() * advantages * log_ratio
    lowered = ppo_clip(ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=cap)
    return torch.where(advantages > 0, raised, lowered)


def dppo_tv(
    log_ratio: Float[Tensor, "N"],
    advantages: Float[Tensor, "N"],
    learner_logprobs: Float[Tensor, "N"],
    *,
    low: float,
    high: float,
    ratio_cap: float = 20.0,
) -> Float[Tensor, "N"]:
    """Importance-weighted score function that stops where the token's probability has moved too far, not its ratio.

    loss = -sg(min(ratio, ratio_cap) * kept) * A * log pi_learner
    not kept: (A > 0 and pi_learner - pi_anchor > high) or (A < 0 and pi_anchor - pi_learner > low)

    The paper's anchor is the generator's policy.
    Source: DPPO, arXiv:2602.04879, eq. 12 with the binary total variation, eq. 13.
    """
    learner, anchor = _probabilities(learner_logprobs, log_ratio)
    gain = learner - anchor
    kept = ~(((advantages > 0) & (gain > high)) | ((advantages < 0) & (-gain > low)))
    return -_capped(log_ratio, ratio_cap) * kept * advantages * log_ratio


def dppo_kl(
    log_ratio: Float[Tensor, "N"],
    advantages: Float[Tensor, "N"],
    learner_logprobs: Float[Tensor, "N"],
    *,
    low: float,
    high: float,
    ratio_cap: float = 20.0,
) -> Float[Tensor, "N"]:
    """As `dppo_tv`, measured by the KL between "this token" and "any other" of the two policies.

    K = pi_anchor * log(pi_anchor / pi_learner) + (1 - pi_anchor) * log((1 - pi_anchor) / (1 - pi_learner))
    not kept: (A > 0 and ratio > 1 and K > high) or (A < 0 and ratio < 1 and K > low)

    Source: DPPO, arXiv:2602.04879, eq. 12 with the binary KL, eq. 14.
    """
    learner, anchor = _probabilities(learner_logprobs, log_ratio)
    moved = -anchor * log_ratio.detach() + (1 - anchor) * (torch.log1p(-anchor) - torch.log1p(-learner))
    risen, fallen = log_ratio > 0, log_ratio < 0
    kept = ~(((advantages > 0) & risen & (moved > high)) | ((advantages < 0) & fallen & (moved > low)))
    return -_capped(log_ratio, ratio_cap) * kept * advantages * log_ratio


def _probabilities(learner_logprobs: Tensor, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """The token's probability under the learner and the anchor, at most 1 - 1e-7 so that log(1 - p) is finite."""
    learner = learner_logprobs.detach().to(log_ratio.dtype)
    return learner.exp().clamp(max=1 - 1e-7), (learner - log_ratio.detach()).exp().clamp(max=1 - 1e-7)


def _capped(log_ratio: Tensor, cap: float) -> Tensor:
    return log_ratio.detach().exp().clamp(max=cap)
