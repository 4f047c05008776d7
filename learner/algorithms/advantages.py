"""Advantages: group rewards -> one number per trajectory.

A group of one has advantage 0, except with `remax` and `moving_baseline`. `lite_ppo`, `gpg`, `gdpo`,
`reinforce_plus_plus_baseline`, and `moving_baseline` use whole-batch statistics.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from slipstream.learner.algorithms import segments
from slipstream.learner.algorithms.inputs import AdvantageInputs
from slipstream.learner.errors import BatchError

EPSILON = 1e-6
"""Added to standard deviations and means; 1e-4 in TRL, 1e-6 in verl. Real rewards spread far more."""


def grpo(inputs: AdvantageInputs, *, epsilon: float = EPSILON) -> Float[Tensor, "B"]:
    """Rewards normalized within their group.

    A_i = (r_i - mean(r)) / (std(r) + epsilon)

    Source: DeepSeekMath (GRPO), arXiv:2402.03300, section 4.1.2.
    """
    return segments.standardized(inputs.rewards, inputs.groups, epsilon=epsilon)


def dr_grpo(inputs: AdvantageInputs) -> Float[Tensor, "B"]:
    """Rewards minus the group mean.

    A_i = r_i - mean(r)

    Source: Understanding R1-Zero-Like Training (Dr. GRPO), arXiv:2503.20783, section 3.2.
    """
    return segments.centered(inputs.rewards, inputs.groups)


def rloo(inputs: AdvantageInputs) -> Float[Tensor, "B"]:
    """Rewards minus the mean of the other group members.

    A_i = r_i - mean_{j != i}(r_j) = n / (n - 1) * (r_i - mean(r))

    Source: Back to Basics (RLOO), arXiv:2402.14740, eq. 7.
    """
    sizes = segments.own_sizes(inputs.groups).to(inputs.rewards.dtype)
    return segments.centered(inputs.rewards, inputs.groups) * sizes / (sizes - 1).clamp(min=1)


def lite_ppo(inputs: AdvantageInputs, *, epsilon: float = EPSILON) -> Float[Tensor, "B"]:
    """Rewards minus the group mean, divided by the standard deviation over the batch.

    A_i = (r_i - mean_group(r)) / (std_batch(r) + epsilon)

    The group's deviation would amplify groups of almost equal rewards.

    Source: Tricks or Traps (Lite PPO), arXiv:2508.08221.
    """
    batch_deviation = segments.deviations(inputs.rewards, torch.zeros_like(inputs.groups))
    return segments.centered(inputs.rewards, inputs.groups) / (batch_deviation + epsilon)


def reinforce_plus_plus_baseline(inputs: AdvantageInputs, *, epsilon: float = EPSILON) -> Float[Tensor, "B"]:
    """Rewards minus the group mean, whitened over all tokens of the batch.

    d_i = r_i - mean_group(r)
    A_i = (d_i - mean_tokens(d)) / (std_tokens(d) + epsilon), d_i repeated for each trained token

    Source: REINFORCE++, arXiv:2501.03262, group-baseline variant.
    Differs: excludes groups of one from the whitening.
    """
    weights = (inputs.num_trained * (segments.own_sizes(inputs.groups) > 1)).to(inputs.rewards.dtype)
    return segments.whiten(segments.centered(inputs.rewards, inputs.groups), epsilon=epsilon, weights=weights)


def opo(inputs: AdvantageInputs) -> Float[Tensor, "B"]:
    """Rewards minus the length-weighted group mean, the minimum-variance baseline for similar tokens.

    A_i = r_i - sum_j(T_j r_j) / sum_j(T_j), T_i = model-written tokens, including rejected ones

    Source: On-Policy RL with Optimal Reward Baseline (OPO), arXiv:2505.23585.
    """
    groups, num_groups = inputs.groups, segments.count(inputs.groups)
    above = segments.above_lowest(inputs.rewards, groups)
    weighted = segments.sums(inputs.lengths * above, groups, num_segments=num_groups)
    tokens = segments.sums(inputs.lengths.to(inputs.rewards.dtype), groups, num_segments=num_groups)
    return above - (weighted / tokens.clamp(min=1))[groups]


def gpg(inputs: AdvantageInputs) -> Float[Tensor, "B"]:
    """Rewards minus the group mean, scaled to offset trajectories without gradient.

    A_i = alpha * (r_i - mean(r)), alpha = B / (trajectories in groups of unequal rewards)

    Source: GPG, arXiv:2504.02546, accurate gradient estimation, with F_norm = 1.
    """
    rewards, groups, num_groups = inputs.rewards, inputs.groups, segments.count(inputs.groups)
    lowest = segments.minima(rewards, groups, num_segments=num_groups)
    differs = segments.maxima(rewards, groups, num_segments=num_groups) > lowest
    alpha = len(rewards) / differs[groups].to(rewards.dtype).sum().clamp(min=1)
    return alpha * segments.centered(rewards, groups)


def maxrl(inputs: AdvantageInputs, *, epsilon: float = EPSILON) -> Float[Tensor, "B"]:
    """Rewards relative to the group mean, so that hard prompts count more.

    A_i = (r_i - mean(r)) / (mean(r) + epsilon); 0 where mean(r) <= 0. Meant for rewards >= 0.

    Source: Maximum Likelihood RL (MaxRL), arXiv:2602.02710.
    """
    groups = inputs.groups
    means = segments.means(inputs.rewards, groups, num_segments=segments.count(groups))[groups]
    centered = segments.centered(inputs.rewards, groups)
    return torch.where(means > 0, centered / (means + epsilon), torch.zeros_like(centered))


def win_rate(inputs: AdvantageInputs) -> Float[Tensor, "B"]:
    """Win rate against other group members, minus one half.

    A_i = (wins_i + ties_i / 2) / (n - 1) - 1/2 = (wins_i - losses_i) / (2 (n - 1))

    Source: SPPO, arXiv:2405.00675, the estimate of P(y beats pi) - 1/2.
    Differs: excludes self-comparisons, which pull win rates toward one half.
    """
    groups, num_groups = inputs.groups, segments.count(inputs.groups)
    rows = segments.to_rows(inputs.rewards, groups, num_sequences=num_groups)
    is_member = segments.to_rows(torch.ones_like(inputs.rewards), groups, num_sequences=num_groups)
    signs = (rows[:, :, None] - rows[:, None, :]).sign() * is_member[:, None, :]
    return segments.from_rows(signs.sum(2), groups) / (2 * (segments.own_sizes(groups) - 1).clamp(min=1))


def gdpo(inputs: AdvantageInputs, *, weights: dict[str, float], epsilon: float = EPSILON) -> Float[Tensor, "B"]:
    """Sum of reward parts, each normalized within its group.

    S_i = sum_k weights_k * grpo(parts_k)_i,  A_i = S_i / (std_batch(S) + epsilon)

    Without `weights`: all parts with weight 1. Raises BatchError if an answer lacks a part.

    Source: GDPO, arXiv:2601.05242.
    Differs: does not subtract the mean of S, which is 0 up to rounding.
    """
    names = tuple(weights) or tuple(inputs.parts)
    if not names or any(name not in inputs.parts or not inputs.parts[name].isfinite().all() for name in names):
        raise BatchError(
            f"algorithm.advantage=gdpo needs reward parts that every answer has ({', '.join(names)}), got "
            f"{', '.join(inputs.parts) or 'none'}, or answers that lack some of them: check the reward function."
        )
    parts = [segments.standardized(inputs.parts[name], inputs.groups, epsilon=epsilon) for name in names]
    factors = inputs.rewards.new_tensor([weights.get(name, 1.0) for name in names])
    summed = (torch.stack(parts, dim=1) * factors).sum(1)
    return summed / (summed.std(correction=0) + epsilon)


def remax(inputs: AdvantageInputs) -> Float[Tensor, "B"]:
    """Rewards minus the reward of the greedy answer to the same prompt.

    A_i = r_i - greedy_rewards_i; 0 if the greedy answer has no reward (NaN)

    Source: ReMax, arXiv:2310.10505.
    """
    return torch.where(inputs.greedy_rewards.isnan(), 0, inputs.rewards - inputs.greedy_rewards)


def moving_baseline(inputs: AdvantageInputs, *, decay: float = 0.9) -> Float[Tensor, "B"]:
    """Rewards minus a moving average over earlier steps, for prompts with a single answer.

    A_i = r_i - baseline, then baseline <- decay * baseline + (1 - decay) * mean(r), starting at the first mean

    Source: SPIRAL, arXiv:2506.24119 (one baseline per role); a decay of 0.9 averages ten steps.
    """
    mean = float(inputs.rewards.mean())
    baseline = inputs.state.get("baseline", mean)
    inputs.state["baseline"] = decay * baseline + (1 - decay) * mean
    return inputs.rewards - baseline


def grpo_passk(inputs: AdvantageInputs, *, normalize: bool = False, epsilon: float = EPSILON) -> Float[Tensor, "B"]:
    """Lead of the group's best trajectory; 0 for others and for ties.

    A_i = max_j(r_j) - max_{j != i}(r_j) [/ (std(r) + epsilon), with `normalize`]

    Source: Optimizing Language Models for Inference Time Objectives, arXiv:2503.19595, leave-one-out pass@k.
    """
    rewards, groups, num_groups = inputs.rewards, inputs.groups, segments.count(inputs.groups)
    best = segments.maxima(rewards, groups, num_segments=num_groups)[groups]
    is_best = rewards == best
    runners_up = segments.maxima(rewards.masked_fill(is_best, -torch.inf), groups, num_segments=num_groups)[groups]
    num_best = segments.sums(is_best.to(rewards.dtype), groups, num_segments=num_groups)[groups]
    is_signal = is_best & (num_best == 1) & runners_up.isfinite()
    lead = torch.where(is_signal, best - runners_up, torch.zeros_like(rewards))
    return lead / (segments.deviations(rewards, groups) + epsilon) if normalize else lead


def pass_at_k(inputs: AdvantageInputs, *, k: int) -> Float[Tensor, "B"]:
    """Mean normalized reward of the group's k-subsets that contain a trajectory.

    p = 1 - C(n_wrong, k) / C(n, k), the mean of the subsets' rewards; s = sqrt(p (1 - p)), their deviation
    A_i = (1 - p) / s                                          if correct
    A_i = (1 - p - C(n_wrong - 1, k - 1) / C(n - 1, k - 1)) / s   if wrong

    A group smaller than k is one subset. Advantages are 0 if all subsets fail or none does.

    Source: Pass@k Training, arXiv:2508.10751, analytical derivation.
    """
    is_correct, groups, num_groups = inputs.is_correct, inputs.groups, segments.count(inputs.groups)
    size = segments.sizes(groups, num_segments=num_groups)
    wrong = segments.sizes(groups[~is_correct], num_segments=num_groups)
    miss = _miss_rate(wrong, size, k=k)
    deviation = (miss * (1 - miss)).sqrt()
    miss_with_wrong = _miss_rate((wrong - 1).clamp(min=0), (size - 1).clamp(min=0), k=k - 1)
    gain = torch.where(is_correct, miss[groups], (miss - miss_with_wrong)[groups])
    has_signal = deviation[groups] > 0
    return torch.where(has_signal, gain / deviation[groups], 0).to(torch.get_default_dtype())


def _miss_rate(num_wrong: Int[Tensor, "G"], num_samples: Int[Tensor, "G"], *, k: int) -> Float[Tensor, "G"]:
    """C(num_wrong, k) / C(num_samples, k) as a product: no overflow, and exact 0 and 1."""
    drawn = torch.arange(k, device=num_wrong.device)
    wrong, left = (num_wrong[:, None] - drawn).clamp(min=0), num_samples[:, None] - drawn
    return torch.where(left > 0, wrong.double() / left.clamp(min=1), 1.0).prod(1)


def overlong_penalty(lengths: Int[Tensor, "B"], *, max_length: int, buffer: float) -> Float[Tensor, "B"]:
    """Penalty on long answers, falling from 0 to -1 over the last `buffer` > 0 tokens.

    penalty = clamp((max_length - buffer - T) / buffer, -1, 0)

    Source: DAPO, arXiv:2503.14476, eq. 13.
    """
    return ((max_length - buffer - lengths) / buffer).clamp(-1, 0)


def kl_in_reward(
    rewards: Float[Tensor, "B"],
    kl: Float[Tensor, "N"],
    sequences: Int[Tensor, "N"],
    *,
    coefficient: float,
    turn_rewards: Float[Tensor, "N"] | None = None,
) -> tuple[Float[Tensor, "B"], Float[Tensor, "N"]]:
    """Rewards minus a KL penalty, per trajectory and per token.

    total_i = r_i - coefficient * sum_t kl_it
    token_it = u_it + [t is last] * (r_i - sum_t u_it) - coefficient * kl_it

    u (`turn_rewards`): each turn's reward at its last token. Token rewards add up to the total of a trajectory with
    tokens. kl gets no gradient.

    Source: Fine-Tuning Language Models from Human Preferences, arXiv:1909.08593, eq. 2; kl is k1 there. Turns: ours.
    """
    lengths = segments.sizes(sequences, num_segments=len(rewards))
    is_last = segments.indices_in_rows(sequences, num_sequences=len(rewards)) == lengths[sequences] - 1
    prices = coefficient * kl.detach()
    totals = rewards - segments.sums(prices, sequences, num_segments=len(rewards))
    if turn_rewards is None:
        return totals, torch.where(is_last, rewards[sequences], 0) - prices
    rest = rewards - segments.sums(turn_rewards, sequences, num_segments=len(rewards))
    return totals, turn_rewards + torch.where(is_last, rest[sequences], 0) - prices
