"""Importance: ratios between two policies' probabilities of the same tokens, and weights made of them.

All ratio arithmetic is in at least float32 on clamped log-ratios; a log-ratio that is not finite counts as 0 (ratio 1).
Weights correct for drift, log pi_proximal - log pi_generator, and never carry a gradient: grad(w log pi) would hold a
term log pi * grad w that no objective asks for. They are made in three steps: a level (LEVELS), bounds (`truncate` or
`mask`), and, if configured, `normalise`. Every step gives one number per token.

Rejection: tokens that stay in an update, from the drift between learner and generator policy.

x_t = log pi_learner - log pi_generator, the `log_ratio` of the inputs; one that is not finite counts as 0. Each
function returns one Bool per token, equal over a sequence unless `over` is "token"; several are combined by `&`.
`num_kept` counts the rest, for baselines and denominators that are to be taken after rejection.

A statistic is taken over "token" (each by itself), or over the sequence as "sum", "mean" or, of k2 and k3, "max": of a
ratio, which has a bound on either side, that is `veto`. k2 and k3 are never negative and take an upper bound only.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from slipstream.learner.algorithms import segments
from slipstream.learner.algorithms.inputs import RatioInputs


# --- a proximal policy without a forward pass: it anchors the trust region and corrects for drift, without gradient ---
def interpolation(
    token_versions: Int[Tensor, "N"], *, proximal_version: int, learner_version: int
) -> Float[Tensor, "N"]:
    """Position of the proximal policy between the generator's (0) and the learner's (1), from the versions.

    alpha = (v_proximal - v_token) / (v_learner - v_token), within [0, 1]; 0 of a token as new as the proximal policy

    `learner_version` is the version that the step in progress will make, so one more than `proximal_version`, or more
    where several updates make one version.

    Source: A-3PO, arXiv:2512.06547.
    Differs: of a token of lag k, alpha is k / (k + 1), because the proximal policy is the learner at the start of the
    step, as in decoupled PPO, and the learner is what the step makes. The authors' program takes the learner at the
    start as v_learner and the version before it as v_proximal: (k - 1) / k, so that at lag 1 nothing is corrected.
    """
    gone, whole = proximal_version - token_versions, learner_version - token_versions
    return (gone / whole.clamp(min=1)).clamp(0, 1)


def loglinear(
    generator_logprobs: Float[Tensor, "N"], learner_logprobs: Float[Tensor, "N"], *, alpha: Float[Tensor, "N"]
) -> Float[Tensor, "N"]:
    """Geometric interpolation of probabilities, not normalised.

    log pi_proximal = log pi_generator + alpha * (log pi_learner - log pi_generator)

    Drift and ratio share the whole log-ratio as alpha : 1 - alpha, so both shrink where the two policies agree.

    Source: A-3PO, arXiv:2512.06547 (log-linear form).
    """
    return torch.lerp(generator_logprobs.detach(), learner_logprobs.detach(), alpha.to(learner_logprobs.dtype))


# --- ratios ----------------------------------------------------------------------------------------------------------
LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +- this before exp, nats."""


def bounded(log_ratio: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """clamp(x, -20, 20) with the gradient of x; not finite becomes 0, without gradient."""
    # Replaced first, because a clamp lets NaN through.
    finite = torch.where(log_ratio.isfinite(), log_ratio, torch.zeros_like(log_ratio))
    # A clamp's own gradient is 0 beyond its bounds: the loss would let go of the tokens that are furthest off.
    return finite.detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND) + (finite - finite.detach())


def token_log_ratio(numerator: Float[Tensor, "N"], denominator: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """clamp(numerator - denominator, -20, 20) of two log-probabilities, as `bounded`; not finite becomes 0."""
    return bounded(_wide(numerator) - _wide(denominator))


def token_ratio(numerator: Float[Tensor, "N"], denominator: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """exp(numerator - denominator) of two log-probabilities, clamped, neutral (1) where not finite.

    ratio_t = pi_numerator(a_t | s_t) / pi_denominator(a_t | s_t)
    """
    return token_log_ratio(numerator, denominator).exp()


def nonfinite(numerator: Float[Tensor, "N"], denominator: Float[Tensor, "N"]) -> Bool[Tensor, "N"]:
    """Tokens whose `token_ratio` is a neutral 1 because a log-probability is not finite."""
    return ~(numerator - denominator).isfinite()


def token_level(inputs: RatioInputs) -> Float[Tensor, "N"]:
    """The ratio of each token by itself.

    w_t = exp(x_t)

    Biased by O(T^2) times the largest divergence, with a variance that does not grow with the length.

    Source: Truncated Importance Sampling, Yao et al. 2025; per-token ratios as in V-trace, arXiv:1802.01561.
    """
    return inputs.log_ratio.detach().exp()


def sequence_level(inputs: RatioInputs) -> Float[Tensor, "N"]:
    """The product of a sequence's ratios, the same at each of its tokens.

    w_i = prod_t exp(x_t) = exp(clamp(sum_t x_t, -20, 20))

    Unbiased but for the clamp, with a variance that grows exponentially with the length.

    Source: Liu, Li et al. 2025, "When Throughput Kills Stability".
    """
    totals = segments.sums(inputs.log_ratio.detach(), inputs.sequences, num_segments=inputs.num_sequences)
    return bounded(totals).exp()[inputs.sequences]


def geometric_level(inputs: RatioInputs) -> Float[Tensor, "N"]:
    """The geometric mean of a sequence's ratios, the same at each of its tokens.

    w_i = (prod_t exp(x_t))^(1 / T) = exp(mean_t x_t)

    Biased, but blind to the length: the scale of the ratio GSPO clips.

    Source: GSPO, arXiv:2507.18071, eq. 7.
    """
    means = segments.means(inputs.log_ratio.detach(), inputs.sequences, num_segments=inputs.num_sequences)
    return means.exp()[inputs.sequences]


LEVELS: dict[str, Callable[[RatioInputs], Tensor]] = {
    "token": token_level,
    "sequence": sequence_level,
    "geometric": geometric_level,
}
"""`correction.level` -> function: weight of each token, Float[N]."""


def truncate(weights: Float[Tensor, "N"], *, low: float = -math.inf, high: float) -> Float[Tensor, "N"]:
    """Weights pulled back to the bounds, without gradient.

    w = max(min(w, high), low)

    Source: Ionides 2008; Retrace, arXiv:1606.02647; per token and for language models, Yao et al. 2025.
    """
    return weights.detach().clamp(low, high)


def mask(weights: Float[Tensor, "N"], *, low: float = 0.0, high: float = math.inf) -> Float[Tensor, "N"]:
    """Weights that are 0 outside the bounds, without gradient; the bounds themselves are inside.

    w = w if low <= w <= high else 0

    Source: at the token level IcePop, Ring-1T, arXiv:2510.18855; at the sequence level masked importance sampling,
    Liu, Li et al. 2025, "When Throughput Kills Stability".
    """
    kept = weights.detach()
    return torch.where((kept >= low) & (kept <= high), kept, torch.zeros_like(kept))


def one_per_sequence(weights: Float[Tensor, "N"], inputs: RatioInputs) -> Float[Tensor, "S"]:
    """Weights of the sequence or geometric level, once for each sequence that has a token."""
    values = segments.maxima(weights, inputs.sequences, num_segments=inputs.num_sequences)
    return values[segments.sizes(inputs.sequences, num_segments=inputs.num_sequences) > 0]


def normalise(weights: Float[Tensor, "N"], *, mean: Float[Tensor, ""]) -> Float[Tensor, "N"]:
    """Weights divided by the mean of the whole update, so that bounds do not shrink the step; unchanged if all are 0.

    w = w / mean(w)

    The mean is taken after the bounds, over all microbatches and ranks: over tokens at the token level, over
    `one_per_sequence` at the others. It is an argument because a mean per microbatch would depend on the split.

    Source: self-normalised importance sampling, Kong 1992; after truncation, Liu, Li et al. 2025.
    """
    return weights.detach() / torch.where(mean > 0, mean.detach(), torch.ones_like(mean))


def effective_sample_size(weights: Float[Tensor, "N"]) -> Float[Tensor, ""]:
    """Share of the samples that carry the estimate: 1 when all weights are equal, 1/N when one dominates.

    ESS = (sum w)^2 / (N * sum w^2); 0 where all weights are

    Of tokens, or of sequences given `one_per_sequence`; the former is the larger one.

    Source: Kong 1992; used per batch in VCPO, arXiv:2602.17616.
    """
    spread = weights.numel() * weights.square().sum()
    return weights.sum().square() / torch.where(spread > 0, spread, torch.ones_like(spread))


def ess_learning_rate_scale(ess: float, *, power: float = 0.5, floor: float) -> float:
    """Factor of the learning rate by the share of samples that carry the gradient, `effective_sample_size`.

    scale = max(ess^power, floor), power 1/2 for Adam-like optimizers, 1 for SGD

    Source: VCPO, arXiv:2602.17616, learning rate by effective sample size.
    Differs: the floor, and that a share that is not a number (no weight is left) counts as 0. The paper's other half,
    the off-policy optimal baseline sum_i w_i^2 |grad_i|^2 R_i / sum_i w_i^2 |grad_i|^2, is missing: it takes the norm
    of every trajectory's gradient, a backward pass each. `optimal_token_baseline` is its form with a proxy.
    """
    return max(floor, min(ess, 1.0) ** power) if ess > 0 else floor


def _wide(logprobs: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    return logprobs if logprobs.dtype == torch.float64 else logprobs.float()


_OVER: dict[str, Callable[..., Tensor]] = {"sum": segments.sums, "mean": segments.means, "max": segments.maxima}


def keep_k1(inputs: RatioInputs, *, over: str, low: float = -math.inf, high: float = math.inf) -> Bool[Tensor, "N"]:
    """Keeps tokens whose ratio is inside the bounds.

    keep iff low <= exp(x) <= high        with x: x_t | sum_t x_t | mean_t x_t

    The sum is the product of ratios, and favours short sequences; the mean is their geometric mean, and does not.

    Source: Liu, Li et al. 2025, "When Throughput Kills Stability": masked importance sampling (sum), Geo-RS (mean).
    Differs: verl compares -x with the bounds' logarithms, so asymmetric ones hold there for generator / learner.
    """
    ratio = _aggregate(bounded(inputs.log_ratio.detach()), inputs, over=over).exp()
    return (ratio >= low) & (ratio <= high)


def keep_k2(inputs: RatioInputs, *, over: str, low: float = -math.inf, high: float = math.inf) -> Bool[Tensor, "N"]:
    """Keeps tokens whose squared log-ratio is small, in either direction.

    keep iff k2 <= high,  k2_t = x_t^2 / 2

    Source: k2 of Schulman, "Approximating KL Divergence"; as a criterion, verl's rollout correction.
    """
    squares = _aggregate(bounded(inputs.log_ratio.detach()).square() / 2, inputs, over=over)
    return (squares >= low) & (squares <= high)


def keep_k3(inputs: RatioInputs, *, over: str, low: float = -math.inf, high: float = math.inf) -> Bool[Tensor, "N"]:
    """Keeps tokens whose estimated divergence KL(generator || learner) is small.

    keep iff k3 <= high,  k3_t = exp(x_t) - 1 - x_t

    Source: k3 of Schulman, "Approximating KL Divergence"; as a criterion (K3-RS), Liu, Li et al. 2025.
    """
    drift = bounded(inputs.log_ratio.detach())
    divergence = _aggregate(drift.expm1() - drift, inputs, over=over)
    return (divergence >= low) & (divergence <= high)


STATISTICS: dict[str, Callable[..., Tensor]] = {"k1": keep_k1, "k2": keep_k2, "k3": keep_k3}
"""`correction.reject.statistic` -> function: whether each token stays, Bool[N]."""


def veto(inputs: RatioInputs, *, low: float, high: float) -> Bool[Tensor, "N"]:
    """Keeps the sequences of which every token's ratio is inside the bounds.

    keep iff for all t: low <= exp(x_t) <= high

    Source: Liu, Li et al. 2025, "When Throughput Kills Stability" (one token of a tiny ratio condemns its sequence).
    """
    ratio = bounded(inputs.log_ratio.detach()).exp()
    is_outside = ((ratio < low) | (ratio > high)).to(ratio.dtype)
    return segments.maxima(is_outside, inputs.sequences, num_segments=inputs.num_sequences)[inputs.sequences] == 0


def num_kept(keep: Bool[Tensor, "N"], sequences: Int[Tensor, "N"], *, num_sequences: int) -> Int[Tensor, "S"]:
    """Number of tokens that stay, of each sequence; a sequence with 0 has left."""
    return segments.sizes(sequences[keep], num_segments=num_sequences)


def _aggregate(values: Float[Tensor, "N"], inputs: RatioInputs, *, over: str) -> Float[Tensor, "N"]:
    if over == "token":
        return values
    return _OVER[over](values, inputs.sequences, num_segments=inputs.num_sequences)[inputs.sequences]
