"""Estimators: the table of advantages, one entry per record of configs/advantages.py.

An entry gets a batch in which every trajectory counts in its group's baseline and says how much better than expected
each trajectory, or each token, was. Advantages of trajectories stand on all of their tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.configs.advantages import (
    WITH_OWN_BASELINE,
    CustomAdvantageConfig,
    DrGrpoConfig,
    GaeConfig,
    GdpoConfig,
    GpgConfig,
    GrpoConfig,
    LitePpoConfig,
    MaxRlConfig,
    MovingBaselineConfig,
    OpoConfig,
    OptimalTokenBaselineConfig,
    PassAtKBestConfig,
    PassAtKConfig,
    ReinforcePlusPlusBaselineConfig,
    ReinforcePlusPlusConfig,
    RemaxConfig,
    RlooConfig,
    VtraceConfig,
    WinRateConfig,
)
from slipstream.learner.algorithms import advantages, importance, reward_shaping, segments, token_advantages
from slipstream.learner.algorithms.advantages import whiten
from slipstream.learner.batching.batch import Batch, known
from slipstream.learner.errors import BatchError
from slipstream.learner.objective.state import ObjectiveState
from slipstream.runtime.import_path import load_function


class Estimate(NamedTuple):
    """What an estimator says."""

    advantages: Tensor
    """Float[B], or Float[N] where `is_per_token`."""
    returns: Tensor | None = None
    """Float[N], what a critic shall learn."""
    is_per_token: bool = False
    """Whether advantages differ between the tokens of a trajectory."""


Estimator = Callable[[Any, Batch, ObjectiveState], Estimate]


def _grpo(config: GrpoConfig, batch: Batch, _: ObjectiveState) -> Estimate:
    return Estimate(advantages.grpo(batch.trajectories.rewards, batch.trajectories.groups, epsilon=config.epsilon))


def _dr_grpo(_: DrGrpoConfig, batch: Batch, __: ObjectiveState) -> Estimate:
    return Estimate(advantages.dr_grpo(batch.trajectories.rewards, batch.trajectories.groups))


def _rloo(_: RlooConfig, batch: Batch, __: ObjectiveState) -> Estimate:
    return Estimate(advantages.rloo(batch.trajectories.rewards, batch.trajectories.groups))


def _lite_ppo(config: LitePpoConfig, batch: Batch, _: ObjectiveState) -> Estimate:
    return Estimate(advantages.lite_ppo(batch.trajectories.rewards, batch.trajectories.groups, epsilon=config.epsilon))


def _opo(_: OpoConfig, batch: Batch, __: ObjectiveState) -> Estimate:
    trajectories = batch.trajectories
    return Estimate(advantages.opo(trajectories.rewards, trajectories.groups, trajectories.lengths))


def _gpg(config: GpgConfig, batch: Batch, _: ObjectiveState) -> Estimate:
    trajectories = batch.trajectories
    return Estimate(advantages.gpg(trajectories.rewards, trajectories.groups, normaliser=config.normaliser))


def _maxrl(config: MaxRlConfig, batch: Batch, _: ObjectiveState) -> Estimate:
    return Estimate(advantages.maxrl(batch.trajectories.rewards, batch.trajectories.groups, epsilon=config.epsilon))


def _remax(_: RemaxConfig, batch: Batch, __: ObjectiveState) -> Estimate:
    return Estimate(advantages.remax(batch.trajectories.rewards, batch.trajectories.greedy_rewards))


def _reinforce_plus_plus(config: ReinforcePlusPlusConfig, batch: Batch, _: ObjectiveState) -> Estimate:
    returns = reward_shaping.returns_to_go(
        known(batch.tokens.rewards),
        batch.tokens.sequences,
        gamma=config.gamma,
        num_sequences=batch.num_trajectories,
    )
    return Estimate(whiten(returns, epsilon=config.epsilon), is_per_token=True)


def _reinforce_plus_plus_baseline(config: ReinforcePlusPlusBaselineConfig, batch: Batch, _: ObjectiveState) -> Estimate:
    trajectories = batch.trajectories
    return Estimate(
        advantages.reinforce_plus_plus_baseline(
            trajectories.rewards, trajectories.groups, trajectories.num_trained, epsilon=config.epsilon
        )
    )


def _pass_at_k_best(config: PassAtKBestConfig, batch: Batch, _: ObjectiveState) -> Estimate:
    trajectories = batch.trajectories
    return Estimate(advantages.pass_at_k_best(trajectories.rewards, trajectories.groups, epsilon=config.epsilon))


def _pass_at_k(config: PassAtKConfig, batch: Batch, _: ObjectiveState) -> Estimate:
    trajectories = batch.trajectories
    return Estimate(advantages.pass_at_k_analytic(trajectories.is_correct, trajectories.groups, k=config.k))


def _gdpo(config: GdpoConfig, batch: Batch, _: ObjectiveState) -> Estimate:
    names = tuple(config.weights) or batch.part_names
    parts = batch.parts(names, setting="algorithm.advantage.weights")
    weights = parts.new_tensor([config.weights.get(name, 1.0) for name in names])
    found = advantages.gdpo(parts, batch.trajectories.groups, weights=weights, epsilon=config.epsilon)
    # Their mean is 0 already; to subtract what rounding leaves of it would give groups of equal rewards an advantage.
    return Estimate(found / (found.std(correction=0) + config.epsilon) if len(found) else found)


def _moving_baseline(config: MovingBaselineConfig, batch: Batch, state: ObjectiveState) -> Estimate:
    """Begins at the mean of the first batch."""
    rewards = batch.trajectories.rewards
    if state.baseline is None:
        state.baseline = float(rewards.mean()) if len(rewards) else None
    baseline = state.baseline or 0.0
    if len(rewards):
        state.baseline = advantages.moving_baseline(baseline, rewards, decay=config.decay)
    return Estimate(advantages.above_baseline(rewards, baseline=baseline))


def _optimal_token_baseline(config: OptimalTokenBaselineConfig, batch: Batch, _: ObjectiveState) -> Estimate:
    tokens = batch.tokens
    returns = reward_shaping.returns_to_go(
        known(tokens.rewards), tokens.sequences, gamma=1.0, num_sequences=batch.num_trajectories
    )
    baselines = token_advantages.optimal_token_baseline(
        returns,
        token_advantages.score_norms(known(tokens.start_logprobs), known(tokens.collisions)),
        tokens.sequences,
        batch.trajectories.groups,
        num_sequences=batch.num_trajectories,
        epsilon=config.epsilon,
        weights=tokens.correction_weights,
        positions=tokens.positions_in_turn if config.per_turn else tokens.positions,
        turns=tokens.turns if config.per_turn else None,
        lone_learns=False,
    )
    return Estimate(returns - baselines, is_per_token=True)


def _win_rate(_: WinRateConfig, batch: Batch, __: ObjectiveState) -> Estimate:
    return Estimate(advantages.win_rate(batch.trajectories.rewards, batch.trajectories.groups))


def _gae(config: GaeConfig, batch: Batch, _: ObjectiveState) -> Estimate:
    lam: float | Tensor = config.lam
    if config.length_adaptive is not None:
        lam = token_advantages.length_adaptive_lambda(batch.trajectories.num_trained, alpha=config.length_adaptive)
    found = _generalised(batch, gamma=config.gamma, lam=lam)[0]
    returns = _generalised(batch, gamma=config.gamma, lam=config.critic_lam)[1]
    whitened = found if config.epsilon is None else whiten(found, epsilon=config.epsilon)
    return Estimate(whitened, returns, is_per_token=True)


def _generalised(batch: Batch, *, gamma: float, lam: float | Tensor) -> tuple[Tensor, Tensor]:
    return token_advantages.gae(
        known(batch.tokens.rewards),
        known(batch.tokens.values),
        batch.tokens.sequences,
        num_sequences=batch.num_trajectories,
        gamma=gamma,
        lam=lam,
    )


def _vtrace(config: VtraceConfig, batch: Batch, _: ObjectiveState) -> Estimate:
    tokens = batch.tokens
    log_ratio = importance.token_log_ratio(known(tokens.start_logprobs), tokens.generator_logprobs)
    found, targets = token_advantages.vtrace(
        known(tokens.rewards),
        known(tokens.values),
        log_ratio,
        tokens.sequences,
        num_sequences=batch.num_trajectories,
        gamma=config.gamma,
        lam=config.lam,
        rho_bar=config.rho_bar,
        c_bar=config.c_bar,
    )
    return Estimate(found, targets, is_per_token=True)


def own_function(config: CustomAdvantageConfig) -> Callable[..., Any]:
    """The user's. Raises ConfigError."""
    return load_function(config.function, setting="algorithm.advantage", num_values=2, arguments=config.arguments)


def _custom(config: CustomAdvantageConfig, batch: Batch, _: ObjectiveState) -> Estimate:
    if not batch.num_trajectories:
        return Estimate(batch.trajectories.rewards)
    function = own_function(config)
    groups = torch.unique(batch.trajectories.groups, return_inverse=True)[1]
    found = function(batch.trajectories.rewards, groups, **config.arguments)
    if not isinstance(found, Tensor) or found.shape != batch.trajectories.rewards.shape or not found.isfinite().all():
        raise BatchError(
            f"algorithm.advantage.function={config.function} must return one finite number per trajectory "
            f"({batch.num_trajectories}), got {found!r:.200}."
        )
    return Estimate(found)


ESTIMATORS: dict[type, Estimator] = {
    GrpoConfig: _grpo,
    DrGrpoConfig: _dr_grpo,
    RlooConfig: _rloo,
    LitePpoConfig: _lite_ppo,
    OpoConfig: _opo,
    GpgConfig: _gpg,
    MaxRlConfig: _maxrl,
    RemaxConfig: _remax,
    ReinforcePlusPlusConfig: _reinforce_plus_plus,
    ReinforcePlusPlusBaselineConfig: _reinforce_plus_plus_baseline,
    PassAtKBestConfig: _pass_at_k_best,
    PassAtKConfig: _pass_at_k,
    GdpoConfig: _gdpo,
    MovingBaselineConfig: _moving_baseline,
    OptimalTokenBaselineConfig: _optimal_token_baseline,
    WinRateConfig: _win_rate,
    GaeConfig: _gae,
    VtraceConfig: _vtrace,
    CustomAdvantageConfig: _custom,
}
"""Record -> function."""


def estimate(config: Any, batch: Batch, *, state: ObjectiveState) -> Batch:
    """Fill `advantages`, and `returns` where there is a critic; both are 0 for trajectories that are no members."""
    members = batch.trajectories.is_member
    chosen = batch.select(members)
    found = ESTIMATORS[type(config)](config, chosen, state)
    values = found.advantages if found.is_per_token else chosen.per_token(found.advantages)
    if not isinstance(config, WITH_OWN_BASELINE):
        values = values * chosen.per_token(_has_siblings(chosen))
    indices = batch.per_token(members)
    returns = None if found.returns is None else _spread(found.returns, indices)
    return batch.with_tokens(advantages=_spread(values, indices), returns=returns)


def _has_siblings(batch: Batch) -> Tensor:
    """bool[B]: whether there is another member in its group."""
    groups = batch.trajectories.groups
    return segments.sizes(groups, num_segments=segments.count(groups))[groups] > 1


def _spread(values: Tensor, indices: Tensor) -> Tensor:
    """float32[N]: the values where `indices` is true, 0 elsewhere."""
    column = torch.zeros(len(indices), dtype=torch.float32, device=indices.device)
    column[indices] = values.float()
    return column
