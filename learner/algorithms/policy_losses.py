"""Policy losses: one number per token, negated so that lower is better; their masks and aggregations.

ratio = pi_learner / pi_proximal; sg = stop gradient. The proximal policy is called anchor where it may also be the
generator. Terms sg(weight) * log pi_learner use the log-ratio, which has the same gradient.

Sequence-level losses are repeated for each token, and aggregations weight these equally. Except in token forms, they
need equal advantages within a sequence.

Masks choose the tokens of an update that keep their gradient: True = keep, except for `kl_cov_mask`. Except in `opsm`,
formulas exclude tokens that the correction rejected (`is_counted` false).

Aggregations return one weight per sequence of an update: loss = sum over tokens of weight * token loss. T_i is
`AggregationInputs.num_tokens`, and B counts the sequences with T_i > 0, over all microbatches and ranks. If T_i
includes rejected tokens, rejection shrinks the step.
"""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from slipstream.learner.algorithms import importance, segments
from slipstream.learner.algorithms.inputs import AggregationInputs, LossInputs, MaskInputs, known


def idle_tokens(
    losses: Float[Tensor, "N"], log_ratio: Float[Tensor, "N"], advantages: Float[Tensor, "N"]
) -> Bool[Tensor, "N"]:
    """Tokens with a nonzero advantage but no gradient, such as clipped ones."""
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(losses.sum(), log_ratio)
    return (gradient == 0) & (advantages != 0)


def ppo_clip(
    inputs: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Float[Tensor, "N"]:
    """Clipped surrogate around the proximal policy.

    loss = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)
    if A < 0 and dual_clip > 1 is given: loss = min(loss, -dual_clip * A)

    The two-sided clip of INTELLECT-2, arXiv:2505.07291, is the dual clip with dual_clip = delta > 1 + clip_high.

    Source: PPO, arXiv:1707.06347, eq. 7; clip_high > clip_low is DAPO's clip-higher, arXiv:2503.14476, eq. 10; dual
    clip, arXiv:1912.09729.
    """
    ratio, advantages = inputs.log_ratio.exp(), inputs.advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    if dual_clip is None:
        return losses
    return torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)


def reinforce(inputs: LossInputs) -> Float[Tensor, "N"]:
    """Score-function surrogate.

    loss = -A * log pi_learner

    Source: REINFORCE, Williams 1992, eq. 11; GPG, arXiv:2504.02546, with its own advantages.
    """
    # Value of log pi_learner, gradient of the log-ratio.
    learner_logprobs = inputs.learner_logprobs + (inputs.log_ratio - inputs.log_ratio.detach())
    return -inputs.advantages * learner_logprobs


def unclipped(inputs: LossInputs) -> Float[Tensor, "N"]:
    """Importance-weighted surrogate without a trust region.

    loss = -ratio * A

    Source: PPO, arXiv:1707.06347, eq. 6; M2PO, arXiv:2510.01161, multiplies it by `m2po`.
    """
    return -inputs.log_ratio.exp() * inputs.advantages


def clip_cov(inputs: LossInputs, *, clip_low: float, clip_high: float) -> Float[Tensor, "N"]:
    """PPO-clip without the tokens that `clip_cov_mask` drops.

    loss = ppo_clip * selected

    Source: Clip-Cov, arXiv:2505.22617, eq. 11 and 12.
    """
    return ppo_clip(inputs, clip_low=clip_low, clip_high=clip_high) * known(inputs.is_selected)


def kl_cov(inputs: LossInputs, *, beta: float) -> Float[Tensor, "N"]:
    """Surrogate with a penalty on the high-covariance tokens of `kl_cov_mask`.

    loss = -ratio * A + beta * |log ratio| * selected

    Source: KL-Cov, arXiv:2505.22617, eq. 14.
    Differs: the paper writes KL(proximal, learner); like the authors' code, this uses |log ratio| per token.
    """
    return unclipped(inputs) + beta * inputs.log_ratio.abs() * known(inputs.is_selected)


def cispo(inputs: LossInputs, *, clip_low: float | None, clip_high: float) -> Float[Tensor, "N"]:
    """Score function with a clipped importance weight, which never removes a gradient.

    loss = -sg(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * log pi_learner

    `clip_low=None` removes the lower bound, as in the paper's runs.
    Source: CISPO, arXiv:2506.13585, eq. 4 and 5.
    """
    low = None if clip_low is None else 1 - clip_low
    weights = inputs.log_ratio.detach().exp().clamp(low, 1 + clip_high)
    return -weights * inputs.advantages * inputs.log_ratio


def sapo(inputs: LossInputs, *, tau_positive: float, tau_negative: float) -> Float[Tensor, "N"]:
    """Surrogate with a soft gate in place of the clip.

    loss = -A * (4 / tau) * sigmoid(tau * (ratio - 1)), tau = tau_positive if A > 0 else tau_negative

    Source: SAPO, arXiv:2511.20347, eq. 5 and 6.
    """
    advantages = inputs.advantages
    tau = torch.where(advantages > 0, torch.full_like(advantages, tau_positive), tau_negative)
    return -advantages * (4 / tau) * torch.sigmoid(tau * (inputs.log_ratio.exp() - 1))


def dro(inputs: LossInputs, *, beta: float) -> Float[Tensor, "N"]:
    """Score function with a quadratic penalty on the distance from the anchor.

    loss = -A * log pi_learner + beta / 2 * (log ratio)^2

    Source: DRO, arXiv:2405.19107, per token, with the advantage in place of reward minus value.
    """
    return -inputs.advantages * inputs.log_ratio + beta / 2 * inputs.log_ratio.square()


def aspo(inputs: LossInputs, *, clip_low: float, clip_high: float, cap: float = 3.0) -> Float[Tensor, "N"]:
    """PPO-clip with the inverse ratio for A > 0, so that small ratios are raised most.

    A > 0:  loss = -sg(w) * A * log pi_learner, w = min(1 / ratio, cap) if ratio <= 1 + clip_high else 0
    else:   loss = ppo_clip with dual_clip = cap

    Source: ASPO, arXiv:2510.06062, section 6, eq. 3; cap as in its experiments.
    """
    ratio = inputs.log_ratio.detach().exp()
    weights = (1 / ratio).clamp(max=cap) * (ratio <= 1 + clip_high)
    raised = -weights * inputs.advantages * inputs.log_ratio
    lowered = ppo_clip(inputs, clip_low=clip_low, clip_high=clip_high, dual_clip=cap)
    return torch.where(inputs.advantages > 0, raised, lowered)


def dppo(
    inputs: LossInputs, *, divergence: str, clip_low: float, clip_high: float, ratio_cap: float = 20.0
) -> Float[Tensor, "N"]:
    """Importance-weighted score function with a trust region on the token's probability.

    loss = -sg(min(ratio, ratio_cap) * kept) * A * log pi_learner
    not kept: (A > 0 and ratio > 1 and D > clip_high) or (A < 0 and ratio < 1 and D > clip_low)

    tv:  D = |pi_learner - pi_anchor|
    kl:  D = pi_anchor * log(pi_anchor / pi_learner) + (1 - pi_anchor) * log((1 - pi_anchor) / (1 - pi_learner))

    Both divergences are binary (this token or any other). The paper's anchor is the generator.
    Source: DPPO, arXiv:2602.04879, eq. 12 with the binary total variation, eq. 13, or the binary KL, eq. 14.
    """
    advantages, log_ratio = inputs.advantages, inputs.log_ratio.detach()
    # Keeps log(1 - p) finite.
    learner = inputs.learner_logprobs.exp().clamp(max=1 - 1e-7)
    anchor = (inputs.learner_logprobs - log_ratio).exp().clamp(max=1 - 1e-7)
    if divergence == "tv":
        moved = (learner - anchor).abs()
    else:
        moved = -anchor * log_ratio + (1 - anchor) * (torch.log1p(-anchor) - torch.log1p(-learner))
    is_raised_far = (advantages > 0) & (log_ratio > 0) & (moved > clip_high)
    is_lowered_far = (advantages < 0) & (log_ratio < 0) & (moved > clip_low)
    weights = log_ratio.exp().clamp(max=ratio_cap) * ~(is_raised_far | is_lowered_far)
    return -weights * advantages * inputs.log_ratio


def sppo(inputs: LossInputs, *, eta: float) -> Float[Tensor, "N"]:
    """Squared distance of a sequence's log-ratio from a target set by its win rate.

    loss = (log pi_learner(y) - log pi_anchor(y) - eta * (P(y beats pi_anchor) - 1/2))^2, P = A + 1/2

    A must be that of `advantages.win_rate`.

    Source: SPPO, arXiv:2405.00675, algorithm 1.
    """
    sequences, num_sequences = inputs.sequences, inputs.num_sequences
    totals = segments.sums(inputs.log_ratio, sequences, num_segments=num_sequences)
    win_rates = segments.means(inputs.advantages, sequences, num_segments=num_sequences) + 0.5
    return (totals - eta * (win_rates - 0.5)).square()[sequences]


def gspo(inputs: LossInputs, *, clip_low: float, clip_high: float, form: str = "sequence") -> Float[Tensor, "N"]:
    """PPO-clip on the geometric mean of a sequence's ratios.

    sequence:       loss = -min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A), s = exp(mean_t log ratio_t)
    token:          the same with A_t and s_t = sg(s) * pi_learner,t / sg(pi_learner,t), for advantages per token
    length_scaled:  loss * length, to cancel the 1/length of a mean over the sequence's tokens

    Source: GSPO, arXiv:2507.18071, eq. 5 to 7; GSPO-token, eq. 13 and 14; LUSPO, arXiv:2602.05261.
    """
    sequences, num_sequences = inputs.sequences, inputs.num_sequences
    log_ratio = segments.means(inputs.log_ratio, sequences, num_segments=num_sequences)[sequences]
    if form == "token":
        log_ratio = log_ratio.detach() + (inputs.log_ratio - inputs.log_ratio.detach())
    losses = ppo_clip(replace(inputs, log_ratio=log_ratio), clip_low=clip_low, clip_high=clip_high)
    if form == "length_scaled":
        losses = segments.sizes(sequences, num_segments=num_sequences)[sequences] * losses
    return losses


def gmpo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> Float[Tensor, "N"]:
    """Geometric mean of ratios clipped per token, so that outliers do not clip whole sequences.

    loss = -A * exp(mean_t d_t), d_t = min(log ratio_t, clip_high) if A > 0 else max(log ratio_t, -clip_low)

    The bounds apply to log-ratios; the paper uses 0.4.
    Source: GMPO, arXiv:2507.20673, eq. 4.
    """
    log_ratio, advantages = inputs.log_ratio, inputs.advantages
    clipped = torch.where(advantages > 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low))
    means = segments.means(clipped, inputs.sequences, num_segments=inputs.num_sequences)
    return -advantages * means[inputs.sequences].exp()


def topr(inputs: LossInputs) -> Float[Tensor, "N"]:
    """Tapered REINFORCE: full weight for A > 0, otherwise less as the answer becomes unlikely.

    loss = -sg(w) * A * log pi_learner, w = 1 if A > 0 else min(prod_t ratio_t, 1)

    Source: TOPR, arXiv:2503.14286, eq. 7 and 8.
    Differs: tapers by the sign of the advantage, not the reward.
    """
    weights = torch.where(inputs.advantages > 0, 1.0, _sequence_log_ratio(inputs).clamp(max=0).exp())
    return -weights * inputs.advantages * inputs.log_ratio


def vespo(
    inputs: LossInputs,
    *,
    power_positive: float = 2.0,
    decay_positive: float = 3.0,
    power_negative: float = 3.0,
    decay_negative: float = 2.0,
) -> Float[Tensor, "N"]:
    """Score function with a smooth weight from the sequence's ratio, without length normalization.

    loss = -sg(phi(W)) * A * log pi_learner, phi(W) = W^power * exp(decay * (1 - W)), W = prod_t ratio_t

    phi(1) = 1, and phi peaks at W = power / decay. The `*_positive` pair applies to A > 0, the other to A <= 0.
    Source: VESPO, arXiv:2602.10693, eq. 20; the defaults are those of its experiments.
    """
    advantages, log_weight = inputs.advantages, _sequence_log_ratio(inputs)
    power = torch.where(advantages > 0, torch.full_like(advantages, power_positive), power_negative)
    decay = torch.where(advantages > 0, torch.full_like(advantages, decay_positive), decay_negative)
    phi = (power * log_weight + decay * (1 - log_weight.exp())).exp()
    return -phi * advantages * inputs.log_ratio


def _sequence_log_ratio(inputs: LossInputs) -> Float[Tensor, "N"]:
    """sum_t log ratio_t per sequence, clamped, without gradient."""
    totals = segments.sums(inputs.log_ratio.detach(), inputs.sequences, num_segments=inputs.num_sequences)
    return totals.clamp(-importance.LOG_RATIO_BOUND, importance.LOG_RATIO_BOUND)[inputs.sequences]


def token_mean(inputs: AggregationInputs) -> Float[Tensor, "B"]:
    """Mean over all tokens.

    weight = 1 / sum_j T_j

    Source: DAPO, arXiv:2503.14476, eq. 12.
    """
    return _present(inputs) / inputs.num_tokens.sum().clamp(min=1)


def token_sum(inputs: AggregationInputs) -> Float[Tensor, "B"]:
    """Sum over all tokens, so the step grows with the batch.

    weight = 1

    Source: REINFORCE, Williams 1992, eq. 11, before any mean.
    """
    return _present(inputs)


def seq_mean_token_mean(inputs: AggregationInputs) -> Float[Tensor, "B"]:
    """Mean over the tokens of a sequence, mean over sequences.

    weight_i = 1 / (B * T_i)

    Source: GRPO, arXiv:2402.03300, eq. 3.
    """
    return _present(inputs) / (inputs.num_tokens.clamp(min=1) * _num_present(inputs.num_tokens))


def seq_mean_token_sum(inputs: AggregationInputs) -> Float[Tensor, "B"]:
    """Sum over the tokens of a sequence, mean over sequences.

    weight = 1 / B

    Source: Dr. GRPO, arXiv:2503.20783, section 3.2 (also divides by a constant length).
    """
    return _present(inputs) / _num_present(inputs.num_tokens)


def seq_mean_token_sum_norm(inputs: AggregationInputs) -> Float[Tensor, "B"]:
    """`seq_mean_token_sum` divided by a constant length.

    weight = 1 / (B * length)

    Source: Dr. GRPO, arXiv:2503.20783, section 3.2.
    """
    return seq_mean_token_sum(inputs) / inputs.length


def prompt_mean(inputs: AggregationInputs) -> Float[Tensor, "B"]:
    """Equal weight per prompt, divided evenly over its sequences' tokens.

    weight_i = 1 / (G * sum_{j in group of i} T_j), G = number of groups with tokens

    Source: ScaleRL, arXiv:2510.13786 (prompt average); per prompt as in DAPO, arXiv:2503.14476, eq. 8.
    """
    lengths, groups = inputs.num_tokens.to(torch.float64), inputs.groups
    per_group = segments.sums(lengths, groups, num_segments=segments.count(groups))
    return _present(inputs) / (per_group.clamp(min=1)[groups] * _num_present(per_group))


def _present(inputs: AggregationInputs) -> Float[Tensor, "B"]:
    return (inputs.num_tokens > 0).to(torch.float64)


def _num_present(num_tokens: Int[Tensor, "B"] | Float[Tensor, "B"]) -> Int[Tensor, ""]:
    return (num_tokens > 0).sum().clamp(min=1)


def m2po(inputs: MaskInputs, *, threshold: float) -> Bool[Tensor, "N"]:
    """Drop the candidates with the largest squared log-ratios.

    candidates: (A > 0 and ratio > 1) or (A < 0 and ratio < 1), ratio = pi_learner / pi_generator
    dropped: the fewest candidates, largest (log ratio)^2 first, such that the mean of the rest is <= threshold

    Source: M2PO, arXiv:2510.01161, algorithm 1.
    Differs: no floor: candidates may all be dropped. AReaL's form, arXiv:2505.24298, always keeps the smallest, treats
    all tokens as candidates, and measures log(generator/proximal).
    """
    log_ratio, advantages = inputs.log_ratio, inputs.advantages
    moves_away = ((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0))
    candidates = (moves_away & inputs.is_counted).nonzero().squeeze(1)
    squares, order = log_ratio[candidates].double().square().sort(stable=True)
    # The running mean of sorted values increases, so kept tokens form a prefix.
    running_mean = squares.cumsum(0) / torch.arange(1, len(squares) + 1, device=squares.device)
    kept = torch.ones_like(advantages, dtype=torch.bool)
    kept[candidates[order[running_mean > threshold]]] = False
    return kept


def opsm(inputs: MaskInputs, *, delta: float) -> Bool[Tensor, "N"]:
    """Drop tokens with negative advantage in sequences that are now unlikely under the learner.

    dropped: A < 0 and mean_t log(pi_generator / pi_learner) > delta

    The mean includes rejected tokens and the mismatch between the engines.
    Source: off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556, eq. 9.
    """
    drift = -segments.means(inputs.log_ratio, inputs.sequences, num_segments=inputs.num_sequences)
    return ~((inputs.advantages < 0) & (drift > delta)[inputs.sequences])


def covariance(inputs: MaskInputs) -> Float[Tensor, "N"]:
    """Contribution of each token to the covariance of log-probability and advantage. High covariance reduces entropy.

    cov_t = (A_t - mean A) * (log pi_t - mean log pi); 0 if log pi is not finite

    Source: arXiv:2505.22617, eq. 10.
    """
    logprobs, advantages = inputs.learner_logprobs, inputs.advantages
    is_finite = logprobs.isfinite()
    counted = logprobs[is_finite & inputs.is_counted]
    centered = torch.where(is_finite, logprobs - counted.sum() / max(1, len(counted)), 0.0)
    return (advantages - advantages[inputs.is_counted].mean()) * centered


def clip_cov_mask(
    inputs: MaskInputs, *, fraction: float, covariance_low: float, covariance_high: float
) -> Bool[Tensor, "N"]:
    """Drop random tokens with high covariance to prevent entropy collapse.

    dropped: max(1, floor(fraction * N)) tokens drawn from {t: covariance_low <= cov_t <= covariance_high}, all if
    fewer, none if fraction is 0

    Source: Clip-Cov, arXiv:2505.22617, eq. 11 and 12.
    Differs: at least one token, like the authors' code, which also excludes clipped tokens.
    """
    covariances = covariance(inputs)
    is_high = (covariances >= covariance_low) & (covariances <= covariance_high)
    candidates = (is_high & inputs.is_counted).nonzero().squeeze(1)
    # On the CPU, so that every rank draws the same tokens.
    generator = torch.Generator().manual_seed(inputs.seed)
    drawn = torch.randperm(len(candidates), generator=generator)[: _count_of(inputs, fraction)]
    kept = torch.ones_like(is_high)
    kept[candidates[drawn.to(candidates.device)]] = False
    return kept


def kl_cov_mask(inputs: MaskInputs, *, fraction: float) -> Bool[Tensor, "N"]:
    """Tokens with the largest covariance, for `kl_cov`.

    True: the max(1, floor(fraction * N)) largest cov_t, earlier ones first if equal; none if fraction is 0

    Source: KL-Cov, arXiv:2505.22617, eq. 13.
    Differs: at least one token, as in `clip_cov_mask`.
    """
    counted = inputs.is_counted.nonzero().squeeze(1)
    largest = covariance(inputs)[counted].argsort(descending=True, stable=True)[: _count_of(inputs, fraction)]
    selected = torch.zeros_like(inputs.is_counted)
    selected[counted[largest]] = True
    return selected


def _count_of(inputs: MaskInputs, fraction: float) -> int:
    return max(1, int(fraction * int(inputs.is_counted.sum()))) if fraction else 0
