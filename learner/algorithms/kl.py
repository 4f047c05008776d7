"""KL estimators: from log-probabilities of sampled tokens, per token.

x = log pi_policy - log pi_reference, tokens sampled from pi_policy.  Source: Schulman, "Approximating KL Divergence".
"""

from jaxtyping import Float
from torch import Tensor

from learner.algorithms.importance import token_log_ratio


def k1(policy_logprobs: Float[Tensor, "N"], reference_logprobs: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """x: unbiased, high variance, may be negative."""
    return token_log_ratio(policy_logprobs, reference_logprobs)


def k2(policy_logprobs: Float[Tensor, "N"], reference_logprobs: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """x^2 / 2: biased, never negative; as a loss its gradient is that of the KL."""
    return token_log_ratio(policy_logprobs, reference_logprobs).square() / 2


def k3(policy_logprobs: Float[Tensor, "N"], reference_logprobs: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """exp(-x) - 1 + x: unbiased, never negative, lower variance than k1."""
    log_ratio = token_log_ratio(reference_logprobs, policy_logprobs)
    return log_ratio.exp() - 1 - log_ratio
