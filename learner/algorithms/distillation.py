"""Distillation: a learner's and a teacher's log-probabilities -> one number per token.

The functions of sampled tokens take the teacher's log-probability of the token the learner sampled. The others take, at
every token, K token ids (the teacher's most likely ones) and both log-probabilities of each; with K = V they are exact.
The probability outside the K ids is one more outcome, or is left out and both are renormalised.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from slipstream.learner.algorithms import importance, kl
from slipstream.learner.algorithms.inputs import KlInputs


def teacher_advantages(
    learner_logprobs: Float[Tensor, "N"], teacher_logprobs: Float[Tensor, "N"], *, bound: float
) -> Float[Tensor, "N"]:
    """Advantages, without gradient, whose policy gradient is that of KL(learner || teacher), token by token.

    A_t = -clip(log pi_learner - log pi_teacher, -bound, bound)

    Source: on-policy distillation, arXiv:2306.13649 with reverse KL, as a reward per token and discount 0.
    """
    return -importance.token_log_ratio(learner_logprobs, teacher_logprobs).detach().clamp(-bound, bound)


def sampled_k3(
    learner_logprobs: Float[Tensor, "N"], teacher_logprobs: Float[Tensor, "N"], *, max_loss: float
) -> Float[Tensor, "N"]:
    """The k3 estimate of KL(learner || teacher) as a loss; where it is capped it has no gradient.

    loss = min(exp(-x) - 1 + x, max_loss), x = log pi_learner - log pi_teacher

    Its value is that of the reverse KL, but its gradient, where the learner itself sampled, that of the forward
    KL(teacher || learner): E[(1 - pi_teacher / pi_learner) * grad log pi_learner] = -sum_v pi_teacher * grad log pi_v.

    Source: Schulman, "Approximating KL Divergence".
    """
    return kl.k3(KlInputs(learner_logprobs, teacher_logprobs)).clamp(max=max_loss)


def forward_kl_topk(
    learner_logprobs: Float[Tensor, "N K"], teacher_logprobs: Float[Tensor, "N K"], *, renormalise: bool
) -> Float[Tensor, "N"]:
    """KL(teacher || learner) of the distributions over K ids and the rest, or, renormalised, over the K ids alone.

    loss = sum_k q_k * (log q_k - log p_k), k = 1..K+1 or 1..K, q the teacher's, p the learner's

    Never negative, 0 with gradient 0 where both are equal. With the rest it is at most the KL over the vocabulary.

    Source: GKD, arXiv:2306.13649, section 2.
    Differs: a sum over the K ids that has neither is no divergence: equal policies would still have a gradient.
    """
    teacher = _closed(teacher_logprobs.detach(), renormalise=renormalise)
    return kl.exact(teacher, _closed(learner_logprobs, renormalise=renormalise))


def generalised_jsd(
    learner_logprobs: Float[Tensor, "N K"],
    teacher_logprobs: Float[Tensor, "N K"],
    *,
    beta: float,
    renormalise: bool,
) -> Float[Tensor, "N"]:
    """Jensen-Shannon divergence between learner and teacher, 0 < beta < 1: bounded, whatever either finds impossible.

    loss = beta * KL(q || m) + (1 - beta) * KL(p || m), m = beta * q + (1 - beta) * p

    loss / beta is the forward KL(q || p) for beta -> 0, loss / (1 - beta) the reverse one for beta -> 1.

    Source: GKD, arXiv:2306.13649, section 2.
    """
    teacher = _closed(teacher_logprobs.detach(), renormalise=renormalise)
    learner = _closed(learner_logprobs, renormalise=renormalise)
    mixture = torch.logaddexp(teacher + math.log(beta), learner + math.log1p(-beta))
    return beta * kl.exact(teacher, mixture) + (1 - beta) * kl.exact(learner, mixture)


def _closed(logprobs: Float[Tensor, "N K"], *, renormalise: bool) -> Float[Tensor, "N C"]:
    """Log-probabilities that add up to 1: with one for the rest (kept off 0 by a rounding error), or without it."""
    # Wide before the subtraction: 1 - sum of half-precision probabilities is all rounding.
    wide = logprobs.to(torch.promote_types(logprobs.dtype, torch.float32))
    if renormalise:
        return wide.log_softmax(-1)
    rest = (1 - wide.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(wide.dtype).eps)
    return torch.cat([wide, rest.log()], dim=-1)
