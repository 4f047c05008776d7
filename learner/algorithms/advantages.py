"""Advantages: rewards of groups -> one number per trajectory.

Groups may differ in size; `groups` says which group each reward belongs to. Deviations are taken from the group's
smallest reward before the mean, so that a group of equal rewards gives exactly 0, not a rounding error.

A group of one has advantage 0, because it has no baseline. Only `remax` and `above_baseline` give it another: their
baseline comes from outside the group. Standard deviations are those of the population (divided by n); epsilon > 0.

`lite_ppo`, `gpg` and `reinforce_plus_plus_baseline` scale by the whole batch, so a group's advantages depend on the
others there; everywhere else groups do not see each other.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from learner.algorithms import segments
from learner.algorithms.whitening import whiten


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
