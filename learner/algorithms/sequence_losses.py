"""Sequence losses: policy losses whose ratio belongs to a whole sequence, still one number per token.

A sequence's loss or weight stands on each of its tokens: with equal token weights inside a sequence, as all
aggregations have, the sum is the paper's. Advantages are equal within a sequence, except for the token forms.
"""

from jaxtyping import Float
from torch import Tensor, full_like, where

from slipstream.learner.algorithms import importance, segments
from slipstream.learner.algorithms.inputs import LossInputs
from slipstream.learner.algorithms.policy_losses import ppo_clip


def sppo(inputs: LossInputs, *, eta: float) -> Float[Tensor, "N"]:
    """Squared distance of a sequence's log-ratio from the one that its win rate asks for.

    loss = (log pi_learner(y) - log pi_anchor(y) - eta * (P(y beats pi_anchor) - 1/2))^2, P = A + 1/2

    The advantages are those of `advantages.win_rate`.

    Source: SPPO, arXiv:2405.00675, algorithm 1.
    """
    sequences, num_sequences = inputs.sequences, inputs.num_sequences
    totals = segments.sums(inputs.log_ratio, sequences, num_segments=num_sequences)
    win_rates = segments.means(inputs.advantages, sequences, num_segments=num_sequences) + 0.5
    return (totals - eta * (win_rates - 0.5)).square()[sequences]


def gspo(inputs: LossInputs, *, clip_low: float, clip_high: float, form: str = "sequence") -> Float[Tensor, "N"]:
    """PPO-clip on the geometric mean of a sequence's ratios.

    sequence:       loss = -min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A), s = exp(mean_t log ratio_t)
    token:          the same with s_t = sg(s) * pi_learner,t / sg(pi_learner,t) and A_t, so that the gradient of each
                    token goes through that token alone, for advantages that differ per token
    length_scaled:  loss * length, which undoes the 1/length of a mean over the sequence's tokens; under any other
                    aggregation long sequences would weigh twice

    Source: GSPO, arXiv:2507.18071, eq. 5 to 7; GSPO-token, eq. 13 and 14; LUSPO, arXiv:2602.05261.
    """
    sequences, num_sequences = inputs.sequences, inputs.num_sequences
    log_ratio = segments.means(inputs.log_ratio, sequences, num_segments=num_sequences)[sequences]
    if form == "token":
        log_ratio = log_ratio.detach() + (inputs.log_ratio - inputs.log_ratio.detach())
    losses = ppo_clip(inputs.with_log_ratio(log_ratio), clip_low=clip_low, clip_high=clip_high)
    return (
        segments.sizes(sequences, num_segments=num_sequences)[sequences] * losses if form == "length_scaled" else losses
    )


def gmpo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> Float[Tensor, "N"]:
    """Geometric mean of ratios that are clipped one by one, before the mean: an outlier costs itself, not its sequence.

    loss = -A * exp(mean_t d_t), d_t = min(log ratio_t, clip_high) if A > 0 else max(log ratio_t, -clip_low)

    The bounds are of log-ratios, 0.4 in the paper.
    Source: GMPO, arXiv:2507.20673, eq. 4.
    """
    log_ratio, advantages = inputs.log_ratio, inputs.advantages
    clipped = where(advantages > 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low))
    means = segments.means(clipped, inputs.sequences, num_segments=inputs.num_sequences)
    return -advantages * means[inputs.sequences].exp()


def topr(inputs: LossInputs, *, level: str = "sequence") -> Float[Tensor, "N"]:
    """Tapered REINFORCE: positive advantages count fully, negative ones fade as the answer becomes unlikely.

    loss = -sg(w) * A * log pi_learner, w = 1 if A > 0 else min(prod_t ratio_t, 1); min(ratio_t, 1) at the token level

    Source: TOPR, arXiv:2503.14286, eq. 7 and 8.
    Differs: the sign is that of the advantage, not of the reward: it is the advantage that pushes a token down, without
    bound where nothing tapers it. The paper has no token level.
    """
    log_ratio = inputs.log_ratio.detach() if level == "token" else _sequence_log_ratio(inputs)
    weights = where(inputs.advantages > 0, 1.0, log_ratio.clamp(max=0).exp())
    return -weights * inputs.advantages * inputs.log_ratio


def vespo(
    inputs: LossInputs,
    *,
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
    advantages, log_weight = inputs.advantages, _sequence_log_ratio(inputs)
    power = where(advantages > 0, full_like(advantages, power_positive), power_negative)
    decay = where(advantages > 0, full_like(advantages, decay_positive), decay_negative)
    phi = (power * log_weight + decay * (1 - log_weight.exp())).exp()
    return -phi * advantages * inputs.log_ratio


def _sequence_log_ratio(inputs: LossInputs) -> Float[Tensor, "N"]:
    """sum_t log ratio_t of each token's sequence, clamped, without gradient."""
    totals = segments.sums(inputs.log_ratio.detach(), inputs.sequences, num_segments=inputs.num_sequences)
    return totals.clamp(-importance.LOG_RATIO_BOUND, importance.LOG_RATIO_BOUND)[inputs.sequences]
