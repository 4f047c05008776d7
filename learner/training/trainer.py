"""Trainer: from fetched groups to a finished step.

Consumes: groups of trajectories, the learner's version.
Produces: moved parameters, diagnostics, the canary.
Waits for: the other ranks, in collective operations.
Invariant: all ranks get the same groups and make the same updates; how tokens are split into microbatches and ranks
changes no gradient.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slipstream.buffer.trajectory import Trajectory
from slipstream.configs.broker import PROBE_SEQUENCES
from slipstream.configs.run import RunConfig
from slipstream.learner.algorithms.logprobs import Requested
from slipstream.learner.batching.batch import Batch
from slipstream.learner.batching.build_batch import BuiltBatch, build_batch
from slipstream.learner.batching.collate import Layout, collate
from slipstream.learner.batching.microbatch import Microbatch, Sample
from slipstream.learner.batching.recompute import recompute_logprobs
from slipstream.learner.engines.engine import TrainEngine, check_loss
from slipstream.learner.engines.optimizer import learning_rate
from slipstream.learner.metrics.gradient_similarity import GradientSimilarity
from slipstream.learner.metrics.step_metrics import StepMetrics
from slipstream.learner.objective.loss_inputs import describe
from slipstream.learner.objective.objective import Objective
from slipstream.learner.objective.rewards import kl_coefficient
from slipstream.learner.publishing.staging import canary_logprobs, canary_token_ids
from slipstream.learner.ranks import Ranks
from slipstream.learner.training.critic import Critic
from slipstream.learner.training.frozen_models import FrozenModels
from slipstream.learner.training.model import Policy

_MIN_ROW_TOKENS = 64


class Trainer:
    """One per rank. Life: step, again and again, with `canary` in between. Every method is collective."""

    def __init__(
        self,
        run: RunConfig,
        *,
        engine: TrainEngine[Policy],
        ranks: Ranks,
        frozen_models: FrozenModels | None = None,
        critic: Critic | None = None,
    ) -> None:
        """`frozen_models` hold the initial policy when `algorithm.kl.coefficient` > 0, and a teacher when there is one.

        `critic` is needed when `algorithm.has_critic`.
        """
        self._run = run
        self._engine = engine
        self._ranks = ranks
        self._frozen_models = frozen_models or FrozenModels(run.algorithm)
        self._critic = critic
        self._objective = Objective(run.algorithm, max_tokens=run.generators.sampling.max_tokens)
        self._layout = _choose_layout(engine.model, microbatch_tokens=run.learner.tokens_per_microbatch)
        self._gradients = GradientSimilarity(engine.optimizer, seed=run.seed)
        self.num_updates = 0
        """Optimizer updates made so far; restored from a checkpoint."""

    @property
    def gradients(self) -> GradientSimilarity:
        """How gradients follow each other."""
        return self._gradients

    @property
    def objective(self) -> Objective:
        """What is minimised, and what it remembers."""
        return self._objective

    @property
    def reference(self) -> Policy | None:
        """What the learner is held near to."""
        return self._frozen_models.reference

    @property
    def critic(self) -> Critic | None:
        """What says how good a state is, where advantages take that."""
        return self._critic

    @property
    def engine(self) -> TrainEngine[Policy]:
        """Holds parameters and optimizer."""
        return self._engine

    def step(
        self,
        groups: Sequence[Sequence[Trajectory]],
        *,
        learner_version: int,
        step: int,
        weights: Sequence[float] = (),
        max_lags: Sequence[int | None] = (),
        num_mixed: int = 0,
    ) -> dict[str, float]:
        """Train on the claimed groups; returns `learner/...`, the same on all ranks.

        `weights`: what each group's loss is multiplied by, default 1. `max_lags`: lag beyond which tokens of each group
        leave the loss, None = none, default `buffer.staleness.max_lag`. `num_mixed`: so many groups at the end are of
        another run.

        Raises BatchError, RankGroupError, and DivergenceError: the weights are then those of the update before, and the trainer is
        of no further use.
        """
        admitted = self._admit(
            groups, learner_version=learner_version, weights=weights, max_lags=max_lags, num_mixed=num_mixed
        )
        updates = [self.collate(samples) for samples in admitted.updates]
        batch = self._survey(admitted.batch.to(self._engine.device), [m for update in updates for m in update])
        batch = self._objective.prepare(batch)
        scale = self._objective.learning_rate_scale(batch)
        step_metrics = StepMetrics()
        found = self._go_through(batch, updates, metrics=step_metrics, step=step, scale=scale)
        norms = [norm for norm in found if norm is not None]
        metrics = step_metrics.report(self._ranks, num_updates=len(found))
        self._frozen_models.refresh_reference(self._engine, step=step)
        price = kl_coefficient(self._run.algorithm, self._objective.state)
        if norms:
            self._objective.end_step(
                reference_kl=metrics["learner/reference_kl"], num_trajectories=batch.num_trajectories
            )
        return {
            **admitted.metrics,
            **describe(batch),
            **metrics,
            **self._gradients.report(self._ranks),
            **self._teach_critic(batch, updates, step=step),
            "learner/updates": float(len(norms)),
            "learner/grad_norm": sum(norms) / max(1, len(norms)),
            "learner/learning_rate": scale * self._learning_rate(max(0, self.num_updates - 1)),
            "learner/learning_rate_scale": scale,
            "learner/kl_coefficient": price,
        }

    def _admit(
        self,
        groups: Sequence[Sequence[Trajectory]],
        *,
        learner_version: int,
        weights: Sequence[float],
        max_lags: Sequence[int | None],
        num_mixed: int,
    ) -> BuiltBatch:
        return build_batch(
            groups,
            learner_version=learner_version,
            max_lags=max_lags or [self._run.buffer.staleness.max_lag] * len(groups),
            weights=weights or [1.0] * len(groups),
            num_updates=self._run.algorithm.updates_per_step,
            masks_truncated=self._run.algorithm.reward.truncated == "mask",
            has_baseline=self._run.generators.has_baseline,
            vocab_size=self._engine.model.vocab_size,
            num_mixed=num_mixed,
        )

    def canary(self) -> tuple[list[list[int]], list[list[float]]]:
        """Token ids of the probe sequences, and the learner's log-probabilities of all but the first of each."""
        token_ids = canary_token_ids(
            seed=self._run.seed,
            vocab_size=self._engine.model.vocab_size,
            num_sequences=PROBE_SEQUENCES,
            max_length=self._run.model.max_length,
        )
        return token_ids.tolist(), canary_logprobs(self._engine, token_ids)

    def collate(self, samples: Sequence[Sample]) -> list[Microbatch]:
        """This rank's share of an optimizer update, on its device."""
        ranks = self._ranks
        microbatches = collate(samples, layout=self._layout, rank=ranks.rank, num_ranks=ranks.size)
        return [microbatch.to(self._engine.device) for microbatch in microbatches]

    def move(self, losses: Sequence[Tensor], *, learning_rate: float, step: int) -> float:
        """End an optimizer update whose microbatches had these losses; returns the gradient norm. Raises DivergenceError."""
        total = torch.stack(list(losses)).sum()
        check_loss(total, what="the loss", step=step, setting="learner.optimizer", ranks=self._ranks)
        norm = self._engine.step(learning_rate=learning_rate)
        self._gradients.end_update()
        self.num_updates += 1
        return norm

    def _survey(self, batch: Batch, microbatches: list[Microbatch]) -> Batch:
        """The columns that take forward passes of their own."""
        config = self._run.algorithm
        if config.needs_start_logprobs:
            requested = Requested(collision=config.needs_collisions)
            names = ["logprobs", "collisions"] if requested.collision else ["logprobs"]
            columns = self._ask(
                batch, microbatches, lambda m: self._engine.forward(m, requested=requested), names=names
            )
            batch = batch.with_tokens(start_logprobs=columns["logprobs"], collisions=columns.get("collisions"))
        if self._critic:
            batch = self._critic.recompute_logprobs(batch, microbatches)
        return self._frozen_models.recompute_logprobs(batch, microbatches, ranks=self._ranks)

    def _ask(
        self,
        batch: Batch,
        microbatches: list[Microbatch],
        measure: Callable[[Microbatch], dict[str, Tensor]],
        *,
        names: list[str],
    ) -> dict[str, Tensor]:
        return recompute_logprobs(batch, microbatches, measure, names=names, ranks=self._ranks)

    def _go_through(
        self, batch: Batch, updates: list[list[Microbatch]], *, metrics: StepMetrics, step: int, scale: float
    ) -> list[float | None]:
        """See `_update`, of each that has tokens."""
        return [
            self._update(batch, index, microbatches, metrics=metrics, step=step, scale=scale)
            for index, microbatches in enumerate(updates)
            if self._tokens_of(batch, index).any()
        ]

    def _update(
        self, batch: Batch, index: int, microbatches: list[Microbatch], *, metrics: StepMetrics, step: int, scale: float
    ) -> float | None:
        """The gradient norm; None where the policy is measured only."""
        is_moving = self._is_moving(step) and self._has_loss(batch, index)
        batch = self._choose(batch, index, microbatches)
        with torch.set_grad_enabled(is_moving):
            losses = [self._measure(batch, microbatch, metrics=metrics) for microbatch in microbatches]
        if not is_moving:
            return None
        return self.move(losses, learning_rate=scale * self._learning_rate(self.num_updates), step=step)

    def _is_moving(self, step: int) -> bool:
        """Whether the policy learns in that step; else it is measured only, while the critic learns alone."""
        return self._critic is None or step > self._run.algorithm.critic.warmup_steps

    def _teach_critic(self, batch: Batch, updates: list[list[Microbatch]], *, step: int) -> dict[str, float]:
        """As many updates as the policy's, of the same tokens; the metrics, none without a critic."""
        if self._critic is None:
            return {}
        own = [microbatches for index, microbatches in enumerate(updates) if self._has_loss(batch, index)]
        return self._critic.learn(batch, own, step=step)

    def _has_loss(self, batch: Batch, index: int) -> bool:
        """Whether any token of that optimizer update is left to train on: the correction may have rejected them all."""
        own, is_kept = self._tokens_of(batch, index), batch.tokens.is_kept
        return bool((own if is_kept is None else own & is_kept).any())

    def _tokens_of(self, batch: Batch, index: int) -> Tensor:
        """bool[N]: those of that optimizer update."""
        return batch.trajectories.updates[batch.tokens.sequences] == index

    def _choose(self, batch: Batch, index: int, microbatches: list[Microbatch]) -> Batch:
        """Where tokens are picked out by what the learner says of them as the update begins."""
        if not self._run.algorithm.needs_current_logprobs:
            return batch
        current = self._ask(batch, microbatches, self._engine.forward, names=["logprobs"])["logprobs"]
        seed = self._run.seed + self.num_updates
        return self._objective.select_tokens(batch.with_tokens(current_logprobs=current), update=index, seed=seed)

    def _measure(self, batch: Batch, microbatch: Microbatch, *, metrics: StepMetrics) -> Tensor:
        """The loss of a microbatch, whose gradient is added to the engine's unless gradients are off."""
        aux_inputs = self._frozen_models.aux_inputs(microbatch)
        measured = (
            self._engine.forward(microbatch, requested=self._objective.requested, **aux_inputs.asked) | aux_inputs.known
        )
        metrics.count_forward(microbatch.num_tokens)
        loss = self._objective.loss(batch.tokens.take(microbatch.indices), measured, metrics=metrics)
        if torch.is_grad_enabled():
            self._engine.backward(loss)
        return loss.detach()

    def _learning_rate(self, update: int) -> float:
        """Its schedule passes while the policy learns, not while it waits for the critic."""
        num_steps = self._run.learner.max_steps - (self._run.algorithm.critic.warmup_steps if self._critic else 0)
        total = num_steps * self._run.algorithm.updates_per_step
        return learning_rate(update, config=self._run.learner.optimizer, total_updates=total)


def _choose_layout(policy: Policy, *, microbatch_tokens: int) -> Layout:
    """Attention costs row length x width, everything else 12 x width^2: rows of half the width cost next to nothing."""
    if policy.takes_one_row:
        return Layout("one_row", microbatch_tokens)
    row_tokens = min(microbatch_tokens, max(_MIN_ROW_TOKENS, policy.hidden_size // 2))
    return Layout("shared_rows", microbatch_tokens, row_tokens)
