"""Trainer: from fetched groups to a finished step.

Waits for: other ranks, in collectives.
Invariant: all ranks make the same updates, and gradients are independent of microbatches and ranks.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from slipstream.buffer.archive.step_tokens import StepTokens
from slipstream.buffer.trajectory import Trajectory
from slipstream.configs.algorithm import AlgorithmConfig
from slipstream.configs.run import RunConfig
from slipstream.learner.algorithms.logprobs import DeferredLogits, Requested
from slipstream.learner.batching.batch import Batch
from slipstream.learner.batching.build_batch import build_batch
from slipstream.learner.batching.collate import Layout, collate
from slipstream.learner.batching.microbatch import Microbatch, PromptImages, Sample, recompute
from slipstream.learner.engines.engine import ModelEngine, TrainEngine, check_finite, check_loss, take_step
from slipstream.learner.engines.optimizer import learning_rate
from slipstream.learner.publishing.staging import canary_logprobs, canary_token_ids
from slipstream.learner.ranks import Ranks
from slipstream.learner.training.layout import CHECK_EVERY_STEPS, check_rows
from slipstream.learner.training.loss_inputs import describe_advantages, learning_rate_scale
from slipstream.learner.training.model import Policy
from slipstream.learner.training.objective import Objective
from slipstream.learner.training.second_model import SecondModel
from slipstream.learner.training.step_metrics import GradientSimilarity, StepMetrics, TokenRecorder
from slipstream.runtime.images import takes_images
from slipstream.runtime.lora import adapter_off
from slipstream.runtime.routers import aux_loss_coefficient
from slipstream.runtime.trace import TimeAccount


class AdapterOff:
    """The policy without its adapter, as a reference."""

    def __init__(self, engine: TrainEngine[Policy]) -> None:
        self._engine = engine

    def forward(self, microbatch: Microbatch, **options: Any) -> dict[str, Any]:
        """Collective."""
        with adapter_off(self._engine.model.causal_lm):
            return self._engine.forward(microbatch, **options)


@dataclass(frozen=True)
class FrozenModels:
    """Reference and teacher, if needed. They ignore recorded experts, which belong to the trained policy."""

    config: AlgorithmConfig
    reference: ModelEngine[Policy] | AdapterOff | None = None
    teacher: ModelEngine[Policy] | None = None

    @property
    def refreshed(self) -> ModelEngine[Policy] | None:
        """The reference if it changes during training, else None."""
        if isinstance(self.reference, AdapterOff):
            return None
        return self.reference if self.config.kl.refresh_every_steps else None

    def recompute_logprobs(self, batch: Batch, microbatches: Sequence[Microbatch], *, ranks: Ranks) -> Batch:
        """Fill `reference_logprobs` and `teacher_logprobs` if needed. Collective."""
        microbatches = [replace(microbatch, experts=None) for microbatch in microbatches]
        if self.reference and (self.config.kl.estimator != "full" or self.config.advantage.needs_process_rewards):
            columns = recompute(batch, microbatches, self.reference.forward, names=["logprobs"], ranks=ranks)
            batch = batch.with_tokens(reference_logprobs=columns["logprobs"])
        if self.teacher and self.config.distillation and not self.config.distillation.takes_candidates:
            columns = recompute(batch, microbatches, self.teacher.forward, names=["logprobs"], ranks=ranks)
            batch = batch.with_tokens(teacher_logprobs=columns["logprobs"])
        return batch

    @torch.no_grad()
    def aux_inputs(self, microbatch: Microbatch) -> tuple[dict[str, Tensor | DeferredLogits], dict[str, Tensor]]:
        """Arguments of the forward pass, and outputs, too large for the whole batch."""
        arguments, outputs = dict[str, Tensor | DeferredLogits](), dict[str, Tensor]()
        microbatch = replace(microbatch, experts=None)
        if self.reference and self.config.kl.estimator == "full":
            arguments["reference_logits"] = self.reference.forward(microbatch, requested=None)["logits"]
        if self.teacher and self.config.distillation and self.config.distillation.takes_candidates:
            likely = self.teacher.forward(microbatch, requested=Requested(top_k=self.config.distillation.top_k))
            arguments["candidates"] = likely["top_tokens"]
            outputs["teacher_candidate_logprobs"] = likely["top_logprobs"]
        return arguments, outputs

    def refresh_reference(self, engine: TrainEngine, *, step: int) -> None:
        """Copy the learner into the reference if due. Collective."""
        every = self.config.kl.refresh_every_steps
        if self.refreshed and every and step % every == 0:
            self.refreshed.take_weights(engine)


class Trainer:
    """One per rank. Life: (step -> canary?)*. Every method is collective."""

    def __init__(
        self,
        run: RunConfig,
        *,
        engine: TrainEngine[Policy],
        ranks: Ranks,
        objective: Objective,
        frozen_models: FrozenModels,
        layout: Layout,
        second_model: SecondModel | None = None,
        text: Sequence[int] = (),
    ) -> None:
        """`layout`: exact for all models. `text`: tokens for the canary."""
        self._run = run
        self._ranks = ranks
        self._frozen_models = frozen_models
        self._layout = layout
        self._canary_ids = canary_token_ids(run, vocab_size=engine.model.vocab_size, text=text)
        self.engine = engine
        self.objective = objective
        self.second_model = second_model
        self.reference = frozen_models.refreshed
        self.gradients = GradientSimilarity(engine.optimizer, seed=run.seed)
        self.images = PromptImages(run.model.path) if takes_images(run.model.path) else None
        self._aux_loss_coefficient = aux_loss_coefficient(run.model, engine.model.causal_lm)
        self._router_layers = engine.model.routers.layers if engine.model.routers else ()
        self.num_updates = 0
        """Optimizer updates so far, restored from a checkpoint."""
        self.step_tokens: StepTokens | None = None
        """Statistics of the last step on rank 0, if recorded."""
        self.account = TimeAccount("rest")
        self._build = partial(
            build_batch,
            max_lag=run.staleness.max_lag,
            num_updates=run.algorithm.updates_per_step,
            masks_truncated=run.algorithm.reward.mask_truncated,
            has_baseline=run.has_baseline,
            has_observations=run.algorithm.advantage.needs_observations,
            vocab_size=engine.model.vocab_size,
            images=self.images,
            routers=engine.model.routers if run.model.moe.router_replay else None,
        )

    def step(
        self, groups: Sequence[Sequence[Trajectory]], *, step: int, num_mixed: int = 0, **options: Any
    ) -> dict[str, float]:
        """Train on the claimed groups. Returns `learner/...` metrics, equal on all ranks.

        `num_mixed` and `options`: see `build_batch`. Raises BatchError, RankGroupError, DivergenceError. The trainer is
        then unusable.
        """
        with self.account.phase("batch"):
            built = self._build(groups, num_mixed=num_mixed, **options)
            updates = [self.collate(samples) for samples in built.updates]
        self.check_rows([sample for samples in built.updates for sample in samples], step=step)
        batch, fitted = self._prepare(built.batch.to(self.engine.device), updates, step=step)
        scale = learning_rate_scale(batch) if self._run.algorithm.ess_learning_rate else 1.0
        step_metrics = StepMetrics(TokenRecorder(batch.tokens))
        norms = []  # of updates with a trained token
        for index, microbatches in enumerate(updates):
            if self._tokens_of(batch, index).any():
                norms.append(self._update(batch, index, microbatches, metrics=step_metrics, step=step, scale=scale))
        metrics = built.metrics | describe_advantages(batch) | {"learner/kl_coefficient": self.objective.kl_coefficient}
        metrics |= step_metrics.report(self._ranks, num_updates=len(norms), layers=self._router_layers)
        if step_metrics.recorder:
            # Ids of another run may collide with this run's.
            own = zip(chain.from_iterable(groups[: len(groups) - num_mixed]), built.trained, strict=False)
            self.step_tokens = step_metrics.recorder.collect(own, ranks=self._ranks)
        moved = [norm for norm in norms if norm is not None]
        self._frozen_models.refresh_reference(self.engine, step=step)
        if moved:
            # The KL coefficient adapts only with the policy.
            reference_kl = metrics["learner/reference_kl"]
            self.objective.end_step(reference_kl=reference_kl, num_trajectories=batch.num_trajectories)
        with_loss = [microbatches for index, microbatches in enumerate(updates) if self._has_loss(batch, index)]
        return {
            **metrics,
            **self.gradients.report(self._ranks),
            **fitted,
            **(self.second_model.learn(batch, with_loss, step=step) if self.second_model else {}),
            "learner/updates": float(len(moved)),
            "learner/grad_norm": sum(moved) / max(1, len(moved)),
            "learner/learning_rate": scale * self._learning_rate(max(0, self.num_updates - 1)),
            "learner/learning_rate_scale": scale,
        }

    def _prepare(self, batch: Batch, updates: list[list[Microbatch]], *, step: int) -> tuple[Batch, dict[str, float]]:
        """Fill columns for updates. Returns metrics of a second model that trains first."""
        config, microbatches, metrics = self._run.algorithm, [*chain(*updates)], dict[str, float]()
        if config.needs_start_logprobs:
            requested = Requested(collision=config.advantage.needs_collisions)
            names = ["logprobs", "collisions"] if requested.collision else ["logprobs"]
            forward = partial(self.engine.forward, requested=requested)
            columns = recompute(batch, microbatches, forward, names=names, ranks=self._ranks)
            batch = batch.with_tokens(start_logprobs=columns["logprobs"], collisions=columns.get("collisions"))
        batch = self._frozen_models.recompute_logprobs(batch, microbatches, ranks=self._ranks)
        if self.second_model:
            batch, metrics = self.second_model.fill(batch, updates, step=step)
        return self.objective.prepare(batch), metrics

    def _update(
        self, batch: Batch, index: int, microbatches: list[Microbatch], *, metrics: StepMetrics, step: int, scale: float
    ) -> float | None:
        """Make one optimizer update of the policy and return the gradient norm.

        In the critic's warm-up, or without kept tokens, only collect metrics and return None.
        """
        is_moving = step > self._warmup_steps and self._has_loss(batch, index)
        if self._run.algorithm.needs_current_logprobs:
            current = recompute(batch, microbatches, self.engine.forward, names=["logprobs"], ranks=self._ranks)
            batch = batch.with_tokens(current_logprobs=current["logprobs"])
            batch = self.objective.select_tokens(batch, update=index, seed=self._run.seed + self.num_updates)
        losses = []
        prices = self.expert_prices(microbatches) if is_moving else {}
        # One backward pass per microbatch keeps one graph in memory.
        with torch.set_grad_enabled(is_moving):
            for microbatch in microbatches:
                arguments, extra = self._frozen_models.aux_inputs(microbatch)
                outputs = self.engine.forward(microbatch, requested=self.objective.requested, **arguments, **prices)
                metrics.add_forward(microbatch, outputs)
                loss = self.objective.loss(batch.tokens.take(microbatch.indices), outputs | extra, metrics=metrics)
                loss = loss + outputs.get("aux_loss", 0.0)
                if is_moving:
                    self.engine.backward(loss)
                losses.append(loss.detach())
        if not is_moving:
            return None
        return self.finish_update(losses, learning_rate=scale * self._learning_rate(self.num_updates), step=step)

    @torch.no_grad()
    def expert_prices(self, microbatches: Sequence[Microbatch]) -> dict[str, Tensor]:
        """`prices`, float32[M, E], for `Policy.forward`; {} without a load-balancing loss. Collective.

        loss = coefficient * mean over routers of E * sum over experts of f * P = sum(prices * token probabilities)

        f = fraction of tokens routed to the expert, without gradient, and P = its mean probability, over this update on
        all ranks, so f comes before the first loss. A shared prompt counts once per sample.

        Source: Switch Transformers, arXiv:2101.03961, eq. 4-6; over the whole batch: arXiv:2501.11873.
        Differs: f counts each of a token's K experts: the loss is K * coefficient for an even load.
        """
        routers, coefficient = self.engine.model.routers, self._aux_loss_coefficient
        if not coefficient or routers is None:
            return {}
        if self._run.model.moe.router_replay:
            recorded = [(m.copies.flatten(), m.experts.flatten(0, 1)) for m in microbatches if m.experts is not None]
            loads = [routers.load(copies, experts) for copies, experts in recorded]
        else:
            loads = [self.engine.forward(microbatch)["expert_load"] for microbatch in microbatches]
        none = torch.zeros(routers.shape[0], routers.num_experts, dtype=torch.float64, device=self.engine.device)
        load = self._ranks.sum(sum(loads, none))
        num_tokens = load[0].sum() / routers.top_k
        return {"prices": (coefficient * routers.num_experts * load / num_tokens.square() / len(load)).float()}

    def finish_update(self, losses: Sequence[Tensor], *, learning_rate: float, step: int) -> float:
        """Gradient norm. Raises DivergenceError."""
        total = torch.stack(list(losses)).sum()
        check_loss(total, what="the loss", step=step, setting="learner.optimizer", ranks=self._ranks)
        # After the check, which waits for backward passes.
        with self.account.phase("optimizer"):
            norm = take_step(self.engine, learning_rate=learning_rate, step=step)
            self.gradients.end_update()
        self.num_updates += 1
        return norm

    def _has_loss(self, batch: Batch, index: int) -> bool:
        own, is_kept = self._tokens_of(batch, index), batch.tokens.is_kept
        return bool((own if is_kept is None else own & is_kept).any())

    def _tokens_of(self, batch: Batch, index: int) -> Tensor:
        return batch.trajectories.updates[batch.tokens.sequences] == index

    @property
    def _warmup_steps(self) -> int:
        return self.second_model.warmup_steps if self.second_model else 0

    def _learning_rate(self, update: int) -> float:
        """The schedule excludes the critic's warm-up."""
        config, num_steps = self._run.learner.optimizer, self._run.learner.max_steps - self._warmup_steps
        per_step = self._run.algorithm.updates_per_step
        return learning_rate(update, config=config, num_steps=num_steps, updates_per_step=per_step)

    def collate(self, samples: Sequence[Sample]) -> list[Microbatch]:
        rank, num_ranks = self._ranks.share
        microbatches = collate(samples, layout=self._layout, rank=rank, num_ranks=num_ranks)
        return [microbatch.to(self.engine.device) for microbatch in microbatches]

    def check_rows(self, samples: Sequence[Sample], *, step: int) -> None:
        """Check regularly that samples stay independent, as weights change. Raises DivergenceError."""
        if step % CHECK_EVERY_STEPS != 1:
            return
        models = [self.engine.model, *([self.second_model.engine.model] if self.second_model else [])]
        # Too few samples to compile for.
        with torch.compiler.set_stance("force_eager") if self._run.learner.compile else nullcontext():
            for model in models:
                check_rows(model, samples, layout=self._layout, ranks=self._ranks, step=step)

    def check_weights(self, *, step: int) -> None:
        check = partial(check_finite, step=step, ranks=self._ranks)
        lower = "lower {}.learning_rate, or raise its epsilon".format
        check(self.engine.held_weights(), what="the learner's weights", remedy=lower("learner.optimizer"))
        if second := self.second_model:
            remedy = lower(second.optimizer_setting)
            check(second.engine.held_weights(), what=f"the {second.noun}'s weights", remedy=remedy)

    def check_state(self, moments: Iterable[Mapping[str, Tensor]], *, step: int) -> None:
        """Raise DivergenceError unless optimizer moments and objective state are finite."""
        carried = {f"objective/{key}": torch.tensor(value) for key, value in self.objective.state.save().items()}
        named = chain(carried.items(), *(each.items() for each in moments))
        what = "the state of the optimizer and the objective"
        remedy = "lower learner.optimizer.learning_rate or max_grad_norm"
        check_finite(named, what=what, step=step, remedy=remedy, ranks=self._ranks)

    def canary(self, *, step: int = 0) -> tuple[list[list[int]], list[list[float]]]:
        """See `Canary`. Raises DivergenceError unless log-probabilities and weights are finite after `step`."""
        self.check_weights(step=step)
        logprobs = canary_logprobs(self.engine, self._canary_ids, layout=self._layout)
        probe = [("the probe", torch.tensor(logprobs))]
        remedy = "its weights are finite, so look for overflow in model.dtype"
        check_finite(probe, what="the learner's log-probabilities", step=step, remedy=remedy, ranks=self._ranks)
        return self._canary_ids.tolist(), logprobs
