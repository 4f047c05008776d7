"""Batch building: fetched groups -> the batch as columns, and samples of each optimizer update.

Trajectories with a failed reward leave the loss and their group's baseline, stale tokens the loss. A greedy answer is
only a baseline.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from slipstream.buffer.trajectory import Trajectory, stale_mask
from slipstream.learner.batching.batch import Batch, Tokens, Trajectories
from slipstream.learner.batching.microbatch import PromptImages, Sample
from slipstream.learner.errors import BatchError
from slipstream.runtime.routers import EXPERTS, Routers

_UNKNOWN_LAG = 1 << 20
"""Lag of another run's tokens, above all of this run's."""
_NO_TOKENS = np.zeros(0, dtype=np.int64)
_MOST_SOURCES = 32


@dataclass(frozen=True, slots=True)
class BuiltBatch:
    """Input of a training step, identical on every rank."""

    batch: Batch
    updates: list[list[Sample]]
    """Samples per optimizer update."""
    trained: list[np.ndarray]
    """int64[W] per trajectory: indices of trained tokens."""
    metrics: dict[str, float]


class _Member(NamedTuple):
    trajectory: Trajectory
    group: int
    trained: np.ndarray
    """int64[W], indices."""
    lags: np.ndarray
    """int64[W]."""
    num_stale: int
    """Stale model-written tokens."""


def build_batch(
    groups: Sequence[Sequence[Trajectory]],
    *,
    learner_version: int,
    max_lag: int | None = None,
    max_lags: Sequence[int | None] = (),
    weights: Sequence[float] = (),
    num_updates: int,
    vocab_size: int,
    has_baseline: bool = False,
    masks_truncated: bool = False,
    has_observations: bool = False,
    num_mixed: int = 0,
    images: PromptImages | None = None,
    routers: Routers | None = None,
) -> BuiltBatch:
    """Distribute groups over updates and build their columns. Raises BatchError.

    `max_lags`: lag above which a group's tokens leave the loss, None: no bound, default `max_lag`. `weights`: one per
    group, default 1. `has_baseline`: groups may have a greedy answer. `masks_truncated`: responses cut off at the
    maximum length count only in the baseline. `has_observations`: hash what each turn answers. `num_mixed`: final
    groups from another run. `routers` replay recorded experts.
    """
    num_own, members = len(groups) - num_mixed, []
    for index, (group, limit) in enumerate(zip(groups, max_lags or [max_lag] * len(groups), strict=True)):
        for trajectory in group:
            _check_trainable(trajectory, has_baseline=has_baseline, routers=routers)
            member = _make_member(
                trajectory, index, learner_version=learner_version, max_lag=limit, masks_truncated=masks_truncated
            )
            is_own = index < num_own
            members.append(member if is_own else member._replace(lags=np.full_like(member.lags, _UNKNOWN_LAG)))
    _check_vocabulary(members, vocab_size=vocab_size)
    # Round-robin: reused and mixed groups come last and must not all be in one update.
    update_of = np.arange(len(groups)) % num_updates
    batch = _lay_out(members, update_of=update_of, weights=weights or [1.0] * len(groups))
    if has_observations:
        batch = batch.with_tokens(observations=_observations(members))
    updates: list[list[Sample]] = [[] for _ in range(num_updates)]
    first_index = 0
    for member in members:
        updates[update_of[member.group]] += _samples(member, first_index, images, has_experts=routers is not None)
        first_index += len(member.trained)
    return BuiltBatch(batch, updates, [member.trained for member in members], _metrics(members, batch.trajectories))


def _make_member(
    trajectory: Trajectory, group: int, *, learner_version: int, max_lag: int | None, masks_truncated: bool
) -> _Member:
    stale, spans = None, trajectory.version_spans
    # Most trajectories are fresh and from one version.
    if max_lag is not None and any(learner_version - span.version > max_lag for span in spans):
        stale = stale_mask(trajectory, learner_version=learner_version, max_lag=max_lag)
    mask = trajectory.model_mask if stale is None else trajectory.model_mask & ~stale
    # Nothing predicts the first token of a context.
    trained = mask[1:].nonzero()[0] + 1
    trained = trained if not trajectory.context_starts else np.setdiff1d(trained, trajectory.context_starts)
    is_masked = masks_truncated and trajectory.stop_reason == "length"
    if trajectory.reward.status != "ok" or trajectory.is_greedy or is_masked:
        trained = _NO_TOKENS
    if len(spans) == 1:
        lags = np.full(len(trained), max(0, learner_version - spans[0].version), dtype=np.int64)
    else:
        lags = np.maximum(0, learner_version - trajectory.token_versions()[trained])
    return _Member(trajectory, group, trained, lags, 0 if stale is None else int(stale.sum()))


def _check_vocabulary(members: Sequence[_Member], *, vocab_size: int) -> None:
    # Maxima per trajectory would cost as much as all other checks.
    if not members or np.concatenate([member.trajectory.token_ids for member in members]).max() < vocab_size:
        return
    largest, trajectory = next(
        (largest, member.trajectory)
        for member in members
        if (largest := int(member.trajectory.token_ids.max())) >= vocab_size
    )
    raise BatchError(
        f"token ids must be < {vocab_size}, the learner's vocabulary, got {largest} in {trajectory.id} of "
        f"{trajectory.generator_id}: generator and learner must load the same model."
    )


def _check_trainable(trajectory: Trajectory, *, has_baseline: bool, routers: Routers | None) -> None:
    if trajectory.sampling.temperature <= 0 and not (has_baseline and trajectory.is_greedy):
        raise BatchError(
            f"a trajectory to train on must be sampled at a temperature > 0, got {trajectory.sampling.temperature} in "
            f"{trajectory.id}: greedy answers have no sampling probability, and serve as baselines only with "
            "algorithm/advantage=remax."
        )
    if routers is None:
        return
    found, (num_routers, top_k) = trajectory.arrays.get(EXPERTS), routers.shape
    expected = [trajectory.num_tokens, num_routers, top_k]
    got = "none" if found is None else f"{found.dtype}{list(found.shape)}"
    if found is not None and found.dtype.kind in "ui" and list(found.shape) == expected:
        if 0 <= int(found.min()) <= int(found.max()) < routers.num_experts:
            return
        got = f"{int(found.min())} to {int(found.max())}"
    raise BatchError(
        f"with model.moe.router_replay a trajectory must have the experts of its tokens, integers{expected} below "
        f"{routers.num_experts}, got {got} in {trajectory.id} of {trajectory.generator_id}: it was generated without "
        "that setting, by an engine that records no experts, or with another model."
    )


def _samples(member: _Member, first_index: int, images: PromptImages | None, *, has_experts: bool) -> Iterator[Sample]:
    """One sample per context. `first_index`: column of the member's first trained token."""
    trajectory = member.trajectory
    experts = trajectory.arrays[EXPERTS] if has_experts else None
    bounds = trajectory.context_bounds()
    cuts = np.searchsorted(member.trained, bounds).tolist() if len(bounds) > 2 else [0, len(member.trained)]
    for (start, end), (first, last) in zip(pairwise(bounds), pairwise(cuts), strict=True):
        yield Sample(
            trajectory.token_ids[start:end],
            member.trained[first:last] - start,
            first_index + first,
            group_id=trajectory.group_id,
            temperature=trajectory.sampling.temperature,
            images=images.of(trajectory, start, end) if images else None,
            experts=None if experts is None else experts[start:end],
        )


def _lay_out(members: Sequence[_Member], *, update_of: np.ndarray, weights: Sequence[float]) -> Batch:
    trajectories = [member.trajectory for member in members]
    groups = np.array([member.group for member in members], dtype=np.int64)
    names = tuple(sorted({name for trajectory in trajectories for name in trajectory.reward.parts}))
    sources = tuple(sorted({trajectory.data_source for trajectory in trajectories}))
    numbers = {source: number for number, source in enumerate(sources)}
    columns = Trajectories(
        groups=torch.from_numpy(groups),
        updates=torch.from_numpy(update_of[groups].astype(np.int64)),
        rewards=_wide([t.reward.total for t in trajectories]),
        parts=_wide([[t.reward.parts.get(name, float("nan")) for name in names] for t in trajectories]),
        greedy_rewards=_greedy_rewards(members),
        is_correct=torch.tensor([t.reward.is_correct for t in trajectories], dtype=torch.bool),
        is_member=torch.tensor([t.reward.status == "ok" and not t.is_greedy for t in trajectories], dtype=torch.bool),
        lengths=torch.tensor([np.count_nonzero(t.model_mask) for t in trajectories], dtype=torch.int64),
        num_trained=torch.tensor([len(member.trained) for member in members], dtype=torch.int64),
        draw_weights=_wide([weights[index] for index in groups]),
        sources=torch.tensor([numbers[t.data_source] for t in trajectories], dtype=torch.int64),
    )
    logprobs = [member.trajectory.generator_logprobs[member.trained] for member in members]
    positions = _positions(members)
    tokens = Tokens(
        **positions,
        turn_rewards=_turn_rewards(members, positions["sequences"].numpy(), positions["turns"].numpy()),
        lags=_joined([member.lags for member in members], np.int64),
        generator_logprobs=_joined(logprobs, np.float32),
    )
    return Batch(columns, tokens, names, sources)


def _greedy_rewards(members: Sequence[_Member]) -> Tensor:
    """float64[B], NaN for groups without a greedy answer. Raises BatchError if a group has two."""
    greedy: dict[int, Trajectory] = {}
    for answer, group in ((member.trajectory, member.group) for member in members if member.trajectory.is_greedy):
        if group in greedy:
            raise BatchError(f"a group must have at most one greedy answer, got {greedy[group].id} and {answer.id}.")
        greedy[group] = answer
    rewards = {group: found.reward.total for group, found in greedy.items() if found.reward.status == "ok"}
    return _wide([rewards.get(member.group, float("nan")) for member in members])


def _positions(members: Sequence[_Member]) -> dict[str, Tensor]:
    """Position columns of `Tokens`: cumulative sums over the batch minus those at the trajectory's start."""
    sequences = np.repeat(np.arange(len(members)), [len(member.trained) for member in members])
    if not len(sequences):
        names = ("sequences", "contexts", "turns", "positions", "positions_in_turn")
        return dict.fromkeys(names, torch.from_numpy(sequences))
    masks = [member.trajectory.model_mask for member in members]
    starts = np.cumsum([0, *map(len, masks[:-1])])
    at = np.concatenate([member.trained + start for member, start in zip(members, starts, strict=True)])
    mask = np.concatenate(masks)
    is_start = np.zeros(len(mask), dtype=np.bool_)
    for member, start in zip(members, starts, strict=True):
        is_start[[start, *(start + own for own in member.trajectory.context_starts)]] = True
    begins = mask & ~(np.roll(mask, 1) & ~is_start)
    written, turns = mask.cumsum(), begins.cumsum()
    first_of_turn = written[begins]
    columns = {
        "sequences": sequences,
        "contexts": is_start.cumsum()[at] - 1,
        "turns": turns[at] - (turns - begins)[starts][sequences] - 1,
        "positions": written[at] - (written - mask)[starts][sequences] - 1,
        "positions_in_turn": written[at] - first_of_turn[turns[at] - 1],
    }
    return {name: torch.from_numpy(column) for name, column in columns.items()}


def _turn_rewards(members: Sequence[_Member], sequences: np.ndarray, turns: np.ndarray) -> Tensor | None:
    """Compute `Tokens.turn_rewards`."""
    earned = [member.trajectory.reward.turns for member in members]
    if not any(earned):
        return None
    rewards = np.zeros(len(turns))
    if len(turns):
        for end in [*np.flatnonzero(np.diff(sequences) | np.diff(turns)), len(turns) - 1]:
            if own := earned[sequences[end]]:
                rewards[end] = own[turns[end]]
    return torch.from_numpy(rewards)


def _observations(members: Sequence[_Member]) -> Tensor:
    """Compute `Tokens.observations`."""
    columns = []
    for trajectory, trained in ((member.trajectory, member.trained) for member in members):
        # Runs of one kind of token. A turn answers the run before it, because contexts start with prompts.
        edges = np.union1d([0, *trajectory.context_starts], np.flatnonzero(np.diff(trajectory.model_mask)) + 1)
        runs = np.split(trajectory.token_ids, edges[1:])
        hashes = np.array([xxhash.xxh3_64_intdigest(run.tobytes()) for run in runs], dtype=np.uint64).view(np.int64)
        columns.append(hashes[np.searchsorted(edges, trained, side="right") - 2])
    return _joined(columns, np.int64)


def _joined(arrays: list[np.ndarray], dtype: type) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype))


def _wide(values: list[float] | list[list[float]]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _metrics(members: Sequence[_Member], trajectories: Trajectories) -> dict[str, float]:
    is_sampled = torch.tensor([not member.trajectory.is_greedy for member in members], dtype=torch.bool)
    num_stale = sum(member.num_stale for member in members if not member.trajectory.is_greedy)
    answered, num_sampled = trajectories.rewards[trajectories.is_member], int(is_sampled.sum())
    lengths = trajectories.lengths[is_sampled].double()
    is_cut = torch.tensor([member.num_stale > 0 for member in members], dtype=torch.bool)[is_sampled]
    bias = {"learner/stale_length_ratio": float(lengths[is_cut].mean() / lengths.mean())} if is_cut.any() else {}
    sampled = [member.trajectory for member in members if not member.trajectory.is_greedy]
    return {
        **describe_answers(sampled),
        "learner/trajectories": float(num_sampled),
        "learner/reward_mean": float(answered.mean()) if len(answered) else 0.0,
        "learner/stale_fraction": num_stale / max(1, int(trajectories.lengths[is_sampled].sum())),
        "learner/failed_fraction": 1.0 - len(answered) / max(1, num_sampled),
        "learner/correct_fraction": fmean([each.reward.is_correct for each in sampled] or [0.0]),
        "learner/truncated_fraction": fmean([each.stop_reason == "length" for each in sampled] or [0.0]),
        **bias,
    }


def describe_answers(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """Metrics by data source. Beyond 32, merges the smallest into `others`."""
    by_source: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        by_source.setdefault(trajectory.data_source or "unnamed", []).append(trajectory)
    ranked = sorted(by_source, key=lambda source: -len(by_source[source]))
    if rare := ranked[_MOST_SOURCES:]:
        by_source["others"] = [trajectory for source in rare for trajectory in by_source.pop(source)]
    described: dict[str, float] = {}
    for source, answers in by_source.items():
        rewards = [answer.reward for answer in answers if answer.reward.status == "ok"]
        found = {
            "trajectories": float(len(answers)),
            "failed_fraction": 1 - len(rewards) / len(answers),
            "length_mean": fmean(int(np.count_nonzero(answer.model_mask)) for answer in answers),
            "turns_mean": fmean(answer.num_turns for answer in answers),
        }
        if rewards:
            found["reward_mean"] = fmean(reward.total for reward in rewards)
            found["correct_fraction"] = fmean(reward.is_correct for reward in rewards)
        stops = Counter(answer.stop_reason for answer in answers)
        found |= {f"stop_{reason}": count / len(answers) for reason, count in stops.items()}
        found |= {f"part_{name}": value for name, value in _means([reward.parts for reward in rewards]).items()}
        found |= {f"agent_{name}": value for name, value in _means([answer.metrics for answer in answers]).items()}
        described |= {f"learner/by_source/{source}/{name}": value for name, value in found.items()}
    return described


def _means(records: Sequence[dict[str, float]]) -> dict[str, float]:
    names = sorted({name for record in records for name in record})
    return {name: fmean(record[name] for record in records if name in record) for name in names}
