"""Proximal policy without a forward pass: interpolated between the generator's and the learner's, per token.

The share of the way that a token's policy has gone since it was sampled is read off the versions. Results carry no
gradient: they anchor the trust region and correct for drift, they are not optimised.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def interpolation(
    token_versions: Int[Tensor, "N"], *, proximal_version: int, learner_version: int
) -> Float[Tensor, "N"]:
    """How far the proximal policy stands from the generator's (0) towards the learner's (1).

    alpha = (v_proximal - v_token) / (v_learner - v_token), within [0, 1]; 0 of a token as new as the proximal policy

    `learner_version` is the version that the step in progress will make, so one more than `proximal_version`, or more
    where several updates make one version.

    Source: A-3PO, arXiv:2512.06547.
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
