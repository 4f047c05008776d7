"""Loss inputs: correction weights, rewards, advantages, token weights, and selected tokens.

Computed without gradient, identically on every rank. `correct`, `ratio_inputs`, and `mask_inputs` may get a microbatch,
others a step's or update's batch.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.configs.algorithm import AlgorithmConfig, CorrectionConfig, DistillationConfig
from slipstream.configs.algorithm_terms import AdvantageConfig, CustomAdvantageConfig
from slipstream.learner.algorithms import advantages, distillation, find, importance, segments
from slipstream.learner.algorithms.inputs import (
    AdvantageInputs,
    AggregationInputs,
    KlInputs,
    MaskInputs,
    RatioInputs,
    known,
)
from slipstream.learner.algorithms.kl import KL_ESTIMATORS
from slipstream.learner.batching.batch import Batch, Tokens
from slipstream.learner.errors import BatchError


class Correction(NamedTuple):
    """Weights and rejections of N tokens."""

    weights: Tensor
    """float32[N], factor of the policy loss."""
    is_kept: Tensor
    """bool[N], false for tokens excluded from the loss."""
    is_bounded: Tensor
    """bool[N], true if the weight was truncated or masked."""


@torch.no_grad()
def correct(inputs: RatioInputs, *, learner: RatioInputs, config: CorrectionConfig) -> Correction:
    """Weights from `inputs` = log(proximal/generator), and rejections from `learner` = log(learner/generator)."""
    is_kept = torch.ones_like(learner.log_ratio, dtype=torch.bool)
    for entry in config.reject:
        low, high = _bounds(entry.low, entry.high)
        is_kept &= find(f"importance.keep_{entry.statistic}")(learner, over=entry.over, low=low, high=high)
    if config.veto:
        is_kept &= importance.veto(learner, low=config.veto[0], high=config.veto[1])
    if config.level == "none":
        return Correction(torch.ones_like(inputs.log_ratio), is_kept, torch.zeros_like(is_kept))
    ratios = find(f"importance.{config.level}_level")(inputs)
    low, high = _bounds(config.min_weight, config.max_weight)
    bound = importance.mask if config.outside == "mask" else importance.truncate
    weights = bound(ratios, low=low, high=high)
    if config.normalize:
        # The mean must count sequences, not their tokens.
        counted = weights if config.level == "token" else importance.one_per_sequence(weights, inputs)
        weights = importance.normalize(weights, mean=counted.mean())
    return Correction(weights, is_kept, is_bounded=(ratios > high) | (ratios < low))


def _bounds(low: float | None, high: float | None) -> tuple[float, float]:
    return -math.inf if low is None else low, math.inf if high is None else high


Mask = Callable[[MaskInputs], Tensor]


def correct_batch(batch: Batch, *, config: AlgorithmConfig) -> Batch:
    """Fill weights and rejections if known before the first gradient."""
    tokens = batch.tokens
    if tokens.start_logprobs is None or config.proximal in ("reuse", "interpolate"):
        return batch
    drift = ratio_inputs(tokens, tokens.start_logprobs, num_sequences=batch.num_contexts)
    weights, is_kept, is_bounded = correct(drift, learner=drift, config=config.correction)
    return batch.with_tokens(correction_weights=weights, is_kept=is_kept, is_bounded=is_bounded)


def ratio_inputs(tokens: Tokens, logprobs: Tensor, *, num_sequences: int) -> RatioInputs:
    """Drift of `logprobs` from the generator."""
    drift = importance.token_log_ratio(logprobs, tokens.generator_logprobs)
    return RatioInputs(drift, tokens.contexts, num_sequences)


def shape_rewards(batch: Batch, *, config: AlgorithmConfig, kl_coefficient: float, max_tokens: int) -> Batch:
    """Shape trajectory rewards and fill token rewards. `max_tokens`: maximum response length."""
    rewards, shaping = batch.trajectories.rewards, config.reward
    if shaping.parts:
        parts = batch.parts(tuple(shaping.parts), setting="algorithm.reward.parts").nan_to_num()
        rewards = (parts * parts.new_tensor(list(shaping.parts.values()))).sum(1)
    if shaping.overlong_buffer is not None:
        lengths, buffer = batch.trajectories.lengths, shaping.overlong_buffer
        buffer *= max_tokens if buffer < 1 else 1
        rewards = rewards + advantages.overlong_penalty(lengths, max_length=max_tokens, buffer=buffer)
    # Normalize over members. Non-members get a reward of 0.
    members = batch.trajectories.is_member
    rewards = torch.where(members, rewards, 0.0)
    if shaping.normalize == "batch":
        rewards[members] = segments.whiten(rewards[members], epsilon=advantages.EPSILON)
    elif shaping.normalize == "group":
        groups = batch.trajectories.groups[members]
        rewards[members] = segments.standardized(rewards[members], groups, epsilon=advantages.EPSILON)
    price = kl_coefficient if config.kl.apply_to == "reward" else 0.0
    divergence = torch.zeros_like(batch.tokens.generator_logprobs)
    if price:
        inputs = KlInputs(known(batch.tokens.start_logprobs), known(batch.tokens.reference_logprobs))
        divergence = KL_ESTIMATORS[config.kl.estimator](inputs)
    totals, tokens = advantages.kl_in_reward(
        rewards, divergence, batch.tokens.sequences, coefficient=price, turn_rewards=batch.tokens.turn_rewards
    )
    return batch.replace(trajectories=batch.trajectories.replace(rewards=totals)).with_tokens(rewards=tokens)


def fill_advantages(
    batch: Batch, function: Callable[[AdvantageInputs], Any], *, config: AdvantageConfig, state: dict[str, float]
) -> Batch:
    """Fill `advantages`, and `returns` for a critic; 0 outside the baseline. Raises BatchError."""
    inputs = _advantage_inputs(batch.select(batch.trajectories.is_member), state=state)
    advantages = returns = inputs.token_rewards
    if inputs.num_sequences:
        found = function(inputs)
        advantages, returns = found if config.needs_critic else (found, returns)
        if isinstance(config, CustomAdvantageConfig) and not (
            isinstance(advantages, Tensor)
            and advantages.shape == inputs.rewards.shape
            and bool(advantages.isfinite().all())
        ):
            raise BatchError(
                f"algorithm.advantage.function={config.function} must return one finite number per trajectory "
                f"({inputs.num_sequences}), got {advantages!r:.200}."
            )
        if not config.is_per_token:
            advantages = advantages[inputs.sequences]
    is_filled = batch.per_token(batch.trajectories.is_member)
    filled = batch.with_tokens(advantages=_spread(advantages, is_filled))
    return filled.with_tokens(returns=_spread(returns, is_filled)) if config.needs_critic else filled


def _advantage_inputs(members: Batch, *, state: dict[str, float]) -> AdvantageInputs:
    trajectories, tokens = members.trajectories, members.tokens
    return AdvantageInputs(
        rewards=trajectories.rewards,
        # A group without valid rewards leaves a gap.
        groups=torch.unique(trajectories.groups, return_inverse=True)[1],
        lengths=trajectories.lengths,
        num_trained=trajectories.num_trained,
        is_correct=trajectories.is_correct,
        greedy_rewards=trajectories.greedy_rewards,
        parts=dict(zip(members.part_names, trajectories.parts.unbind(1), strict=True)),
        sources=[members.source_names[number] for number in trajectories.sources.tolist()],
        sequences=tokens.sequences,
        turns=tokens.turns,
        positions=tokens.positions,
        positions_in_turn=tokens.positions_in_turn,
        token_rewards=known(tokens.rewards),
        generator_logprobs=tokens.generator_logprobs,
        observations=tokens.observations,
        learner_logprobs=tokens.start_logprobs,
        collisions=tokens.collisions,
        values=tokens.values,
        process_rewards=tokens.process_rewards,
        correction_weights=tokens.correction_weights,
        state=state,
    )


def _spread(values: Tensor, is_filled: Tensor) -> Tensor:
    column = torch.zeros(len(is_filled), dtype=torch.float32, device=is_filled.device)
    column[is_filled] = values.float()
    return column


def add_teacher_advantages(batch: Batch, *, config: DistillationConfig) -> Batch:
    """Replace advantages by the teacher's (0 unless k1), or add these if `with_rewards`."""
    advantages = known(batch.tokens.advantages)
    if not config.with_rewards:
        advantages = torch.zeros_like(advantages)
    if config.divergence == "k1":
        own, teacher = known(batch.tokens.start_logprobs), known(batch.tokens.teacher_logprobs)
        advantages = advantages + config.coef * distillation.teacher_advantages(own, teacher)
    return batch.with_tokens(advantages=advantages)


def token_weights(batch: Batch, *, config: AlgorithmConfig, max_tokens: int) -> Tensor:
    """float32[N]: weight of each token's loss. `max_tokens`: as in `shape_rewards`."""
    trajectories, is_kept = batch.trajectories, batch.tokens.is_kept
    counts = trajectories.num_trained
    if config.correction.loss_denominator == "kept_tokens" and is_kept is not None:
        counts = segments.sizes(batch.tokens.sequences[is_kept], num_segments=batch.num_trajectories)
    weights = torch.zeros(batch.num_trajectories, dtype=torch.float64, device=counts.device)
    for update in trajectories.updates.unique():
        own = trajectories.updates == update
        inputs = AggregationInputs(counts[own], trajectories.groups[own], config.loss_aggregation_length or max_tokens)
        weights[own] = find(f"policy_losses.{config.loss_aggregation}")(inputs)
    return batch.per_token(weights * trajectories.draw_weights).float()


def nll_weights(batch: Batch, *, coefficient: float) -> Tensor | None:
    """float32[N]: weights for the mean of -log pi over tokens of correct answers in an update; None if unused."""
    if not coefficient:
        return None
    is_right = batch.per_token(batch.trajectories.is_correct & batch.trajectories.is_member)
    updates = batch.per_token(batch.trajectories.updates)
    counts = segments.sizes(updates[is_right], num_segments=segments.count(updates)).clamp(min=1)
    return (coefficient * batch.per_token(batch.trajectories.draw_weights) * is_right / counts[updates]).float()


def learning_rate_scale(batch: Batch) -> float:
    """Factor from the effective sample size of a step's unbounded sequence weights."""
    drift = ratio_inputs(batch.tokens, known(batch.tokens.start_logprobs), num_sequences=batch.num_contexts)
    weights = importance.one_per_sequence(importance.sequence_level(drift), drift)
    return importance.ess_learning_rate_scale(float(importance.effective_sample_size(weights)))


def describe_advantages(batch: Batch) -> dict[str, float]:
    """Compute the `learner/advantage_...` metrics."""
    advantages = known(batch.tokens.advantages)
    if not len(advantages):
        return {f"learner/advantage_{name}": 0.0 for name in ("mean", "std", "zero_fraction")}
    return {
        "learner/advantage_mean": float(advantages.mean()),
        "learner/advantage_std": float(advantages.std(correction=0)),
        "learner/advantage_zero_fraction": float((advantages == 0).float().mean()),
    }


@torch.no_grad()
def select_tokens(batch: Batch, *, masks: Sequence[Mask], selector: Mask | None, update: int, seed: int) -> Batch:
    """Fill `is_trusted` and `is_selected` for one update, given `current_logprobs`."""
    own = batch.trajectories.updates[batch.tokens.sequences] == update
    tokens = batch.tokens.take(own)
    inputs = mask_inputs(tokens, known(tokens.current_logprobs), num_sequences=batch.num_contexts, seed=seed)
    is_trusted = torch.ones_like(own) if batch.tokens.is_trusted is None else batch.tokens.is_trusted.clone()
    for mask in masks:
        is_trusted[own] &= mask(inputs)
    is_selected = torch.zeros_like(own) if batch.tokens.is_selected is None else batch.tokens.is_selected.clone()
    if selector:
        is_selected[own] = selector(inputs)
    return batch.with_tokens(is_trusted=is_trusted, is_selected=is_selected)


def mask_inputs(tokens: Tokens, learner_logprobs: Tensor, *, num_sequences: int, seed: int = 0) -> MaskInputs:
    """`learner_logprobs`: without gradient."""
    is_counted = torch.ones_like(tokens.sequences, dtype=torch.bool)
    if tokens.is_kept is not None:
        is_counted = tokens.is_kept & (known(tokens.correction_weights) > 0)
    return MaskInputs(
        log_ratio=importance.token_log_ratio(learner_logprobs, tokens.generator_logprobs),
        advantages=known(tokens.advantages),
        learner_logprobs=learner_logprobs,
        sequences=tokens.contexts,
        num_sequences=num_sequences,
        is_counted=is_counted,
        seed=seed,
    )
