"""Token masks: which tokens of an update keep their gradient, decided from all of them at once and without gradient.

Each function must be given every token of an optimizer update, of all microbatches and ranks in one order: then the
result does not depend on how they are split. Log-ratios are measured at the start of the update, clamped and finite.
True = kept, but for `kl_cov_mask`.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from slipstream.learner.algorithms import segments


def m2po_mask(log_ratio: Float[Tensor, "N"], advantages: Float[Tensor, "N"], *, threshold: float) -> Bool[Tensor, "N"]:
    """Drop the largest squared log-ratios until the mean of the others is at most `threshold`.

    candidates: (A > 0 and ratio > 1) or (A < 0 and ratio < 1), ratio = pi_learner / pi_generator
    dropped: the fewest candidates, largest (log ratio)^2 first, with mean over the rest of (log ratio)^2 <= threshold

    Source: M2PO, arXiv:2510.01161, algorithm 1.
    """
    log_ratio = log_ratio.detach()
    candidates = (((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0))).nonzero().squeeze(1)
    squares, order = log_ratio[candidates].double().square().sort(stable=True)
    # In ascending order the mean of the first k grows with k: those within the threshold are a prefix.
    running_mean = squares.cumsum(0) / torch.arange(1, len(squares) + 1, device=squares.device)
    kept = torch.ones_like(advantages, dtype=torch.bool)
    kept[candidates[order[running_mean > threshold]]] = False
    return kept


def opsm_mask(
    generator_log_ratio: Float[Tensor, "N"],
    advantages: Float[Tensor, "N"],
    sequences: Int[Tensor, "N"],
    *,
    num_sequences: int,
    delta: float,
) -> Bool[Tensor, "N"]:
    """Drop the blamed tokens of sequences that the learner has become unlikely to write.

    dropped: A < 0 and mean_t log(pi_generator / pi_learner) > delta

    `generator_log_ratio` = learner - generator log-probabilities, so that engine mismatch counts too.
    Source: off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556, eq. 9.
    """
    drift = -segments.means(generator_log_ratio.detach(), sequences, num_segments=num_sequences)
    return ~((advantages < 0) & (drift > delta)[sequences])


def covariance(advantages: Float[Tensor, "N"], learner_logprobs: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Each token's part of the covariance between log-probability and advantage, which drives the entropy down.

    cov_t = (A_t - mean A) * (log pi_t - mean log pi); 0 where log pi is not finite

    Source: arXiv:2505.22617, eq. 10.
    """
    logprobs = learner_logprobs.detach()
    finite = logprobs.isfinite()
    mean = logprobs[finite].sum() / finite.sum().clamp(min=1)
    return (advantages - advantages.mean()) * torch.where(finite, logprobs - mean, 0.0)


def clip_cov_mask(
    covariances: Float[Tensor, "N"], *, share: float, low: float, high: float, generator: torch.Generator
) -> Bool[Tensor, "N"]:
    """Drop a few tokens at random among those of high covariance, to keep the entropy from collapsing.

    dropped: floor(share * N) tokens drawn from {t: low <= cov_t <= high}, all of these if they are fewer

    `generator`, on the CPU, makes the draw repeatable: seeded by the update, it is the same on every rank.
    Source: Clip-Cov, arXiv:2505.22617, eq. 11 and 12.
    """
    candidates = ((covariances >= low) & (covariances <= high)).nonzero().squeeze(1)
    drawn = torch.randperm(len(candidates), generator=generator)[: int(share * len(covariances))]
    kept = torch.ones_like(covariances, dtype=torch.bool)
    kept[candidates[drawn.to(candidates.device)]] = False
    return kept


def kl_cov_mask(covariances: Float[Tensor, "N"], *, share: float) -> Bool[Tensor, "N"]:
    """The tokens that `policy_losses.kl_cov` holds back: those of the largest covariance.

    True: the floor(share * N) largest cov_t, the earlier of equals

    Source: KL-Cov, arXiv:2505.22617, eq. 13.
    """
    penalised = torch.zeros_like(covariances, dtype=torch.bool)
    largest = covariances.argsort(descending=True, stable=True)[: int(share * len(covariances))]
    penalised[largest] = True
    return penalised
