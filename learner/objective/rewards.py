"""Rewards: from those of the reward functions to those that are compared, of trajectories and of tokens."""

import torch
from torch import Tensor

from slipstream.configs.algorithm import AlgorithmConfig
from slipstream.configs.algorithm_terms import RewardShapingConfig
from slipstream.learner.algorithms import reward_shaping, segments
from slipstream.learner.algorithms.inputs import KlInputs, known
from slipstream.learner.algorithms.kl import KL_ESTIMATORS
from slipstream.learner.batching.batch import Batch


def shape_rewards(batch: Batch, *, config: AlgorithmConfig, kl_coefficient: float, max_tokens: int) -> Batch:
    """Replace the rewards of trajectories and fill those of tokens.

    `kl_coefficient` is the price of a nat where the KL is charged in the reward; `max_tokens` the longest response.
    """
    rewards = _normalised(_mixed(batch, config.reward, max_tokens=max_tokens), batch, config.reward)
    price = kl_coefficient if config.kl.charged_in == "reward" else 0.0
    divergence = torch.zeros_like(batch.tokens.generator_logprobs)
    if price:
        inputs = KlInputs(known(batch.tokens.start_logprobs), known(batch.tokens.reference_logprobs))
        divergence = KL_ESTIMATORS[config.kl.estimator](inputs)
    # Tokens as well as totals: advantages per token, such as GAE's, take each reward where it is earned.
    totals, tokens = reward_shaping.kl_in_reward(
        rewards, divergence, batch.tokens.sequences, coefficient=price, turn_rewards=batch.tokens.turn_rewards
    )
    return batch.replace(trajectories=batch.trajectories.replace(rewards=totals)).with_tokens(rewards=tokens)


def _mixed(batch: Batch, shaping: RewardShapingConfig, *, max_tokens: int) -> Tensor:
    """The configured parts, or the total, minus the penalty of long answers."""
    rewards = batch.trajectories.rewards
    if shaping.parts:
        parts = batch.parts(tuple(shaping.parts), setting="algorithm.reward.parts").nan_to_num()
        rewards = reward_shaping.mix(parts, weights=parts.new_tensor(list(shaping.parts.values())))
    if shaping.overlong_buffer is None:
        return rewards
    lengths = batch.trajectories.lengths
    return rewards + reward_shaping.overlong_penalty(lengths, max_length=max_tokens, buffer=shaping.overlong_buffer)


def _normalised(rewards: Tensor, batch: Batch, shaping: RewardShapingConfig) -> Tensor:
    """Normalised among members alone; the others have no reward, 0."""
    members = batch.trajectories.is_member
    shaped = torch.where(members, rewards, 0.0)
    if shaping.normalise == "batch":
        shaped[members] = segments.whiten(shaped[members], epsilon=shaping.epsilon)
    elif shaping.normalise == "group":
        groups = batch.trajectories.groups[members]
        shaped[members] = segments.standardised(shaped[members], groups, epsilon=shaping.epsilon)
    return shaped
