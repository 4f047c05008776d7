"""Token masks: which tokens of an update keep their gradient.

True = keep, except for `kl_cov_mask`. Except in `opsm`, formulas exclude tokens that the correction rejected
(`is_counted` false). Their results do not matter.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from slipstream.learner.algorithms import segments
from slipstream.learner.algorithms.inputs import MaskInputs


def m2po(inputs: MaskInputs, *, threshold: float) -> Bool[Tensor, "N"]:
    """Drop the candidates with the largest squared log-ratios.

    candidates: (A > 0 and ratio > 1) or (A < 0 and ratio < 1), ratio = pi_learner / pi_generator
    dropped: the fewest candidates, largest (log ratio)^2 first, such that the mean of the rest is <= threshold

    Source: M2PO, arXiv:2510.01161, algorithm 1.
    Differs: no floor: candidates may all be dropped. AReaL's form, arXiv:2505.24298, always keeps the smallest, treats
    all tokens as candidates, and measures log(generator/proximal).
    """
    log_ratio, advantages = inputs.log_ratio, inputs.advantages
    moves_away = ((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0))
    candidates = (moves_away & inputs.is_counted).nonzero().squeeze(1)
    squares, order = log_ratio[candidates].double().square().sort(stable=True)
    # The running mean of sorted values increases, so kept tokens form a prefix.
    running_mean = squares.cumsum(0) / torch.arange(1, len(squares) + 1, device=squares.device)
    kept = torch.ones_like(advantages, dtype=torch.bool)
    kept[candidates[order[running_mean > threshold]]] = False
    return kept


def opsm(inputs: MaskInputs, *, delta: float) -> Bool[Tensor, "N"]:
    """Drop tokens with negative advantage in sequences that are now unlikely under the learner.

    dropped: A < 0 and mean_t log(pi_generator / pi_learner) > delta

    The mean includes rejected tokens and the mismatch between the engines.
    Source: off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556, eq. 9.
    """
    drift = -segments.means(inputs.log_ratio, inputs.sequences, num_segments=inputs.num_sequences)
    return ~((inputs.advantages < 0) & (drift > delta)[inputs.sequences])


def covariance(inputs: MaskInputs) -> Float[Tensor, "N"]:
    """Contribution of each token to the covariance of log-probability and advantage. High covariance reduces entropy.

    cov_t = (A_t - mean A) * (log pi_t - mean log pi); 0 if log pi is not finite

    Source: arXiv:2505.22617, eq. 10.
    """
    logprobs, advantages = inputs.learner_logprobs, inputs.advantages
    is_finite = logprobs.isfinite()
    counted = logprobs[is_finite & inputs.is_counted]
    centered = torch.where(is_finite, logprobs - counted.sum() / max(1, len(counted)), 0.0)
    return (advantages - advantages[inputs.is_counted].mean()) * centered


def clip_cov_mask(
    inputs: MaskInputs, *, fraction: float, covariance_low: float, covariance_high: float
) -> Bool[Tensor, "N"]:
    """Drop random tokens with high covariance to prevent entropy collapse.

    dropped: max(1, floor(fraction * N)) tokens drawn from {t: covariance_low <= cov_t <= covariance_high}, all if
    fewer, none if fraction is 0

    Source: Clip-Cov, arXiv:2505.22617, eq. 11 and 12.
    Differs: at least one token, like the authors' code, which also excludes clipped tokens.
    """
    covariances = covariance(inputs)
    is_high = (covariances >= covariance_low) & (covariances <= covariance_high)
    candidates = (is_high & inputs.is_counted).nonzero().squeeze(1)
    # On the CPU, so that every rank draws the same tokens.
    generator = torch.Generator().manual_seed(inputs.seed)
    drawn = torch.randperm(len(candidates), generator=generator)[: _count_of(inputs, fraction)]
    kept = torch.ones_like(is_high)
    kept[candidates[drawn.to(candidates.device)]] = False
    return kept


def kl_cov_mask(inputs: MaskInputs, *, fraction: float) -> Bool[Tensor, "N"]:
    """Tokens with the largest covariance, for `policy_losses.kl_cov`.

    True: the max(1, floor(fraction * N)) largest cov_t, earlier ones first if equal; none if fraction is 0

    Source: KL-Cov, arXiv:2505.22617, eq. 13.
    Differs: at least one token, as in `clip_cov_mask`.
    """
    counted = inputs.is_counted.nonzero().squeeze(1)
    largest = covariance(inputs)[counted].argsort(descending=True, stable=True)[: _count_of(inputs, fraction)]
    selected = torch.zeros_like(inputs.is_counted)
    selected[counted[largest]] = True
    return selected


def _count_of(inputs: MaskInputs, fraction: float) -> int:
    return max(1, int(fraction * int(inputs.is_counted.sum()))) if fraction else 0
