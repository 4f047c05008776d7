"""Advantages: rewards of groups -> one number per trajectory.

Groups may differ in size; `groups` says which group each reward belongs to. Deviations are taken from the group's
smallest reward before the mean, so that a group of equal rewards gives exactly 0, not a rounding error.

A group of one has advantage 0, because it has no baseline. Only `remax` and `above_baseline` give it another: their
baseline comes from outside the group. Standard deviations are those of the population (divided by n); epsilon > 0.

`lite_ppo`, `gpg` and `reinforce_plus_plus_baseline` scale by the whole batch, so a group's advantages depend on the
others there; everywhere else groups do not see each other.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from slipstream.learner.algorithms import segments


# @@ Whitening: values of a whole batch brought to mean 0 and standard deviation 1.
#
# Only over what the model wrote: other tokens are not in the arrays. Over the whole batch of an update, never over
# a microbatch or one rank's part, or the split would change the values. Variances are the population's; epsilon > 0.
# REINFORCE++ (arXiv:2501.03262) is `whiten` of `reward_shaping.returns_to_go`.
def whiten(
    values: Float[Tensor, "N"], *, epsilon: float, weights: Float[Tensor, "N"] | None = None
) -> Float[Tensor, "N"]:
    """Values minus their mean, divided by their standard deviation.

    y_i = (x_i - mean(x)) / (std(x) + epsilon)

    A value of weight w >= 0 counts as w equal values, and one of weight 0 not at all: it becomes 0.
    Equal values, and a single one, become exactly 0.

    Source: Fine-Tuning Language Models from Human Preferences, arXiv:1909.08593, its code.
    Differs: epsilon is added to the deviation, as everywhere here, not to the variance; the variance is not Bessel's.
    """
    weights = torch.ones_like(values) if weights is None else weights
    counts = weights > 0
    if not counts.any():
        return torch.zeros_like(values)
    lowest = values[counts].min()
    above_lowest = torch.where(counts, values - lowest, 0)
    mean = _mean(above_lowest, weights)
    deviations = above_lowest - mean
    whitened = deviations / (_mean(deviations.square(), weights).sqrt() + epsilon)
    return torch.where(counts, whitened, 0)


def _mean(values: Float[Tensor, "N"], weights: Float[Tensor, "N"]) -> Float[Tensor, ""]:
    return (weights * values).sum() / weights.sum()


def grpo(rewards: Float[Tensor, "B"], groups: Int[Tensor, "B"], *, epsilon: float) -> Float[Tensor, "B"]:
    """Rewards normalised within their group.

    A_i = (r_i - mean(r)) / (std(r) + epsilon)

    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.2.
    """
    return dr_grpo(rewards, groups) / (standard_deviations(rewards, groups)[groups] + epsilon)


def dr_grpo(rewards: Float[Tensor, "B"], groups: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Rewards minus the mean of their group.

    A_i = r_i - mean(r)

    Source: Understanding R1-Zero-Like Training, arXiv:2503.20783, section 3.2.
    """
    above_lowest = _above_lowest(rewards, groups)
    return above_lowest - segments.means(above_lowest, groups, num_segments=segments.count(groups))[groups]


def rloo(rewards: Float[Tensor, "B"], groups: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Rewards minus the mean of the others in their group.

    A_i = r_i - mean_{j != i}(r_j) = n / (n - 1) * (r_i - mean(r))

    Source: Back to Basics, arXiv:2402.14740, eq. 7.
    """
    sizes = _sizes(groups).to(rewards.dtype)
    return dr_grpo(rewards, groups) * sizes / (sizes - 1).clamp(min=1)


def lite_ppo(rewards: Float[Tensor, "B"], groups: Int[Tensor, "B"], *, epsilon: float) -> Float[Tensor, "B"]:
    """Rewards minus the mean of their group, divided by the spread of all rewards of the batch.

    A_i = (r_i - mean_group(r)) / (std_batch(r) + epsilon)

    A group in which almost all rewards are equal is not blown up, as its own small spread would do.

    Source: Tricks or Traps, arXiv:2508.08221, Lite PPO.
    """
    batch = torch.zeros_like(groups)
    return dr_grpo(rewards, groups) / (standard_deviations(rewards, batch)[batch] + epsilon)


def reinforce_plus_plus_baseline(
    rewards: Float[Tensor, "B"], groups: Int[Tensor, "B"], lengths: Int[Tensor, "B"], *, epsilon: float
) -> Float[Tensor, "B"]:
    """Rewards minus the mean of their group, whitened over all tokens of the batch.

    d_i = r_i - mean_group(r)
    A_i = (d_i - mean_tokens(d)) / (std_tokens(d) + epsilon), d_i standing once for each of the T_i tokens

    Source: REINFORCE++, arXiv:2501.03262, the variant with a group baseline.
    Differs: a group of one stays out of the whitening and keeps its 0.
    """
    has_baseline = _sizes(groups) > 1
    return whiten(dr_grpo(rewards, groups), epsilon=epsilon, weights=(lengths * has_baseline).to(rewards.dtype))


def opo(rewards: Float[Tensor, "B"], groups: Int[Tensor, "B"], lengths: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Rewards minus the mean over their group's tokens, the baseline of least variance if tokens are alike.

    A_i = r_i - sum_j(T_j r_j) / sum_j(T_j), so that sum_i T_i A_i = 0

    `lengths` are T_i, what a trajectory's reward was paid for: not lowered by a later rejection of tokens.

    Source: On-Policy RL with Optimal Reward Baseline, arXiv:2505.23585.
    """
    num_groups = segments.count(groups)
    above_lowest = _above_lowest(rewards, groups)
    weighted = segments.sums(lengths * above_lowest, groups, num_segments=num_groups)
    tokens = segments.sums(lengths.to(rewards.dtype), groups, num_segments=num_groups)
    return above_lowest - (weighted / tokens.clamp(min=1))[groups]


def gpg(rewards: Float[Tensor, "B"], groups: Int[Tensor, "B"], *, normaliser: float) -> Float[Tensor, "B"]:
    """Rewards minus the mean of their group, scaled up for the trajectories that have no gradient.

    A_i = alpha * (r_i - mean(r)) / normaliser, alpha = B / (trajectories in groups of unequal rewards)

    Source: GPG, arXiv:2504.02546, accurate gradient estimation; normaliser is its F_norm.
    """
    num_groups = segments.count(groups)
    lowest = segments.minima(rewards, groups, num_segments=num_groups)
    differs = segments.maxima(rewards, groups, num_segments=num_groups) > lowest
    alpha = len(rewards) / differs[groups].to(rewards.dtype).sum().clamp(min=1)
    return alpha * dr_grpo(rewards, groups) / normaliser


def maxrl(rewards: Float[Tensor, "B"], groups: Int[Tensor, "B"], *, epsilon: float) -> Float[Tensor, "B"]:
    """Rewards minus the mean of their group, divided by that mean: hard prompts count more.

    A_i = (r_i - mean(r)) / (mean(r) + epsilon); 0 where mean(r) <= 0. Meant for rewards >= 0.

    Source: Maximum Likelihood RL, arXiv:2602.02710.
    """
    means = segments.means(rewards, groups, num_segments=segments.count(groups))[groups]
    centered = dr_grpo(rewards, groups)
    return torch.where(means > 0, centered / (means + epsilon), torch.zeros_like(centered))


def win_rate(rewards: Float[Tensor, "B"], groups: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Share of the others in its group that a trajectory beats, above one half.

    A_i = (wins_i + ties_i / 2) / (n - 1) - 1/2 = (wins_i - losses_i) / (2 (n - 1))

    Source: SPPO, arXiv:2405.00675, the estimate of P(y beats pi) - 1/2.
    Differs: nobody is compared with itself, which would pull every share towards one half.
    """
    num_groups = segments.count(groups)
    rows = segments.to_rows(rewards, groups, num_sequences=num_groups)
    is_member = segments.to_rows(torch.ones_like(rewards), groups, num_sequences=num_groups)
    signs = (rows[:, :, None] - rows[:, None, :]).sign() * is_member[:, None, :]
    return segments.from_rows(signs.sum(2), groups) / (2 * (_sizes(groups) - 1).clamp(min=1))


def gdpo(
    parts: Float[Tensor, "B K"], groups: Int[Tensor, "B"], *, weights: Float[Tensor, "K"], epsilon: float
) -> Float[Tensor, "B"]:
    """Each part of the reward normalised within its group, then added up: no part drowns another.

    A_i = sum_k weights_k * grpo(parts_k)_i, to be whitened over the batch afterwards

    Source: GDPO, arXiv:2601.05242.
    """
    normalised = torch.stack([grpo(part, groups, epsilon=epsilon) for part in parts.unbind(1)], dim=1)
    return (normalised * weights).sum(1)


def remax(rewards: Float[Tensor, "B"], greedy_rewards: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Rewards minus the reward of the greedy answer to the same prompt.

    A_i = r_i - greedy_rewards_i; 0 where that is NaN: a prompt whose greedy answer has no reward teaches nothing

    Source: ReMax, arXiv:2310.10505.
    """
    return torch.where(greedy_rewards.isnan(), 0, rewards - greedy_rewards)


def above_baseline(rewards: Float[Tensor, "B"], *, baseline: float) -> Float[Tensor, "B"]:
    """Rewards minus one number known before they were drawn, for prompts that are answered once.

    A_i = r_i - baseline

    Source: SPIRAL, arXiv:2506.24119, one moving baseline per role.
    """
    return rewards - baseline


def moving_baseline(baseline: float, rewards: Float[Tensor, "B"], *, decay: float) -> float:
    """The baseline for the next batch; take this batch's advantages with the one from before.

    baseline <- decay * baseline + (1 - decay) * mean(r); unchanged without rewards

    Source: SPIRAL, arXiv:2506.24119.
    """
    return decay * baseline + (1 - decay) * float(rewards.mean()) if len(rewards) else baseline


def standard_deviations(rewards: Float[Tensor, "B"], groups: Int[Tensor, "B"]) -> Float[Tensor, "G"]:
    """Population standard deviation of each group; exactly 0 where all are equal."""
    squares = dr_grpo(rewards, groups).square()
    return segments.means(squares, groups, num_segments=segments.count(groups)).sqrt()


def _above_lowest(rewards: Float[Tensor, "B"], groups: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    return rewards - segments.minima(rewards, groups, num_segments=segments.count(groups))[groups]


def _sizes(groups: Int[Tensor, "B"]) -> Int[Tensor, "B"]:
    return segments.sizes(groups, num_segments=segments.count(groups))[groups]


# @@ Pass@k: the chance that one of k answers is right, and advantages that raise it instead of the mean reward.
#
# A group smaller than k counts as one subset of all its members. A group without a signal (one member, all equal, or no
# k-subset that fails) has advantage 0 everywhere.
def pass_at_k(num_samples: Int[Tensor, "G"], num_correct: Int[Tensor, "G"], *, k: int) -> Float[Tensor, "G"]:
    """Share of the k-subsets of n samples, c of them correct, that hold a correct one; k >= 1.

    pass@k = 1 - C(n - c, k) / C(n, k), in float64

    Source: Evaluating Large Language Models Trained on Code, arXiv:2107.03374, eq. 1.
    """
    return 1 - _miss_rate(num_samples - num_correct, num_samples, k=k)


def pass_at_k_best(
    rewards: Float[Tensor, "B"], groups: Int[Tensor, "B"], *, epsilon: float | None = None
) -> Float[Tensor, "B"]:
    """What the best of a group adds to the group's maximum; 0 for everyone else, and for all if two are best.

    A_i = max_j(r_j) - max_{j != i}(r_j) [/ (std(r) + epsilon), if there is an epsilon]

    Source: Optimizing Language Models for Inference Time Objectives, arXiv:2503.19595, leave-one-out pass@k.
    """
    num_groups = segments.count(groups)
    best = segments.maxima(rewards, groups, num_segments=num_groups)[groups]
    is_best = rewards == best
    runners_up = segments.maxima(rewards.masked_fill(is_best, -torch.inf), groups, num_segments=num_groups)[groups]
    num_best = segments.sums(is_best.to(rewards.dtype), groups, num_segments=num_groups)[groups]
    is_signal = is_best & (num_best == 1) & runners_up.isfinite()
    lead = torch.where(is_signal, best - runners_up, torch.zeros_like(rewards))
    return lead if epsilon is None else lead / (standard_deviations(rewards, groups)[groups] + epsilon)


def pass_at_k_analytic(is_correct: Bool[Tensor, "B"], groups: Int[Tensor, "B"], *, k: int) -> Float[Tensor, "B"]:
    """Mean, over the k-subsets of its group that a trajectory is in, of the subset's normalised reward.

    p = 1 - C(n_wrong, k) / C(n, k), the mean of the subsets' rewards; s = sqrt(p (1 - p)), their deviation
    A_i = (1 - p) / s                                          if correct
    A_i = (1 - p - C(n_wrong - 1, k - 1) / C(n - 1, k - 1)) / s   if wrong

    Source: Pass@k Training, arXiv:2508.10751, analytical derivation.
    """
    num_groups = segments.count(groups)
    size = segments.sizes(groups, num_segments=num_groups)
    wrong = segments.sizes(groups[~is_correct], num_segments=num_groups)
    miss = _miss_rate(wrong, size, k=k)
    deviation = (miss * (1 - miss)).sqrt()
    miss_with_wrong = _miss_rate((wrong - 1).clamp(min=0), (size - 1).clamp(min=0), k=k - 1)
    gain = torch.where(is_correct, miss[groups], (miss - miss_with_wrong)[groups])
    has_signal = deviation[groups] > 0
    return torch.where(has_signal, gain / deviation[groups], 0).to(torch.get_default_dtype())


def _miss_rate(num_wrong: Int[Tensor, "G"], num_samples: Int[Tensor, "G"], *, k: int) -> Float[Tensor, "G"]:
    """C(num_wrong, k) / C(num_samples, k) as k factors, so that nothing overflows and 0 and 1 are exact."""
    drawn = torch.arange(k, device=num_wrong.device)
    wrong, left = (num_wrong[:, None] - drawn).clamp(min=0), num_samples[:, None] - drawn
    factors = torch.where(left > 0, wrong.double() / left.clamp(min=1), 1.0)
    return factors.prod(1)
