"""Loss inputs: correction weights, advantages and token weights of a batch.

Everything here is computed on the whole batch of a step, the same on every rank and without gradient, so that no split
into microbatches or ranks can change it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slipstream.configs.advantages import AdvantageConfig, CustomAdvantageConfig
from slipstream.configs.algorithm import AlgorithmConfig, EssLearningRateConfig
from slipstream.configs.algorithm_terms import DistillationConfig
from slipstream.learner.algorithms import distillation, importance, rejection, segments
from slipstream.learner.algorithms.aggregation import AGGREGATIONS
from slipstream.learner.algorithms.inputs import AdvantageInputs, AggregationInputs, RatioInputs, known
from slipstream.learner.batching.batch import Batch
from slipstream.learner.errors import BatchError
from slipstream.learner.objective.importance_correction import correct


def correct_batch(batch: Batch, *, config: AlgorithmConfig) -> Batch:
    """Fill weights and rejections where they are known before the first gradient; with `rebaseline`, trajectories that
    were rejected entirely leave their group's baseline."""
    tokens = batch.tokens
    if tokens.start_logprobs is None or config.proximal in ("reuse", "interpolate"):
        return batch
    drift = importance.token_log_ratio(tokens.start_logprobs, tokens.generator_logprobs)
    ratios = RatioInputs(drift, tokens.contexts, batch.num_contexts)
    correction = correct(ratios, learner=ratios, lags=tokens.lags, config=config.correction)
    batch = batch.with_tokens(
        correction_weights=correction.weights, is_kept=correction.is_kept, is_bounded=correction.is_bounded
    )
    if not config.correction.rebaseline:
        return batch
    # A trajectory without trained tokens, such as a truncated one, was not rejected: its reward stays in the baseline.
    is_rejected = (batch.trajectories.num_trained > 0) & (_num_kept(batch) == 0)
    is_left = batch.trajectories.is_member & ~is_rejected
    return batch.replace(trajectories=batch.trajectories.replace(is_member=is_left))


def fill_advantages(
    batch: Batch, function: Callable[[AdvantageInputs], Any], *, config: AdvantageConfig, state: dict[str, float]
) -> Batch:
    """Fill `advantages`, and `returns` for a critic; both are 0 for trajectories that do not count in a baseline."""
    members = batch.select(batch.trajectories.is_member)
    inputs = _advantage_inputs(members, state=state)
    advantages = returns = inputs.token_rewards
    if inputs.num_sequences:
        found = function(inputs)
        advantages, returns = found if config.needs_critic else (found, returns)
        if isinstance(config, CustomAdvantageConfig):
            _check_returned(advantages, inputs, config=config)
        if not config.is_per_token:
            advantages = advantages[inputs.sequences]
    is_filled = batch.per_token(batch.trajectories.is_member)
    return batch.with_tokens(
        advantages=_spread(advantages, is_filled), returns=_spread(returns, is_filled) if config.needs_critic else None
    )


def _advantage_inputs(members: Batch, *, state: dict[str, float]) -> AdvantageInputs:
    trajectories, tokens = members.trajectories, members.tokens
    return AdvantageInputs(
        rewards=trajectories.rewards,
        # Numbered anew, because a group whose rewards all failed leaves a gap.
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
        learner_logprobs=tokens.start_logprobs,
        collisions=tokens.collisions,
        values=tokens.values,
        correction_weights=tokens.correction_weights,
        state=state,
    )


def _check_returned(found: object, inputs: AdvantageInputs, *, config: CustomAdvantageConfig) -> None:
    if not isinstance(found, Tensor) or found.shape != inputs.rewards.shape or not found.isfinite().all():
        raise BatchError(
            f"algorithm.advantage.function={config.function} must return one finite number per trajectory "
            f"({inputs.num_sequences}), got {found!r:.200}."
        )


def _spread(values: Tensor, is_filled: Tensor) -> Tensor:
    """float32[N]: the values where `is_filled` is true, 0 elsewhere."""
    column = torch.zeros(len(is_filled), dtype=torch.float32, device=is_filled.device)
    column[is_filled] = values.float()
    return column


def add_teacher_advantages(batch: Batch, *, config: DistillationConfig) -> Batch:
    """Replace the advantages by the teacher's, or add those to them."""
    advantages = known(batch.tokens.advantages)
    if not config.with_rewards:
        advantages = torch.zeros_like(advantages)
    if config.divergence == "k1":
        own, teacher = known(batch.tokens.start_logprobs), known(batch.tokens.teacher_logprobs)
        advantages = advantages + config.coefficient * distillation.teacher_advantages(own, teacher, bound=config.bound)
    return batch.with_tokens(advantages=advantages)


def token_weights(batch: Batch, *, config: AlgorithmConfig, max_tokens: int) -> Tensor:
    """float32[N]: factor of each token's loss; `max_tokens` is the longest response.

    Denominators count a whole optimizer update, all ranks and microbatches: a mean of means would weigh a token by the
    microbatch it was packed into.
    """
    trajectories = batch.trajectories
    counts = _num_kept(batch) if config.correction.denominator == "kept" else trajectories.num_trained
    weights = torch.zeros(batch.num_trajectories, dtype=torch.float64, device=counts.device)
    for update in trajectories.updates.unique():
        own = trajectories.updates == update
        inputs = AggregationInputs(counts[own], trajectories.groups[own], config.aggregation_length or max_tokens)
        weights[own] = AGGREGATIONS[config.aggregation](inputs)
    return batch.per_token(weights * trajectories.draw_weights).float()


def nll_weights(batch: Batch, *, coefficient: float) -> Tensor | None:
    """float32[N]: factor of -log pi of the tokens of entirely right answers, their mean over each update; None at 0."""
    if not coefficient:
        return None
    is_right = batch.per_token(batch.trajectories.is_correct & batch.trajectories.is_member)
    updates = batch.per_token(batch.trajectories.updates)
    counts = segments.sizes(updates[is_right], num_segments=segments.count(updates)).clamp(min=1)
    draw_weights = batch.per_token(batch.trajectories.draw_weights)
    return (coefficient * draw_weights * is_right / counts[updates]).float()


def _num_kept(batch: Batch) -> Tensor:
    is_kept = batch.tokens.is_kept
    if is_kept is None:
        return batch.trajectories.num_trained
    return rejection.num_kept(is_kept, batch.tokens.sequences, num_sequences=batch.num_trajectories)


def learning_rate_scale(batch: Batch, *, config: EssLearningRateConfig | None) -> float:
    """Factor of the learning rate in this step, by the effective sample size."""
    if config is None:
        return 1.0
    tokens = batch.tokens
    drift = importance.token_log_ratio(known(tokens.start_logprobs), tokens.generator_logprobs)
    ratios = RatioInputs(drift, tokens.contexts, batch.num_contexts)
    weights = importance.LEVELS[config.level](ratios)
    if config.level == "sequence":
        weights = importance.one_per_sequence(weights, ratios)
    ess = float(importance.effective_sample_size(weights))
    return importance.ess_learning_rate_scale(ess, power=config.power, floor=config.floor)


def describe_advantages(batch: Batch) -> dict[str, float]:
    """`learner/...` about the advantages of a prepared batch."""
    advantages = known(batch.tokens.advantages)
    if not len(advantages):
        return {f"learner/advantage_{name}": 0.0 for name in ("mean", "std", "zero_fraction")}
    return {
        "learner/advantage_mean": float(advantages.mean()),
        "learner/advantage_std": float(advantages.std(correction=0)),
        "learner/advantage_zero_fraction": float((advantages == 0).float().mean()),
    }
