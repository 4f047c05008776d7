"""KL estimators: KL(learner || reference) per token.

x = log pi_learner - log pi_reference, clamped to +-20, for tokens sampled from pi_learner. k1 and k3 are unbiased in
value. As losses, only k2, the straight-through forms (`_st`), `k3_off_policy`, and `exact` have the KL's gradient. That
of k1 is 0 on average, that of k3 is the gradient of KL(reference || learner).

Source: Schulman, "Approximating KL Divergence"; for the gradients, Shah et al., arXiv:2512.21852.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from slipstream.learner.algorithms.importance import token_log_ratio, token_ratio
from slipstream.learner.algorithms.inputs import KlInputs, known

Estimator = Callable[[KlInputs], Tensor]

KL_ERROR_BOUND = 0.2
"""Bound on kl / target - 1 in `adaptive_coefficient`."""


def k1(inputs: KlInputs) -> Float[Tensor, "N"]:
    """x. Unbiased with high variance; may be negative."""
    return token_log_ratio(inputs.learner_logprobs, inputs.reference_logprobs)


def absolute(inputs: KlInputs) -> Float[Tensor, "N"]:
    """|x|. Biased and nonnegative; below k2 in the tails."""
    return k1(inputs).abs()


def k2(inputs: KlInputs) -> Float[Tensor, "N"]:
    """x^2 / 2. Biased and nonnegative."""
    return k1(inputs).square() / 2


def k3(inputs: KlInputs) -> Float[Tensor, "N"]:
    """exp(-x) - 1 + x. Unbiased and nonnegative, with lower variance than k1."""
    log_ratio = token_log_ratio(inputs.reference_logprobs, inputs.learner_logprobs)
    return log_ratio.expm1() - log_ratio


def k3_off_policy(inputs: KlInputs) -> Float[Tensor, "N"]:
    """k3 for tokens sampled from the generator, unbiased in value and gradient.

    pi_learner / pi_generator * k3

    The ratio is differentiated. Don't multiply by another importance weight.

    Source: DeepSeek-V3.2, arXiv:2512.02556, unbiased KL estimate.
    """
    return token_ratio(inputs.learner_logprobs, known(inputs.generator_logprobs)) * k3(inputs)


def straight_through(estimator: Estimator) -> Estimator:
    """The value of `estimator` with the gradient of k2: sg(value) + k2 - sg(k2)."""

    def estimate(inputs: KlInputs) -> Float[Tensor, "N"]:
        carrier = k2(inputs)
        return estimator(inputs).detach() + (carrier - carrier.detach())

    return estimate


KL_ESTIMATORS: dict[str, Estimator] = {
    "k1": k1,
    "abs": absolute,
    "k2": k2,
    "k3": k3,
    "k1_st": straight_through(k1),
    "abs_st": straight_through(absolute),
    "k3_st": straight_through(k3),
    "k3_off_policy": k3_off_policy,
}
"""`kl.estimator` -> function that returns Float[N], nats."""


def exact(first_logprobs: Float[Tensor, "N V"], second_logprobs: Float[Tensor, "N V"]) -> Float[Tensor, "N"]:
    """KL(first || second) over the vocabulary, per row.

    sum_v p_v * (log p_v - log q_v); a token with p_v = 0 adds 0 for any q_v
    """
    lowest = torch.finfo(first_logprobs.dtype).min
    difference = first_logprobs.clamp(min=lowest) - second_logprobs.clamp(min=lowest)
    return (first_logprobs.exp() * difference).sum(dim=-1)


def adaptive_coefficient(coefficient: float, *, kl: float, target: float, num_sequences: int, horizon: int) -> float:
    """Raise the KL coefficient while the KL is above its target, lower it while below.

    beta <- beta * (1 + clip(kl / target - 1, -0.2, 0.2) * num_sequences / horizon)

    `kl` and `target` are in nats, `horizon` in sequences.

    Source: Fine-Tuning Language Models from Human Preferences, arXiv:1909.08593, section 2.2.
    Differs: num_sequences / horizon is at most 1, so that beta stays positive. A KL of NaN leaves beta unchanged.
    """
    if math.isnan(kl):
        return coefficient
    error = min(max(kl / target - 1, -KL_ERROR_BOUND), KL_ERROR_BOUND)
    return coefficient * (1 + error * min(num_sequences / horizon, 1.0))
