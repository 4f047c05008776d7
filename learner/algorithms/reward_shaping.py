"""Reward shaping: rewards as the reward functions give them -> the rewards that are compared."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from slipstream.learner.algorithms import segments


def overlong_penalty(lengths: Int[Tensor, "B"], *, max_length: int, buffer: int) -> Float[Tensor, "B"]:
    """Penalty of long answers, to be added: falls from 0 to -1 over the last `buffer` tokens, 0 < buffer.

    penalty = clamp((max_length - buffer - T) / buffer, -1, 0)

    Source: DAPO, arXiv:2503.14476, eq. 13.
    """
    return ((max_length - buffer - lengths) / buffer).clamp(-1, 0)


def mix(parts: Float[Tensor, "B K"], *, weights: Float[Tensor, "K"]) -> Float[Tensor, "B"]:
    """One reward out of several parts.

    r_i = sum_k weights_k * parts_ik
    """
    return (parts * weights).sum(1)


def kl_in_reward(
    rewards: Float[Tensor, "B"],
    kl: Float[Tensor, "N"],
    sequences: Int[Tensor, "N"],
    *,
    coefficient: float,
    turn_rewards: Float[Tensor, "N"] | None = None,
) -> tuple[Float[Tensor, "B"], Float[Tensor, "N"]]:
    """Rewards minus a price for leaving the reference: per trajectory, and per token where each was earned.

    total_i = r_i - coefficient * sum_t kl_it
    token_it = u_it + [t is last] * (r_i - sum_t u_it) - coefficient * kl_it

    u are `turn_rewards`, of each turn at its last token: a part of r, whose rest is earned by the whole. So tokens add
    up to the total. No gradient flows through kl. A trajectory without tokens has a total, but no token that carries
    its reward.

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
