"""KL estimators: divergence of the policy from a reference, per token.

x = log pi_policy - log pi_reference, clamped to +-20, of tokens sampled from pi_policy. As values, k1 and k3 have
KL(policy || reference) as their expectation. As losses, only k2, the straight-through forms (name with a +),
`k3_off_policy` and `exact` have its gradient: that of k1 is 0 on average, and that of k3 is KL(reference || policy)'s.

Source: Schulman, "Approximating KL Divergence"; their gradients, Shah et al., arXiv:2512.21852.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from slipstream.learner.algorithms.importance import token_log_ratio, token_ratio

Estimator = Callable[[Tensor, Tensor], Tensor]


def k1(policy_logprobs: Float[Tensor, "N"], reference_logprobs: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """x: unbiased, high variance, may be negative."""
    return token_log_ratio(policy_logprobs, reference_logprobs)


def absolute(policy_logprobs: Float[Tensor, "N"], reference_logprobs: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """|x|: biased, never negative, grows slower than k2 in the tails."""
    return token_log_ratio(policy_logprobs, reference_logprobs).abs()


def k2(policy_logprobs: Float[Tensor, "N"], reference_logprobs: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """x^2 / 2: biased, never negative; as a loss its gradient is that of the KL."""
    return token_log_ratio(policy_logprobs, reference_logprobs).square() / 2


def k3(policy_logprobs: Float[Tensor, "N"], reference_logprobs: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """exp(-x) - 1 + x: unbiased, never negative, lower variance than k1."""
    log_ratio = token_log_ratio(reference_logprobs, policy_logprobs)
    return log_ratio.expm1() - log_ratio


def straight_through(estimator: Estimator) -> Estimator:
    """The value of `estimator` with the gradient of k2, which is that of the KL.

    value + k2 - sg(k2)
    """

    def estimate(policy_logprobs: Float[Tensor, "N"], reference_logprobs: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
        carrier = k2(policy_logprobs, reference_logprobs)
        return estimator(policy_logprobs, reference_logprobs).detach() + (carrier - carrier.detach())

    return estimate


KL_ESTIMATORS: dict[str, Estimator] = {
    "k1": k1,
    "abs": absolute,
    "k2": k2,
    "k3": k3,
    "k1+": straight_through(k1),
    "abs+": straight_through(absolute),
    "k3+": straight_through(k3),
}
"""Name -> function of (learner_logprobs [N], reference_logprobs [N]) -> estimate of each token [N]."""


def k3_off_policy(
    policy_logprobs: Float[Tensor, "N"],
    reference_logprobs: Float[Tensor, "N"],
    generator_logprobs: Float[Tensor, "N"],
) -> Float[Tensor, "N"]:
    """k3 of tokens that another policy sampled; unbiased in value and in gradient.

    pi_policy / pi_generator * k3, the ratio with its gradient

    The gradient through the ratio is what turns k3's into that of KL(policy || reference). The ratio stands inside, so
    no importance weight is to be put on it a second time.

    Source: DeepSeek-V3.2, arXiv:2512.02556, unbiased KL estimate.
    """
    return token_ratio(policy_logprobs, generator_logprobs) * k3(policy_logprobs, reference_logprobs)


def exact(policy_logprobs: Float[Tensor, "N V"], reference_logprobs: Float[Tensor, "N V"]) -> Float[Tensor, "N"]:
    """KL(policy || reference) over the whole vocabulary; no sampling, no variance.

    sum_v p_v * (log p_v - log q_v); a token of probability 0 adds 0, whatever its reference

    Rows do not depend on each other, so any chunk of them may be given.
    """
    lowest = torch.finfo(policy_logprobs.dtype).min
    difference = policy_logprobs.clamp(min=lowest) - reference_logprobs.clamp(min=lowest)
    return (policy_logprobs.exp() * difference).sum(dim=-1)
