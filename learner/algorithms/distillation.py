"""Distillation: learner and teacher log-probabilities -> one number per token.

`teacher_advantages` and `sampled_k3` use the sampled token, the others the teacher's K most likely tokens, which is
exact with K = V. The remaining probability is one more outcome or, with `renormalize`, dropped.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from slipstream.learner.algorithms import importance, kl
from slipstream.learner.algorithms.inputs import KlInputs

_BOUND = 10.0
"""Largest advantage or loss of a token, nats, as in verl."""


def teacher_advantages(
    learner_logprobs: Float[Tensor, "N"], teacher_logprobs: Float[Tensor, "N"], *, bound: float = _BOUND
) -> Float[Tensor, "N"]:
    """Advantages for minimizing KL(learner || teacher) per token. No gradient.

    A_t = -clip(log pi_learner - log pi_teacher, -bound, bound)

    Source: on-policy distillation, arXiv:2306.13649, with reverse KL as a reward per token and discount 0.
    """
    return -importance.token_log_ratio(learner_logprobs, teacher_logprobs).detach().clamp(-bound, bound)


def sampled_k3(
    learner_logprobs: Float[Tensor, "N"], teacher_logprobs: Float[Tensor, "N"], *, max_loss: float = _BOUND
) -> Float[Tensor, "N"]:
    """k3 estimate of KL(learner || teacher) as a loss, without gradient beyond the cap.

    loss = min(exp(-x) - 1 + x, max_loss), x = log pi_learner - log pi_teacher

    On tokens that the learner sampled, the gradient is that of KL(teacher || learner).

    Source: Schulman, "Approximating KL Divergence".
    """
    return kl.k3(KlInputs(learner_logprobs, teacher_logprobs)).clamp(max=max_loss)


def forward_kl_topk(
    learner_logprobs: Float[Tensor, "N K"], teacher_logprobs: Float[Tensor, "N K"], *, renormalize: bool
) -> Float[Tensor, "N"]:
    """KL(teacher || learner) over the candidates.

    loss = sum_k q_k * (log q_k - log p_k), k = 1..K+1, or 1..K with renormalize; q = teacher, p = learner

    At most the KL over the vocabulary, unless renormalized.

    Source: GKD, arXiv:2306.13649, section 2.
    Differs: includes the rest or renormalizes. A plain sum over K has a nonzero gradient for equal policies.
    """
    teacher = _closed(teacher_logprobs.detach(), renormalize=renormalize)
    return kl.exact(teacher, _closed(learner_logprobs, renormalize=renormalize))


def generalized_jsd(
    learner_logprobs: Float[Tensor, "N K"], teacher_logprobs: Float[Tensor, "N K"], *, beta: float, renormalize: bool
) -> Float[Tensor, "N"]:
    """Generalized Jensen-Shannon divergence between learner p and teacher q, 0 < beta < 1.

    loss = beta * KL(q || m) + (1 - beta) * KL(p || m), m = beta * q + (1 - beta) * p

    Bounded. loss / beta approaches KL(q || p) as beta -> 0, and loss / (1 - beta) KL(p || q) as beta -> 1.

    Source: GKD, arXiv:2306.13649, section 2.
    """
    teacher = _closed(teacher_logprobs.detach(), renormalize=renormalize)
    learner = _closed(learner_logprobs, renormalize=renormalize)
    mixture = torch.logaddexp(teacher + math.log(beta), learner + math.log1p(-beta))
    return beta * kl.exact(teacher, mixture) + (1 - beta) * kl.exact(learner, mixture)


def _closed(logprobs: Float[Tensor, "N K"], *, renormalize: bool) -> Float[Tensor, "N C"]:
    """Complete to a distribution: append the rest (at least epsilon), or renormalize."""
    # 1 - sum is only rounding error in half precision.
    wide = logprobs.to(torch.promote_types(logprobs.dtype, torch.float32))
    if renormalize:
        return wide.log_softmax(-1)
    rest = (1 - wide.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(wide.dtype).eps)
    return torch.cat([wide, rest.log()], dim=-1)
