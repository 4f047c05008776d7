"""Rejection: tokens that stay in an update, from the drift between learner and generator policy.

x_t = log pi_learner - log pi_generator, the `log_ratio` of the inputs; one that is not finite counts as 0. Each
function returns one Bool per token, equal over a sequence unless `over` is "token"; several are combined by `&`.
`num_kept` counts the rest, for baselines and denominators that are to be taken after rejection.

A statistic is taken over "token" (each by itself), or over the sequence as "sum", "mean" or, of k2 and k3, "max": of a
ratio, which has a bound on either side, that is `veto`. k2 and k3 are never negative and take an upper bound only.
"""

import math
from collections.abc import Callable

from jaxtyping import Bool, Float, Int
from torch import Tensor

from slipstream.learner.algorithms import segments
from slipstream.learner.algorithms.importance import bounded
from slipstream.learner.algorithms.inputs import RatioInputs

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
