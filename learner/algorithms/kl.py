"""KL estimators: divergence of the learner from a reference, per token.

x = log pi_learner - log pi_reference, clamped to +-20, of tokens sampled from pi_learner. As values, k1 and k3 have
KL(learner || reference) as their expectation. As losses, only k2, the straight-through forms (name with a +),
`k3_off_policy` and `exact` have its gradient: that of k1 is 0 on average, and that of k3 is KL(reference || learner)'s.

Source: Schulman, "Approximating KL Divergence"; their gradients, Shah et al., arXiv:2512.21852.
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
"""Largest relative distance of a measured KL from its target that the adaptive coefficient reacts to."""


def k1(inputs: KlInputs) -> Float[Tensor, "N"]:
    """x: unbiased, high variance, may be negative."""
    return token_log_ratio(inputs.learner_logprobs, inputs.reference_logprobs)


def absolute(inputs: KlInputs) -> Float[Tensor, "N"]:
    """|x|: biased, never negative, grows slower than k2 in the tails."""
    return k1(inputs).abs()


def k2(inputs: KlInputs) -> Float[Tensor, "N"]:
    """x^2 / 2: biased, never negative; as a loss its gradient is that of the KL."""
    return k1(inputs).square() / 2


def k3(inputs: KlInputs) -> Float[Tensor, "N"]:
    """exp(-x) - 1 + x: unbiased, never negative, lower variance than k1."""
    log_ratio = token_log_ratio(inputs.reference_logprobs, inputs.learner_logprobs)
    return log_ratio.expm1() - log_ratio


def k3_off_policy(inputs: KlInputs) -> Float[Tensor, "N"]:
    """k3 of tokens that another policy sampled; unbiased in value and in gradient.

    pi_learner / pi_generator * k3, the ratio with its gradient

    The gradient through the ratio is what turns k3's into that of KL(learner || reference). The ratio stands inside, so
    no importance weight is to be put on it a second time.

    Source: DeepSeek-V3.2, arXiv:2512.02556, unbiased KL estimate.
    """
    return token_ratio(inputs.learner_logprobs, known(inputs.generator_logprobs)) * k3(inputs)


def straight_through(estimator: Estimator) -> Estimator:
    """The value of `estimator` with the gradient of k2, which is that of the KL.

    value + k2 - sg(k2)
    """

    def estimate(inputs: KlInputs) -> Float[Tensor, "N"]:
        carrier = k2(inputs)
        return estimator(inputs).detach() + (carrier - carrier.detach())

    return estimate


KL_ESTIMATORS: dict[str, Estimator] = {
    "k1": k1,
    "abs": absolute,
    "k2": k2,
    "k3": k3,
    "k1+": straight_through(k1),
    "abs+": straight_through(absolute),
    "k3+": straight_through(k3),
    "k3_off_policy": k3_off_policy,
}
"""`kl.estimator` -> function: estimate of each token, nats, Float[N]."""


def exact(first_logprobs: Float[Tensor, "N V"], second_logprobs: Float[Tensor, "N V"]) -> Float[Tensor, "N"]:
    """KL(first || second) over the whole vocabulary; no sampling, no variance.

    sum_v p_v * (log p_v - log q_v); a token of probability 0 adds 0, whatever its reference

    Rows do not depend on each other, so any chunk of them may be given.
    """
    lowest = torch.finfo(first_logprobs.dtype).min
    difference = first_logprobs.clamp(min=lowest) - second_logprobs.clamp(min=lowest)
    return (first_logprobs.exp() * difference).sum(dim=-1)


def adaptive_coefficient(coefficient: float, *, kl: float, target: float, num_sequences: int, horizon: int) -> float:
    """The KL coefficient, raised while the measured KL is above its target and lowered while below.

    beta <- beta * (1 + clip(kl / target - 1, -0.2, 0.2) * num_sequences / horizon)

    `kl` is the step's measurement, nats, in the unit of `target`; `horizon` is in sequences.

    Source: Fine-Tuning Language Models from Human Preferences, arXiv:1909.08593, section 2.2.
    Differs: num_sequences / horizon counts as 1 at most, so that no step size turns beta negative; a KL that is not a
    number leaves beta as it is.
    """
    if math.isnan(kl):
        return coefficient
    error = min(max(kl / target - 1, -KL_ERROR_BOUND), KL_ERROR_BOUND)
    return coefficient * (1 + error * min(num_sequences / horizon, 1.0))
