"""Batch: a step's claimed groups as two tables of columns, one per trajectory and one per trained token.

Everything without a gradient is computed on whole columns, identically on every rank. Columns are filled in field
order: trajectory data (`build_batch`), model outputs (`recompute`), loss inputs (`Objective.prepare`). Unneeded ones
are None.
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
    """Tensors of equal length."""

    def take(self, indices: Tensor) -> Self:
        """Select by index [K] or by a bool mask [N]."""
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
    """One entry per claimed trajectory, B in total, in claim order, so groups are adjacent."""

    groups: Int[Tensor, "B"]
    """Index of the claimed group."""
    updates: Int[Tensor, "B"]
    """Optimizer update of the step."""
    rewards: Float[Tensor, "B"]
    """float64, from the reward function; `Objective.prepare` shapes them."""
    parts: Float[Tensor, "B K"]
    """float64, reward components in the order of `Batch.part_names`. NaN if missing."""
    greedy_rewards: Float[Tensor, "B"]
    """float64, reward of the group's greedy answer. NaN without one."""
    is_correct: Bool[Tensor, "B"]
    """True if entirely right."""
    is_member: Bool[Tensor, "B"]
    """True if it counts in its group's baseline: has a reward, is neither greedy nor excluded as rejected."""
    lengths: Int[Tensor, "B"]
    """Model-written tokens, trained on or not."""
    num_trained: Int[Tensor, "B"]
    draw_weights: Float[Tensor, "B"]
    """Loss factor of the group, from the sampler."""
    sources: Int[Tensor, "B"]
    """Index into `Batch.source_names`."""


@dataclass(frozen=True)
class Tokens(_Columns):
    """One entry per trained token, N in total, in trajectory order."""

    sequences: Int[Tensor, "N"]
    """Index of the trajectory."""
    contexts: Int[Tensor, "N"]
    """Index of the sampling context. A trajectory has one or more."""
    turns: Int[Tensor, "N"]
    """Turn (run of model-written tokens)."""
    positions: Int[Tensor, "N"]
    """Position among the trajectory's model-written tokens, trained or not."""
    positions_in_turn: Int[Tensor, "N"]
    """The same within the turn."""
    lags: Int[Tensor, "N"]
    """Learner's version minus the sampling version, at least 0. 2**20 for another run's tokens."""
    generator_logprobs: Float[Tensor, "N"]
    """float32, under the sampled distribution."""

    observations: Int[Tensor, "N"] | None = None
    """Hash of the tokens that the turn answers, since the previous turn or the context's start."""
    turn_rewards: Float[Tensor, "N"] | None = None
    """float64, turn rewards at the turns' last trained tokens, 0 elsewhere."""
    start_logprobs: Float[Tensor, "N"] | None = None
    """float32, from the learner at the start of the step."""
    reference_logprobs: Float[Tensor, "N"] | None = None
    """float32, from the reference."""
    current_logprobs: Float[Tensor, "N"] | None = None
    """float32, from the learner at the start of the optimizer update."""
    teacher_logprobs: Float[Tensor, "N"] | None = None
    """float32, from the teacher."""
    collisions: Float[Tensor, "N"] | None = None
    """Probability that two draws from the learner are equal."""
    values: Float[Tensor, "N"] | None = None
    """float32, critic's value of the state before the token, at the step's start."""
    process_rewards: Float[Tensor, "N"] | None = None
    """float32, from the process reward model after its updates."""

    rewards: Float[Tensor, "N"] | None = None
    """float64: turn rewards, plus the rest of the shaped reward at the last token, minus the KL penalty."""
    advantages: Float[Tensor, "N"] | None = None
    """float32, 0 for trajectories outside the group baseline."""
    returns: Float[Tensor, "N"] | None = None
    """float32, targets for `values`."""
    correction_weights: Float[Tensor, "N"] | None = None
    """float32, importance weights. None if they are computed with the loss."""
    is_kept: Bool[Tensor, "N"] | None = None
    """False if the correction rejects the token. Set with `correction_weights`."""
    is_bounded: Bool[Tensor, "N"] | None = None
    """True if the importance weight was truncated or masked."""
    is_trusted: Bool[Tensor, "N"] | None = None
    """False if a mask drops the token from the policy loss. None if all are kept."""
    is_selected: Bool[Tensor, "N"] | None = None
    """True if the policy loss's selector picked the token. None without a selector or mask."""
    nll_weights: Float[Tensor, "N"] | None = None
    """float32, factor of the negative log-likelihood."""
    token_weights: Float[Tensor, "N"] | None = None
    """float32, factor of the token's loss, from the aggregation over its update."""


@dataclass(frozen=True)
class Batch:
    """B trajectories and N tokens."""

    trajectories: Trajectories
    tokens: Tokens
    part_names: tuple[str, ...] = ()
    """Names of the K reward components, sorted."""
    source_names: tuple[str, ...] = ()
    """Sorted."""

    @property
    def num_trajectories(self) -> int:
        return len(self.trajectories.groups)

    @property
    def num_contexts(self) -> int:
        """Largest context index plus 1."""
        return int(self.tokens.contexts.max()) + 1 if len(self.tokens.contexts) else 0

    def to(self, device: torch.device) -> "Batch":
        return self.replace(trajectories=self.trajectories.to(device), tokens=self.tokens.to(device))

    def replace(self, **parts: Any) -> "Batch":
        return dataclasses.replace(self, **parts)

    def with_tokens(self, **columns: Any) -> "Batch":
        return self.replace(tokens=self.tokens.replace(**columns))

    def select(self, is_taken: Bool[Tensor, "B"]) -> "Batch":
        """Select and renumber trajectories. Group numbers are unchanged."""
        tokens, numbers = self.tokens.take(is_taken[self.tokens.sequences]), is_taken.cumsum(0) - 1
        tokens = tokens.replace(sequences=numbers[tokens.sequences])
        return self.replace(trajectories=self.trajectories.take(is_taken), tokens=tokens)

    def parts(self, names: Sequence[str], *, setting: str) -> Float[Tensor, "B K"]:
        """Raises BatchError if a trajectory lacks a component."""
        missing = [name for name in names if name not in self.part_names]
        columns = self.trajectories.parts[:, [self.part_names.index(name) for name in names if name not in missing]]
        if missing or not columns[self.trajectories.is_member].isfinite().all():
            raise BatchError(
                f"{setting} names parts of the reward that every answer must have ({', '.join(names)}), got answers "
                f"with {', '.join(self.part_names) or 'none'}, or without some of them: correct the reward function."
            )
        return columns

    def per_token(self, values: Float[Tensor, "B"]) -> Float[Tensor, "N"]:
        return values[self.tokens.sequences]
