"""Judging: a batch -> the same with advantages, correction weights and the factor of every token's loss.

Everything here looks at the whole batch of a step and has no gradient.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.configs.algorithm import AlgorithmConfig, EssLearningRateConfig
from slipstream.learner.algorithms import aggregation, controllers, importance, rejection, segments
from slipstream.learner.batching.batch import Batch, known
from slipstream.learner.objective.advantage_registry import estimate
from slipstream.learner.objective.importance_correction import correct
from slipstream.learner.objective.rewards import shape_rewards
from slipstream.learner.objective.state import ObjectiveState
from slipstream.learner.training.frozen_models import teach_advantages

_AGGREGATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "token_mean": aggregation.token_mean,
    "token_sum": aggregation.token_sum,
    "seq_mean_token_mean": aggregation.seq_mean_token_mean,
    "seq_mean_token_sum": aggregation.seq_mean_token_sum,
}


@torch.no_grad()
def prepare(batch: Batch, *, config: AlgorithmConfig, state: ObjectiveState, max_tokens: int) -> Batch:
    """Fill the columns from `correction_weights` on. `max_tokens`: longest response. Raises BatchError."""
    batch = _correct(batch, config=config)
    batch = shape_rewards(batch, config=config, state=state, max_tokens=max_tokens)
    batch = estimate(config.advantage, batch, state=state)
    if config.distillation:
        batch = teach_advantages(batch, config=config.distillation)
    return batch.with_tokens(
        token_weights=_token_weights(batch, config=config, max_tokens=max_tokens),
        nll_weights=_nll_weights(batch, coefficient=config.positive_nll_coefficient),
    )


def describe(batch: Batch) -> dict[str, float]:
    """`learner/...` about the advantages of a prepared batch."""
    advantages = known(batch.tokens.advantages)
    if not len(advantages):
        return {f"learner/advantage_{name}": 0.0 for name in ("mean", "std", "zero_fraction")}
    return {
        "learner/advantage_mean": float(advantages.mean()),
        "learner/advantage_std": float(advantages.std(correction=0)),
        "learner/advantage_zero_fraction": float((advantages == 0).float().mean()),
    }


def learning_rate_scale(batch: Batch, *, config: EssLearningRateConfig | None) -> float:
    """Factor of the learning rate in this step."""
    if config is None:
        return 1.0
    tokens = batch.tokens
    drift = importance.token_log_ratio(known(tokens.start_logprobs), tokens.generator_logprobs)
    weights = importance.LEVELS[config.level](drift, tokens.sequences, num_sequences=batch.num_trajectories)
    if config.level == "sequence":
        weights = importance.one_per_sequence(weights, tokens.sequences, num_sequences=batch.num_trajectories)
    ess = float(importance.effective_sample_size(weights))
    return controllers.ess_learning_rate_scale(ess, power=config.power, floor=config.floor)


def _correct(batch: Batch, *, config: AlgorithmConfig) -> Batch:
    """Weights and rejections, where the whole batch is known before the first gradient."""
    tokens = batch.tokens
    if tokens.start_logprobs is None or config.proximal in ("reuse", "interpolate"):
        return batch
    drift = importance.token_log_ratio(tokens.start_logprobs, tokens.generator_logprobs)
    correction = correct(
        drift, tokens, learner_log_ratio=drift, num_sequences=batch.num_trajectories, config=config.correction
    )
    batch = batch.with_tokens(
        correction_weights=correction.weights, is_kept=correction.is_kept, is_bounded=correction.is_bounded
    )
    if not config.correction.rebaseline:
        return batch
    is_rejected = (batch.trajectories.num_trained > 0) & (_num_kept(batch) == 0)
    is_left = batch.trajectories.is_member & ~is_rejected
    return batch.replace(trajectories=batch.trajectories.replace(is_member=is_left))


def _token_weights(batch: Batch, *, config: AlgorithmConfig, max_tokens: int) -> Tensor:
    """Factor of every token's loss; denominators are those of its own optimizer update."""
    counts = _num_kept(batch) if config.correction.denominator == "kept" else batch.trajectories.num_trained
    weights = torch.zeros(batch.num_trajectories, dtype=torch.float64, device=counts.device)
    for update in batch.trajectories.updates.unique():
        own = batch.trajectories.updates == update
        weights[own] = _aggregate(counts[own], batch.trajectories.groups[own], config=config, max_tokens=max_tokens)
    return batch.per_token(weights * batch.trajectories.draw_weights).float()


def _aggregate(counts: Tensor, groups: Tensor, *, config: AlgorithmConfig, max_tokens: int) -> Tensor:
    if config.aggregation == "prompt_mean":
        return aggregation.prompt_mean(counts, groups)
    if config.aggregation == "seq_mean_token_sum_norm":
        return aggregation.seq_mean_token_sum_norm(counts, length=config.aggregation_length or max_tokens)
    return _AGGREGATIONS[config.aggregation](counts)


def _num_kept(batch: Batch) -> Tensor:
    is_kept = batch.tokens.is_kept
    if is_kept is None:
        return batch.trajectories.num_trained
    return rejection.num_kept(is_kept, batch.tokens.sequences, num_sequences=batch.num_trajectories)


def _nll_weights(batch: Batch, *, coefficient: float) -> Tensor | None:
    """Factor of -log pi of the tokens of entirely right answers: their mean over each update, drawn groups weighed."""
    if not coefficient:
        return None
    is_right = batch.per_token(batch.trajectories.is_correct & batch.trajectories.is_member)
    updates = batch.per_token(batch.trajectories.updates)
    counts = segments.sizes(updates[is_right], num_segments=segments.count(updates)).clamp(min=1)
    draw_weights = batch.per_token(batch.trajectories.draw_weights)
    return (coefficient * draw_weights * is_right / counts[updates]).float()
