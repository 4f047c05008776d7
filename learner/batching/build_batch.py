"""Admission: fetched groups -> the batch as columns, and the samples of each optimizer update.

A trajectory whose reward function did not answer leaves the loss and its group's baseline; a token that is too old
leaves the loss only. A greedy answer is never in the loss: its reward is the baseline of some estimators, and counts in
no mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.buffer.trajectory import Trajectory, stale_mask
from slipstream.learner.batching.batch import Batch, Tokens, Trajectories
from slipstream.learner.batching.microbatch import Sample
from slipstream.learner.errors import BatchError

_UNKNOWN_LAG = 1 << 20
"""Of another run's tokens: their versions are not this run's, and they count as older than anything of its own."""
_NO_TOKENS = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class BuiltBatch:
    """What a step works on. The same on every rank."""

    batch: Batch
    """What the trajectories say."""
    updates: list[list[Sample]]
    """Samples of each optimizer update."""
    metrics: dict[str, float]
    """`learner/...`, about the claimed batch."""


def build_batch(
    groups: Sequence[Sequence[Trajectory]],
    *,
    learner_version: int,
    max_lags: Sequence[int | None],
    weights: Sequence[float],
    num_updates: int,
    vocab_size: int,
    has_baseline: bool = False,
    masks_truncated: bool = False,
    num_mixed: int = 0,
) -> BuiltBatch:
    """Deal groups out to `num_updates` updates and lay them out. Raises BatchError.

    One of `max_lags` (None = no bound) and one of `weights` for each group. `has_baseline`: whether a greedy answer may
    be among the members of a group (`generators.baseline`). `masks_truncated`: responses cut off at the longest length
    leave the loss and stay in the baseline. `num_mixed`: so many groups at the end are of another run.
    """
    members = [(index, member) for index, group in enumerate(groups) for member in group]
    for _, member in members:
        _check(member, vocab_size=vocab_size, has_baseline=has_baseline)
    trained = [
        trained_tokens(
            member, learner_version=learner_version, max_lag=max_lags[index], masks_truncated=masks_truncated
        )
        for index, member in members
    ]
    starts = [0, *accumulate(map(len, trained))]
    samples = [
        Sample(member.token_ids, indices, start, group_id=member.group_id, temperature=member.sampling.temperature)
        for (_, member), indices, start in zip(members, trained, starts, strict=False)
    ]
    update_of = _updates(len(groups), num_updates=num_updates)
    own = len(groups) - num_mixed
    lags = [
        _lags(member, indices, learner_version=learner_version) if index < own else np.full(len(indices), _UNKNOWN_LAG)
        for (index, member), indices in zip(members, trained, strict=True)
    ]
    batch = _lay_out(members, trained, lags, update_of=update_of, weights=weights)
    updates = [
        [sample for sample, (index, _) in zip(samples, members, strict=True) if update_of[index] == update]
        for update in range(num_updates)
    ]
    num_stale = sum(
        _num_stale(member, learner_version=learner_version, max_lag=max_lags[index])
        for index, member in members
        if not member.is_greedy
    )
    is_sampled = torch.tensor([not member.is_greedy for _, member in members], dtype=torch.bool)
    return BuiltBatch(batch, updates, _metrics(batch.trajectories, is_sampled=is_sampled, num_stale=num_stale))


def trained_tokens(
    trajectory: Trajectory, *, learner_version: int, max_lag: int | None, masks_truncated: bool = False
) -> np.ndarray:
    """int64[W]: indices of the tokens trained on. Nothing predicts token 0, so it never is."""
    is_masked = masks_truncated and trajectory.stop_reason == "length"
    if trajectory.reward.status != "ok" or trajectory.is_greedy or is_masked:
        return _NO_TOKENS
    mask = trajectory.model_mask
    if max_lag is not None and _has_stale(trajectory, learner_version=learner_version, max_lag=max_lag):
        mask = mask & ~stale_mask(trajectory, learner_version=learner_version, max_lag=max_lag)
    return np.flatnonzero(mask[1:]) + 1


def _has_stale(trajectory: Trajectory, *, learner_version: int, max_lag: int) -> bool:
    """Cheap to ask: most trajectories have one span, and it is young."""
    return any(learner_version - span.version > max_lag for span in trajectory.version_spans)


def _num_stale(trajectory: Trajectory, *, learner_version: int, max_lag: int | None) -> int:
    if max_lag is None or not _has_stale(trajectory, learner_version=learner_version, max_lag=max_lag):
        return 0
    return int(stale_mask(trajectory, learner_version=learner_version, max_lag=max_lag).sum())


def _check(trajectory: Trajectory, *, vocab_size: int, has_baseline: bool) -> None:
    largest = int(trajectory.token_ids.max())
    if largest >= vocab_size:
        raise BatchError(
            f"token ids must be < {vocab_size}, the learner's vocabulary, got {largest} in {trajectory.id} of "
            f"{trajectory.generator_id}: generator and learner must load the same model."
        )
    if trajectory.sampling.temperature <= 0 and not (has_baseline and trajectory.is_greedy):
        raise BatchError(
            f"a trajectory to train on must be sampled at a temperature > 0, got {trajectory.sampling.temperature} in "
            f"{trajectory.id}: greedy answers have no probability to weigh, and are baselines only with "
            "generators.baseline=greedy."
        )


def _updates(num_groups: int, *, num_updates: int) -> np.ndarray:
    """int64[G]: which optimizer update each group belongs to. Dealt out in turn, so that no update gets all the reused
    and mixed groups, which come last."""
    return np.arange(num_groups) % num_updates


def _lay_out(
    members: Sequence[tuple[int, Trajectory]],
    trained: Sequence[np.ndarray],
    lags: Sequence[np.ndarray],
    *,
    update_of: np.ndarray,
    weights: Sequence[float],
) -> Batch:
    trajectories = [member for _, member in members]
    groups = np.array([index for index, _ in members], dtype=np.int64)
    names = tuple(sorted({name for trajectory in trajectories for name in trajectory.reward.parts}))
    columns = Trajectories(
        groups=torch.from_numpy(groups),
        updates=torch.from_numpy(update_of[groups].astype(np.int64)),
        rewards=_wide([t.reward.total for t in trajectories]),
        parts=_wide([[t.reward.parts.get(name, float("nan")) for name in names] for t in trajectories]),
        greedy_rewards=_greedy_rewards(members),
        is_correct=torch.tensor([t.reward.is_correct for t in trajectories], dtype=torch.bool),
        is_member=torch.tensor([t.reward.status == "ok" and not t.is_greedy for t in trajectories], dtype=torch.bool),
        lengths=torch.tensor([int(t.model_mask.sum()) for t in trajectories], dtype=torch.int64),
        num_trained=torch.tensor([len(indices) for indices in trained], dtype=torch.int64),
        draw_weights=_wide([weights[index] for index in groups]),
    )
    return Batch(columns, _tokens(trajectories, trained, lags), names)


def _greedy_rewards(members: Sequence[tuple[int, Trajectory]]) -> Tensor:
    """float64[B]: of each one's group; a reward function that failed gave none. Raises BatchError."""
    greedy: dict[int, Trajectory] = {}
    for index, member in members:
        if member.is_greedy and index in greedy:
            raise BatchError(f"a group must have one greedy answer at most, got {greedy[index].id} and {member.id}.")
        if member.is_greedy:
            greedy[index] = member
    known = {index: member.reward.total for index, member in greedy.items() if member.reward.status == "ok"}
    return _wide([known.get(index, float("nan")) for index, _ in members])


def _lags(trajectory: Trajectory, indices: np.ndarray, *, learner_version: int) -> np.ndarray:
    """int64[W]: of the tokens that are trained on."""
    return np.maximum(0, learner_version - trajectory.token_versions()[indices])


def _tokens(trajectories: Sequence[Trajectory], trained: Sequence[np.ndarray], lags: Sequence[np.ndarray]) -> Tokens:
    indices = _indices(trajectories, trained)
    return Tokens(
        sequences=torch.from_numpy(indices.sequences),
        turns=torch.from_numpy(indices.turns),
        positions=torch.from_numpy(indices.positions),
        positions_in_turn=torch.from_numpy(indices.positions_in_turn),
        lags=_joined(list(lags), np.int64),
        generator_logprobs=_joined(
            [t.generator_logprobs[own] for t, own in zip(trajectories, trained, strict=True)], np.float32
        ),
    )


class _Positions(NamedTuple):
    """Columns of the same names, int64[N]."""

    sequences: np.ndarray
    turns: np.ndarray
    positions: np.ndarray
    positions_in_turn: np.ndarray


def _indices(trajectories: Sequence[Trajectory], trained: Sequence[np.ndarray]) -> _Positions:
    """Where in what the model wrote the trained tokens stand; of all trajectories at once, laid end to end."""
    sequences = np.repeat(np.arange(len(trained)), [len(own) for own in trained])
    if not len(sequences):
        return _Positions(sequences, sequences, sequences, sequences)
    masks = [trajectory.model_mask for trajectory in trajectories]
    starts = np.cumsum([0, *map(len, masks[:-1])])
    at = np.concatenate([own + start for own, start in zip(trained, starts, strict=True)])
    mask = np.concatenate(masks)
    before = np.roll(mask, 1)
    before[starts] = False
    begins = mask & ~before
    written, turns = mask.cumsum(), begins.cumsum()
    first_of_turn = written[begins]
    return _Positions(
        sequences,
        turns[at] - (turns - begins)[starts][sequences] - 1,
        written[at] - (written - mask)[starts][sequences] - 1,
        written[at] - first_of_turn[turns[at] - 1],
    )


def _joined(arrays: list[np.ndarray], dtype: type) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype))


def _wide(values: list[float] | list[list[float]]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _metrics(trajectories: Trajectories, *, is_sampled: Tensor, num_stale: int) -> dict[str, float]:
    """Greedy answers are in none of these."""
    answered, num_sampled = trajectories.rewards[trajectories.is_member], int(is_sampled.sum())
    return {
        "learner/trajectories": float(num_sampled),
        "learner/reward_mean": float(answered.mean()) if len(answered) else 0.0,
        "learner/stale_fraction": num_stale / max(1, int(trajectories.lengths[is_sampled].sum())),
        "learner/failed_fraction": 1.0 - len(answered) / max(1, num_sampled),
    }
