"""Batch: the groups claimed for one step as columns, one entry per trajectory and one per token that is trained on.

All that needs no gradient is computed on whole columns, the same on every rank, so that no split into microbatches or
ranks can change it. Columns fill up in the order of the fields: the trajectories' own (`build_batch`), outputs of
models (`microbatch.recompute`), inputs of the loss (`Objective.prepare`); a column that the settings do not need stays
None.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from slipstream.learner.errors import BatchError


class _Columns:
    """Tensors of one length side by side."""

    def take(self, indices: Tensor) -> Self:
        """The entries at `indices` [K], or where a bool [N] is true."""
        return self._map(lambda column: column[indices])

    def to(self, device: torch.device) -> Self:
        return self._map(lambda column: column.to(device, non_blocking=True))

    def replace(self, **columns: Any) -> Self:
        return dataclasses.replace(self, **columns)  # type: ignore[type-var]

    def _map(self, change: Any) -> Self:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        columns = {field.name: getattr(self, field.name) for field in fields}
        return self.replace(**{name: column if column is None else change(column) for name, column in columns.items()})


@dataclass(frozen=True)
class Trajectories(_Columns):
    """One entry per claimed trajectory, B of them, in the order claimed: members of a group lie side by side."""

    groups: Int[Tensor, "B"]
    """Index of the claimed group, from 0."""
    updates: Int[Tensor, "B"]
    """Optimizer update of the step, from 0."""
    rewards: Float[Tensor, "B"]
    """float64, the reward function's total; `Objective.prepare` replaces it by the shaped reward."""
    parts: Float[Tensor, "B K"]
    """float64, named addends of the reward, columns in the order of `Batch.part_names`; NaN where one is missing."""
    greedy_rewards: Float[Tensor, "B"]
    """float64, the reward of its group's greedy answer; NaN where there is none."""
    is_correct: Bool[Tensor, "B"]
    """Whether the response is entirely right."""
    is_member: Bool[Tensor, "B"]
    """Whether it counts in its group's baseline: its reward function answered."""
    lengths: Int[Tensor, "B"]
    """Model-written tokens, trained on or not."""
    num_trained: Int[Tensor, "B"]
    """Tokens that are trained on."""
    draw_weights: Float[Tensor, "B"]
    """The sampler's factor of the loss of its group."""
    sources: Int[Tensor, "B"]
    """Its data source, an index into `Batch.source_names`."""


@dataclass(frozen=True)
class Tokens(_Columns):
    """One entry per token that is trained on, N of them, trajectory after trajectory."""

    sequences: Int[Tensor, "N"]
    """Index of the trajectory, from 0."""
    contexts: Int[Tensor, "N"]
    """Index of the context it was sampled in, from 0; a trajectory has one or several."""
    turns: Int[Tensor, "N"]
    """Run of model-written tokens of the trajectory, from 0."""
    positions: Int[Tensor, "N"]
    """Position among the model-written tokens of the trajectory, counting those that are not trained on."""
    positions_in_turn: Int[Tensor, "N"]
    """Position among those of the turn."""
    lags: Int[Tensor, "N"]
    """Learner's version - the version that sampled it; not below 0."""
    generator_logprobs: Float[Tensor, "N"]
    """float32, of the distribution it was sampled from."""

    turn_rewards: Float[Tensor, "N"] | None = None
    """float64, what the turn earned by itself at its last trained token, 0 elsewhere; None where no turn did."""
    start_logprobs: Float[Tensor, "N"] | None = None
    """float32, the learner's at the start of the step."""
    reference_logprobs: Float[Tensor, "N"] | None = None
    """float32, the reference policy's, where the KL needs them."""
    current_logprobs: Float[Tensor, "N"] | None = None
    """float32, the learner's at the start of the optimizer update."""
    teacher_logprobs: Float[Tensor, "N"] | None = None
    """float32, the teacher's, where distillation needs them."""
    collisions: Float[Tensor, "N"] | None = None
    """Chance that two draws from the learner's distribution are equal: sum of squared probabilities."""
    values: Float[Tensor, "N"] | None = None
    """float32, the critic's value of the state before it, at the start of the step."""

    rewards: Float[Tensor, "N"] | None = None
    """float64: the turns' rewards, the rest of the trajectory's shaped reward at its last token, minus the price of
    each token's KL."""
    advantages: Float[Tensor, "N"] | None = None
    """float32, 0 for trajectories that do not count in a baseline."""
    returns: Float[Tensor, "N"] | None = None
    """float32, the critic's target for the state before it."""
    correction_weights: Float[Tensor, "N"] | None = None
    """float32, importance weights; None: they are formed with the loss."""
    is_kept: Bool[Tensor, "N"] | None = None
    """Whether the correction leaves it in the loss; known where `correction_weights` are."""
    is_bounded: Bool[Tensor, "N"] | None = None
    """Whether its importance weight was truncated or masked; known where `correction_weights` are."""
    is_trusted: Bool[Tensor, "N"] | None = None
    """Whether the masks leave it in the policy loss; None: all are."""
    is_selected: Bool[Tensor, "N"] | None = None
    """Whether the policy loss's selector picked it among all tokens of its update; None without a selector or mask."""
    nll_weights: Float[Tensor, "N"] | None = None
    """float32, factor of its negative log-likelihood; None: there is no such term."""
    token_weights: Float[Tensor, "N"] | None = None
    """float32, factor of its loss, from the aggregation over the whole optimizer update."""


@dataclass(frozen=True)
class Batch:
    """Both tables: B entries of trajectories and N of tokens."""

    trajectories: Trajectories
    tokens: Tokens
    part_names: tuple[str, ...] = ()
    """The K names of reward parts, sorted."""
    source_names: tuple[str, ...] = ()
    """Names of the data sources, sorted."""

    @property
    def num_trajectories(self) -> int:
        return len(self.trajectories.groups)

    @property
    def num_contexts(self) -> int:
        """One more than the largest number of a context."""
        return int(self.tokens.contexts.max()) + 1 if len(self.tokens.contexts) else 0

    def to(self, device: torch.device) -> "Batch":
        return self.replace(trajectories=self.trajectories.to(device), tokens=self.tokens.to(device))

    def replace(self, **parts: Any) -> "Batch":
        return dataclasses.replace(self, **parts)

    def with_tokens(self, **columns: Any) -> "Batch":
        return self.replace(tokens=self.tokens.replace(**columns))

    def select(self, is_taken: Bool[Tensor, "B"]) -> "Batch":
        """A batch of those trajectories alone, numbered anew; their groups keep their numbers."""
        numbers = is_taken.cumsum(0) - 1
        tokens = self.tokens.take(is_taken[self.tokens.sequences])
        return self.replace(
            trajectories=self.trajectories.take(is_taken), tokens=tokens.replace(sequences=numbers[tokens.sequences])
        )

    def parts(self, names: Sequence[str], *, setting: str) -> Float[Tensor, "B K"]:
        """Columns of named parts of the reward. Raises BatchError for one that a trajectory lacks."""
        missing = [name for name in names if name not in self.part_names]
        columns = self.trajectories.parts[:, [self.part_names.index(name) for name in names if name not in missing]]
        if missing or not columns[self.trajectories.is_member].isfinite().all():
            raise BatchError(
                f"{setting} names parts of the reward that every answer must have ({', '.join(names)}), got answers "
                f"with {', '.join(self.part_names) or 'none'}, or without some of them: see the reward function."
            )
        return columns

    def per_token(self, values: Float[Tensor, "B"]) -> Float[Tensor, "N"]:
        """Each trajectory's value at each of its tokens."""
        return values[self.tokens.sequences]
