"""Sequence losses: policy losses whose ratio belongs to a whole sequence, still one number per token.

Arguments as in `policy_losses`; `sequences` says which sequence a token belongs to, and every token of a sequence must
be there. A sequence's loss or weight stands on each of its tokens: with equal token weights inside a sequence, as all
aggregations have, the sum is the paper's. Advantages are equal within a sequence, but for `gspo_token`.
"""

from jaxtyping import Float, Int
from torch import Tensor, full_like, where

from slipstream.learner.algorithms import segments
from slipstream.learner.algorithms.importance import LOG_RATIO_BOUND
from slipstream.learner.algorithms.policy_losses import ppo_clip


# @@ Preference: losses from which of several answers wins, one number per whole sequence, lower is better.
#
# A sequence is never cut between microbatches here: its loss is not a sum over its tokens.
def sppo(log_ratio: Float[Tensor, "B"], win_rates: Float[Tensor, "B"], *, eta: float) -> Float[Tensor, "B"]:
    """Squared distance of a sequence's log-ratio from where its win rate wants it.

    loss = (log pi_learner(y) - log pi_k(y) - eta * (P(y beats pi_k) - 1/2))^2

    `log_ratio` is the sum over the sequence's tokens, pi_k the policy that wrote it, P - 1/2 what `advantages.win_rate`
    says. Win rates of 1 for the chosen and
    0 for the rejected answer of a pair are the hard form, with eta = 1 / beta.

    Source: SPPO, arXiv:2405.00675, algorithm 1.
    """
    return (log_ratio - eta * (win_rates.detach() - 0.5)).square()


def gspo(
    log_ratio: Float[Tensor, "N"],
    advantages: Float[Tensor, "N"],
    sequences: Int[Tensor, "N"],
    *,
    num_sequences: int,
    clip_low: float,
    clip_high: float,
) -> Float[Tensor, "N"]:
    """PPO-clip on the geometric mean of a sequence's ratios.

    loss = -min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A), s = exp(mean_t log ratio_t)

    Source: GSPO, arXiv:2507.18071, eq. 5 to 7.
    """
    ratio = segments.means(log_ratio, sequences, num_segments=num_sequences)[sequences].exp()
    return ppo_clip(ratio, advantages, clip_low=clip_low, clip_high=clip_high)


def gspo_token(
    log_ratio: Float[Tensor, "N"],
    advantages: Float[Tensor, "N"],
    sequences: Int[Tensor, "N"],
    *,
    num_sequences: int,
    clip_low: float,
    clip_high: float,
) -> Float[Tensor, "N"]:
    """GSPO with the gradient of each token going through that token alone, for advantages that differ per token.

    loss = -min(s_t * A_t, clip(s_t, 1 - clip_low, 1 + clip_high) * A_t), s_t = sg(s) * pi_learner,t / sg(pi_learner,t)

    Source: GSPO-token, arXiv:2507.18071, eq. 13 and 14.
    """
    mean = segments.means(log_ratio.detach(), sequences, num_segments=num_sequences)[sequences]
    ratio = (mean + (log_ratio - log_ratio.detach())).exp()
    return ppo_clip(ratio, advantages, clip_low=clip_low, clip_high=clip_high)


def luspo(
    log_ratio: Float[Tensor, "N"],
    advantages: Float[Tensor, "N"],
    sequences: Int[Tensor, "N"],
    *,
    num_sequences: int,
    clip_low: float,
    clip_high: float,
) -> Float[Tensor, "N"]:
    """GSPO times the sequence's length, which undoes the 1/length of a mean over the sequence's tokens.

    loss = length * gspo

    Source: LUSPO, arXiv:2602.05261; with seq_mean_token_mean. Under any other aggregation long sequences weigh twice.
    """
    lengths = segments.sizes(sequences, num_segments=num_sequences)[sequences]
    losses = gspo(log_ratio, advantages, sequences, num_sequences=num_sequences, clip_low=clip_low, clip_high=clip_high)
    return lengths * losses


def gmpo(
    log_ratio: Float[Tensor, "N"],
    advantages: Float[Tensor, "N"],
    sequences: Int[Tensor, "N"],
    *,
    num_sequences: int,
    clip_low: float,
    clip_high: float,
) -> Float[Tensor, "N"]:
    """Geometric mean of ratios that are clipped one by one, before the mean: an outlier costs itself, not its sequence.

    loss = -A * exp(mean_t d_t), d_t = min(log ratio_t, clip_high) if A > 0 else max(log ratio_t, -clip_low)

    The bounds are of log-ratios, 0.4 in the paper.
    Source: GMPO, arXiv:2507.20673, eq. 4.
    """
    clipped = where(advantages > 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low))
    return -advantages * segments.means(clipped, sequences, num_segments=num_sequences)[sequences].exp()


def topr(
    log_ratio: Float[Tensor, "N"],
    advantages: Float[Tensor, "N"],
    sequences: Int[Tensor, "N"],
    *,
    num_sequences: int,
) -> Float[Tensor, "N"]:
    """Tapered REINFORCE: praised sequences count fully, blamed ones fade as they become unlikely.

    loss = -sg(w) * A * log pi_learner, w = 1 if A > 0 else min(prod_t ratio_t, 1)

    Source: TOPR, arXiv:2503.14286, eq. 7 and 8.
    Differs: the sign is that of the advantage, not of the reward, for the reason given at `policy_losses.topr_token`.
    """
    tapered = _sequence_log_ratio(log_ratio, sequences, num_sequences).clamp(max=0).exp()
    return -where(advantages > 0, 1.0, tapered) * advantages * log_ratio


def vespo(
    log_ratio: Float[Tensor, "N"],
    advantages: Float[Tensor, "N"],
    sequences: Int[Tensor, "N"],
    *,
    num_sequences: int,
    power_positive: float = 2.0,
    decay_positive: float = 3.0,
    power_negative: float = 3.0,
    decay_negative: float = 2.0,
) -> Float[Tensor, "N"]:
    """Score function with a soft weight of the sequence's whole ratio, without length normalisation.

    loss = -sg(phi(W)) * A * log pi_learner, phi(W) = W^power * exp(decay * (1 - W)), W = prod_t ratio_t

    phi(1) = 1; phi peaks at W = power / decay. One pair for A > 0, the other for the rest.
    Source: VESPO, arXiv:2602.10693, eq. 20.
    """
    log_weight = _sequence_log_ratio(log_ratio, sequences, num_sequences)
    power = where(advantages > 0, full_like(advantages, power_positive), power_negative)
    decay = where(advantages > 0, full_like(advantages, decay_positive), decay_negative)
    phi = (power * log_weight + decay * (1 - log_weight.exp())).exp()
    return -phi * advantages * log_ratio


def _sequence_log_ratio(log_ratio: Tensor, sequences: Tensor, num_sequences: int) -> Tensor:
    """sum_t log ratio_t of each token's sequence, clamped, without gradient."""
    totals = segments.sums(log_ratio.detach(), sequences, num_segments=num_sequences)
    return totals.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)[sequences]
