"""Importance ratios, importance weights, and rejection.

Log-ratios are clamped, in at least float32, and 0 if not finite. x_t is the `log_ratio` of the inputs.

Importance weights correct for drift, x_t = log pi_proximal - log pi_generator. They have no gradient, because
grad(w log pi) would add an unwanted term log pi * grad w. The steps are a level (`token_level`, ...), bounds
(`truncate` or `mask`), and optionally `normalize`.

Rejection removes tokens by x_t = log pi_learner - log pi_generator. Each function returns one bool per token, True =
keep. Statistics are per token (`over="token"`) or per sequence: "sum", "mean", or, for k2 and k3, "max". `veto`
replaces "max" for ratios, which have two bounds.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from slipstream.learner.algorithms import segments
from slipstream.learner.algorithms.inputs import RatioInputs


# --- a proximal policy without a forward pass, and ratios -------------------------------------------------------------
def interpolation(lags: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Position of the proximal policy between generator (0) and learner (1), from lags k >= 0.

    alpha = (v_proximal - v_token) / (v_learner - v_token) = k / (k + 1)

    Source: A-3PO, arXiv:2512.06547.
    Differs: v_proximal is the start of the step that produces v_learner, as in decoupled PPO. The authors' code starts
    at v_learner: alpha is (k - 1) / k, and lag 1 is not corrected.
    """
    return lags / (lags + 1)


def loglinear(
    generator_logprobs: Float[Tensor, "N"], learner_logprobs: Float[Tensor, "N"], *, alpha: Float[Tensor, "N"]
) -> Float[Tensor, "N"]:
    """Unnormalized geometric interpolation: splits the log-ratio into drift and ratio as alpha : 1 - alpha.

    log pi_proximal = log pi_generator + alpha * (log pi_learner - log pi_generator)

    Source: A-3PO, arXiv:2512.06547 (log-linear form).
    """
    return torch.lerp(generator_logprobs.detach(), learner_logprobs.detach(), alpha.to(learner_logprobs.dtype))


LOG_RATIO_BOUND = 20.0
"""Bound on |log-ratio|, nats."""


def bounded(log_ratio: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """clamp(x, -20, 20) with the gradient of x. Non-finite values become 0, without gradient."""
    finite = torch.where(log_ratio.isfinite(), log_ratio, torch.zeros_like(log_ratio))
    # Beyond its bounds, clamp would remove the gradient of the most off-policy tokens.
    return finite.detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND) + (finite - finite.detach())


def token_log_ratio(numerator: Float[Tensor, "N"], denominator: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """`bounded` difference of two log-probabilities."""
    return bounded(_wide(numerator) - _wide(denominator))


def token_ratio(numerator: Float[Tensor, "N"], denominator: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """pi_numerator(a_t | s_t) / pi_denominator(a_t | s_t), bounded."""
    return token_log_ratio(numerator, denominator).exp()


def nonfinite(numerator: Float[Tensor, "N"], denominator: Float[Tensor, "N"]) -> Bool[Tensor, "N"]:
    """Tokens with a `token_ratio` of 1 because a log-probability is not finite."""
    return ~(numerator - denominator).isfinite()


def token_level(inputs: RatioInputs) -> Float[Tensor, "N"]:
    """Ratio of each token.

    w_t = exp(x_t)

    Bias O(T^2) times the largest divergence. Variance independent of the length.

    Source: Truncated Importance Sampling, Yao et al. 2025; per-token ratios as in V-trace, arXiv:1802.01561.
    """
    return inputs.log_ratio.detach().exp()


def sequence_level(inputs: RatioInputs) -> Float[Tensor, "N"]:
    """Product of a sequence's ratios, repeated for each token.

    w_i = prod_t exp(x_t) = exp(clamp(sum_t x_t, -20, 20))

    Unbiased except for the clamp. Variance exponential in the length.

    Source: Liu, Li et al. 2025, "When Throughput Kills Stability".
    """
    totals = segments.sums(inputs.log_ratio.detach(), inputs.sequences, num_segments=inputs.num_sequences)
    return bounded(totals).exp()[inputs.sequences]


def geometric_level(inputs: RatioInputs) -> Float[Tensor, "N"]:
    """Geometric mean of a sequence's ratios, repeated for each token.

    w_i = (prod_t exp(x_t))^(1 / T) = exp(mean_t x_t)

    Biased, but independent of the length.

    Source: GSPO, arXiv:2507.18071, eq. 7.
    """
    means = segments.means(inputs.log_ratio.detach(), inputs.sequences, num_segments=inputs.num_sequences)
    return means.exp()[inputs.sequences]


def truncate(weights: Float[Tensor, "N"], *, low: float = -math.inf, high: float) -> Float[Tensor, "N"]:
    """Weights clamped to the bounds, without gradient.

    w = max(min(w, high), low)

    Source: Ionides 2008; Retrace, arXiv:1606.02647; per token and for language models, Yao et al. 2025.
    """
    return weights.detach().clamp(low, high)


def mask(weights: Float[Tensor, "N"], *, low: float = 0.0, high: float = math.inf) -> Float[Tensor, "N"]:
    """Weights set to 0 outside the inclusive bounds, without gradient.

    w = w if low <= w <= high else 0

    Source: IcePop, Ring-1T, arXiv:2510.18855, per token; masked importance sampling, Liu, Li et al. 2025, "When
    Throughput Kills Stability", per sequence.
    """
    kept = weights.detach()
    return torch.where((kept >= low) & (kept <= high), kept, torch.zeros_like(kept))


def one_per_sequence(weights: Float[Tensor, "N"], inputs: RatioInputs) -> Float[Tensor, "S"]:
    """Weights of the sequence or geometric level, one per sequence with a token."""
    values = segments.maxima(weights, inputs.sequences, num_segments=inputs.num_sequences)
    return values[segments.sizes(inputs.sequences, num_segments=inputs.num_sequences) > 0]


def normalize(weights: Float[Tensor, "N"], *, mean: Float[Tensor, ""]) -> Float[Tensor, "N"]:
    """Weights divided by their mean, so that bounds do not shrink the step; unchanged if all 0.

    w = w / mean(w)

    `mean`: over all microbatches and ranks, of tokens at the token level, else of `one_per_sequence`.

    Source: self-normalized importance sampling, Kong 1992; after truncation, Liu, Li et al. 2025.
    """
    return weights.detach() / torch.where(mean > 0, mean.detach(), torch.ones_like(mean))


def effective_sample_size(weights: Float[Tensor, "N"]) -> Float[Tensor, ""]:
    """Effective fraction of samples: 1 if weights are equal, 1/N if one dominates.

    ESS = (sum w)^2 / (N * sum w^2); 0 if all weights are 0

    Source: Kong 1992; used per batch in VCPO, arXiv:2602.17616.
    """
    spread = weights.numel() * weights.square().sum()
    return weights.sum().square() / torch.where(spread > 0, spread, torch.ones_like(spread))


def ess_learning_rate_scale(ess: float, *, power: float = 0.5, floor: float = 0.1) -> float:
    """Learning-rate factor for an `effective_sample_size`.

    scale = max(ess^power, floor), with power 1/2 for Adam-like optimizers and 1 for SGD

    Source: VCPO, arXiv:2602.17616, learning rate by effective sample size.
    Differs: adds the floor, so one dominating answer does not stop training, and treats NaN as 0. Omits the optimal
    baseline (see `optimal_token_baseline`).
    """
    return max(floor, min(ess, 1.0) ** power) if ess > 0 else floor


def _wide(logprobs: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    return logprobs if logprobs.dtype == torch.float64 else logprobs.float()


_OVER: dict[str, Callable[..., Tensor]] = {"sum": segments.sums, "mean": segments.means, "max": segments.maxima}


def keep_k1(inputs: RatioInputs, *, over: str, low: float = -math.inf, high: float = math.inf) -> Bool[Tensor, "N"]:
    """Keep tokens with a ratio within the bounds.

    keep iff low <= exp(x) <= high        with x: x_t | sum_t x_t | mean_t x_t

    Source: Liu, Li et al. 2025, "When Throughput Kills Stability": masked importance sampling (sum), Geo-RS (mean).
    Differs: verl compares -x, so its bounds apply to generator / learner.
    """
    ratio = _aggregate(bounded(inputs.log_ratio.detach()), inputs, over=over).exp()
    return (ratio >= low) & (ratio <= high)


def keep_k2(inputs: RatioInputs, *, over: str, low: float = -math.inf, high: float = math.inf) -> Bool[Tensor, "N"]:
    """Keep tokens with a small squared log-ratio.

    keep iff low <= k2 <= high,  k2_t = x_t^2 / 2

    Source: k2 of Schulman, "Approximating KL Divergence"; as a criterion, verl's rollout correction.
    """
    squares = _aggregate(bounded(inputs.log_ratio.detach()).square() / 2, inputs, over=over)
    return (squares >= low) & (squares <= high)


def keep_k3(inputs: RatioInputs, *, over: str, low: float = -math.inf, high: float = math.inf) -> Bool[Tensor, "N"]:
    """Keep tokens with a small estimate of KL(generator || learner).

    keep iff low <= k3 <= high,  k3_t = exp(x_t) - 1 - x_t

    Source: k3 of Schulman, "Approximating KL Divergence"; as a criterion (K3-RS), Liu, Li et al. 2025.
    """
    drift = bounded(inputs.log_ratio.detach())
    divergence = _aggregate(drift.expm1() - drift, inputs, over=over)
    return (divergence >= low) & (divergence <= high)


def veto(inputs: RatioInputs, *, low: float, high: float) -> Bool[Tensor, "N"]:
    """Keep sequences if every token's ratio is within the bounds.

    keep iff for all t: low <= exp(x_t) <= high

    Source: Liu, Li et al. 2025, "When Throughput Kills Stability" (rejects a sequence for one tiny ratio).
    """
    ratio = bounded(inputs.log_ratio.detach()).exp()
    is_outside = ((ratio < low) | (ratio > high)).to(ratio.dtype)
    return segments.maxima(is_outside, inputs.sequences, num_segments=inputs.num_sequences)[inputs.sequences] == 0


def _aggregate(values: Float[Tensor, "N"], inputs: RatioInputs, *, over: str) -> Float[Tensor, "N"]:
    if over == "token":
        return values
    return _OVER[over](values, inputs.sequences, num_segments=inputs.num_sequences)[inputs.sequences]
