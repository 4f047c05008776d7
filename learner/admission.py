"""Admission: fetched groups -> the samples of each optimizer update, with masks, advantages and token weights.

A trajectory whose reward function did not answer leaves the loss and its group's baseline; a token that is too old
leaves the loss only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from buffer.staleness import lag, over_age_mask
from buffer.trajectory import Trajectory
from learner.batch import Sample
from learner.errors import BatchFault
from learner.objective import Objective


@dataclass(frozen=True, slots=True)
class Admitted:
    """What a step works on. The same on every rank."""

    updates: list[list[Sample]]
    """Samples of each optimizer update."""
    metrics: dict[str, float]
    """`learner/...`, about the claimed batch."""


def admit(
    groups: Sequence[Sequence[Trajectory]],
    *,
    objective: Objective,
    learner_version: int,
    max_lag: int,
    num_updates: int,
    vocab_size: int,
) -> Admitted:
    """Split groups into `num_updates` consecutive parts and ready each. Raises BatchFault."""
    for trajectory in (member for group in groups for member in group):
        _check(trajectory, vocab_size=vocab_size)
    samples = _samples(groups, objective=objective, learner_version=learner_version, max_lag=max_lag)
    parts = np.array_split(np.arange(len(groups)), num_updates)
    updates = [_weigh([s for index in part for s in samples[index]], objective=objective) for part in parts]
    flat = [sample for group in samples for sample in group]
    return Admitted(updates, _metrics(flat, learner_version=learner_version, max_lag=max_lag))


def loss_mask(trajectory: Trajectory, *, learner_version: int, max_lag: int) -> np.ndarray:
    """bool[T]: tokens trained on. Nothing predicts token 0, so it never is."""
    if trajectory.reward.status != "ok":
        return np.zeros(trajectory.num_tokens, dtype=bool)
    mask = trajectory.model_mask & ~over_age_mask(trajectory, learner_version=learner_version, max_lag=max_lag)
    mask[:1] = False
    return mask


def _check(trajectory: Trajectory, *, vocab_size: int) -> None:
    largest = int(trajectory.token_ids.max())
    if largest >= vocab_size:
        raise BatchFault(
            f"token ids must be < {vocab_size}, the learner's vocabulary, got {largest} in {trajectory.id} of "
            f"{trajectory.generator_id}: generator and learner must load the same model."
        )
    if trajectory.sampling.temperature <= 0:
        raise BatchFault(
            f"a trajectory to train on must be sampled at a temperature > 0, got {trajectory.sampling.temperature} in "
            f"{trajectory.id}: greedy answers have no probability to weigh."
        )


def _samples(
    groups: Sequence[Sequence[Trajectory]], *, objective: Objective, learner_version: int, max_lag: int
) -> list[list[Sample]]:
    values = iter(_advantages(groups, objective=objective))
    return [
        [
            Sample(member, next(values), loss_mask(member, learner_version=learner_version, max_lag=max_lag))
            for member in group
        ]
        for group in groups
    ]


def _advantages(groups: Sequence[Sequence[Trajectory]], *, objective: Objective) -> list[float]:
    """One per trajectory, in order; 0 for those without a reward."""
    members = [(index, member) for index, group in enumerate(groups) for member in group]
    answered = torch.tensor([member.reward.status == "ok" for _, member in members], dtype=torch.bool)
    rewards = torch.tensor([member.reward.total for _, member in members], dtype=torch.float64)
    indices = torch.tensor([index for index, _ in members], dtype=torch.int64)
    values = torch.zeros_like(rewards)
    values[answered] = objective.advantages(rewards[answered], indices[answered])
    return values.tolist()


def _weigh(samples: list[Sample], *, objective: Objective) -> list[Sample]:
    counts = torch.tensor([sample.num_loss_tokens for sample in samples], dtype=torch.int64)
    weights = objective.token_weights(counts).tolist()
    return [replace(sample, token_weight=weight) for sample, weight in zip(samples, weights, strict=True)]


def _metrics(samples: list[Sample], *, learner_version: int, max_lag: int) -> dict[str, float]:
    answered = [sample for sample in samples if sample.trajectory.reward.status == "ok"]
    advantages = np.array([sample.advantage for sample in answered] or [0.0])
    rewards = [sample.trajectory.reward.total for sample in answered] or [0.0]
    versions = [sample.trajectory.token_versions()[sample.trajectory.model_mask] for sample in samples]
    lags = lag(np.concatenate(versions) if versions else np.zeros(1, dtype=np.int32), learner_version)
    return {
        "learner/trajectories": float(len(samples)),
        "learner/reward_mean": float(np.mean(rewards)),
        "learner/advantage_mean": float(advantages.mean()),
        "learner/advantage_std": float(advantages.std()),
        "learner/advantage_zero_fraction": float((advantages == 0).mean()),
        "learner/over_age_fraction": float((lags > max_lag).mean()),
        "learner/failed_fraction": 1.0 - len(answered) / max(1, len(samples)),
        "learner/lag_mean": float(lags.mean()),
        "learner/lag_max": float(lags.max()),
    }
