"""Shaping: rewards as the reward functions gave them -> rewards as they are compared, of trajectories and of tokens."""

import torch
from torch import Tensor

from slipstream.configs.algorithm import AlgorithmConfig
from slipstream.configs.algorithm_terms import RewardShapingConfig
from slipstream.learner.algorithms import kl, reward_shaping
from slipstream.learner.batching.batch import Batch, known
from slipstream.learner.objective.state import ObjectiveState


def shape_rewards(batch: Batch, *, config: AlgorithmConfig, state: ObjectiveState, max_tokens: int) -> Batch:
    """Replace the rewards of trajectories and fill those of tokens. `max_tokens`: longest response."""
    rewards = _penalised(_mixed(batch, config.reward), batch, config.reward, max_tokens=max_tokens)
    rewards = _normalised(rewards, batch, config.reward)
    price = kl_coefficient(config, state) if config.kl.charged_in == "reward" else 0.0
    measured = _measured_kl(batch, config=config) if price else torch.zeros_like(batch.tokens.generator_logprobs)
    totals, tokens = reward_shaping.kl_in_reward(rewards, measured, batch.tokens.sequences, coefficient=price)
    return batch.replace(trajectories=batch.trajectories.replace(rewards=totals)).with_tokens(rewards=tokens)


def kl_coefficient(config: AlgorithmConfig, state: ObjectiveState) -> float:
    """Where it stands now."""
    return config.kl.coefficient if state.kl_coefficient is None else state.kl_coefficient


def _mixed(batch: Batch, shaping: RewardShapingConfig) -> Tensor:
    if not shaping.parts:
        return batch.trajectories.rewards
    parts = batch.parts(tuple(shaping.parts), setting="algorithm.reward.parts")
    return reward_shaping.mix(parts.nan_to_num(), weights=parts.new_tensor(list(shaping.parts.values())))


def _penalised(rewards: Tensor, batch: Batch, shaping: RewardShapingConfig, *, max_tokens: int) -> Tensor:
    if shaping.overlong_buffer is None:
        return rewards
    lengths = batch.trajectories.lengths
    return rewards + reward_shaping.overlong_penalty(lengths, max_length=max_tokens, buffer=shaping.overlong_buffer)


def _normalised(rewards: Tensor, batch: Batch, shaping: RewardShapingConfig) -> Tensor:
    """Among members alone; the others have no reward."""
    members = batch.trajectories.is_member
    shaped = torch.where(members, rewards, 0.0)
    if shaping.normalise == "batch":
        shaped[members] = reward_shaping.normalise_over_batch(shaped[members], epsilon=shaping.epsilon)
    elif shaping.normalise == "group":
        groups = batch.trajectories.groups[members]
        shaped[members] = reward_shaping.normalise_within_groups(shaped[members], groups, epsilon=shaping.epsilon)
    return shaped


def _measured_kl(batch: Batch, *, config: AlgorithmConfig) -> Tensor:
    tokens = batch.tokens
    estimator = kl.KL_ESTIMATORS[config.kl.estimator]
    return estimator(known(tokens.start_logprobs), known(tokens.reference_logprobs))
