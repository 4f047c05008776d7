"""Reward shaping: what is done to rewards before they become advantages."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from slipstream.learner.algorithms import segments
from slipstream.learner.algorithms.advantages import grpo, whiten


def overlong_penalty(lengths: Int[Tensor, "B"], *, max_length: int, buffer: int) -> Float[Tensor, "B"]:
    """What to add to the rewards of long answers: falls from 0 to -1 over the last `buffer` tokens, 0 < buffer.

    penalty = clamp((max_length - buffer - T) / buffer, -1, 0)

    Source: DAPO, arXiv:2503.14476, eq. 13.
    """
    return ((max_length - buffer - lengths) / buffer).clamp(-1, 0)


def mix(parts: Float[Tensor, "B K"], *, weights: Float[Tensor, "K"]) -> Float[Tensor, "B"]:
    """One reward out of several parts.

    r_i = sum_k weights_k * parts_ik
    """
    return (parts * weights).sum(1)


def normalise_over_batch(rewards: Float[Tensor, "B"], *, epsilon: float) -> Float[Tensor, "B"]:
    """Rewards, or one part of them, at mean 0 and deviation 1 over the batch; equal ones become 0.

    r_i <- (r_i - mean(r)) / (std(r) + epsilon)
    """
    return whiten(rewards, epsilon=epsilon)


def normalise_within_groups(
    rewards: Float[Tensor, "B"], groups: Int[Tensor, "B"], *, epsilon: float
) -> Float[Tensor, "B"]:
    """Rewards, or one part of them, at mean 0 and deviation 1 within each group; a group of one becomes 0.

    r_i <- (r_i - mean_group(r)) / (std_group(r) + epsilon)
    """
    return grpo(rewards, groups, epsilon=epsilon)


def kl_in_reward(
    rewards: Float[Tensor, "B"], kl: Float[Tensor, "N"], sequences: Int[Tensor, "N"], *, coefficient: float
) -> tuple[Float[Tensor, "B"], Float[Tensor, "N"]]:
    """Rewards minus a price for leaving the reference: per trajectory, and per token with the reward at the last one.

    total_i = r_i - coefficient * sum_t kl_it;  token_it = [t is last] * r_i - coefficient * kl_it

    No gradient flows through kl. A trajectory without tokens has a total, but no token to put its reward on.

    Source: Fine-Tuning Language Models from Human Preferences, arXiv:1909.08593, eq. 2; kl is k1 there.
    """
    lengths = segments.sizes(sequences, num_segments=len(rewards))
    is_last = segments.indices_in_rows(sequences, num_sequences=len(rewards)) == lengths[sequences] - 1
    prices = coefficient * kl.detach()
    totals = rewards - segments.sums(prices, sequences, num_segments=len(rewards))
    return totals, torch.where(is_last, rewards[sequences], 0) - prices


def returns_to_go(
    token_rewards: Float[Tensor, "N"], sequences: Int[Tensor, "N"], *, gamma: float, num_sequences: int
) -> Float[Tensor, "N"]:
    """Discounted sum of the rewards of a token and of those after it in its sequence.

    G_t = r_t + gamma * G_{t+1}

    Summed by doubling: after the step with `shift`, each entry holds the sum of the next 2 * shift rewards.
    """
    rows = segments.to_rows(token_rewards, sequences, num_sequences=num_sequences)
    shift = 1
    while shift < rows.shape[1]:
        rows[:, :-shift] += gamma**shift * rows[:, shift:]
        shift *= 2
    return segments.from_rows(rows, sequences)
