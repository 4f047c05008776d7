"""Objective: the loss, composed from the algorithm's settings.

Per token, with sg = stop gradient and w = correction(pi_proximal / pi_generator):

    loss = sg(w) * policy_loss(pi_learner / pi_proximal) + kl.coef * KL(learner, reference)
           + correction.log_ratio_penalty * log(pi_learner / pi_generator)^2
           - entropy_coef * entropy + positive_nll_coef * [correct] * (-log pi_learner)
           + distillation.coef * divergence(learner, teacher)

`algorithm.proximal` selects pi_proximal. Rejected tokens (not `is_kept`) have no loss, masked ones (not `is_trusted`)
no policy loss.
"""

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.configs.algorithm import AlgorithmConfig, DistillationConfig
from slipstream.configs.algorithm_terms import CustomAdvantageConfig, CustomPolicyLossConfig
from slipstream.configs.base import Formula
from slipstream.learner.algorithms import distillation, find, importance, kl
from slipstream.learner.algorithms.inputs import KlInputs, LossInputs, known
from slipstream.learner.algorithms.logprobs import Requested
from slipstream.learner.algorithms.policy_losses import idle_tokens
from slipstream.learner.batching.batch import Batch, Tokens
from slipstream.learner.errors import BatchError
from slipstream.learner.training import loss_inputs
from slipstream.learner.training.loss_inputs import Correction, correct
from slipstream.learner.training.step_metrics import StepMetrics, TokenStats
from slipstream.runtime.import_path import load_function


def load_formula(record: Formula, *, setting: str) -> Callable[[Any], Any]:
    """Function that `record` selects, with its settings. `setting`: its config key. Raises ConfigError."""
    if isinstance(record, CustomAdvantageConfig | CustomPolicyLossConfig):
        return partial(load_function(record.function, setting=setting, arguments=record.arguments), **record.arguments)
    return bind(record.formula(), record)


def bind(name: str, record: Formula) -> Callable[[Any], Any]:
    """Bind a function (see `find`) to the fields of `record` that it accepts."""
    function = find(name)
    # A record with a selector has settings for two functions.
    taken = inspect.signature(function).parameters
    return partial(function, **{field: getattr(record, field) for field in record.__struct_fields__ if field in taken})


@dataclass
class ObjectiveState:
    """State across steps and checkpoints, equal on every rank."""

    kl_coefficient: float | None = None
    """None before the first step or if fixed."""
    advantage: dict[str, float] = dataclasses.field(default_factory=dict)
    """See `AdvantageInputs.state`."""

    def save(self) -> dict[str, float]:
        return self.advantage | ({} if self.kl_coefficient is None else {"kl_coefficient": self.kl_coefficient})

    def restore(self, saved: dict[str, float]) -> None:
        self.kl_coefficient = saved.get("kl_coefficient")
        self.advantage = {name: value for name, value in saved.items() if name != "kl_coefficient"}


class Objective:
    """The loss function. Life: (prepare -> (select_tokens -> loss*)* -> end_step)*."""

    def __init__(self, config: AlgorithmConfig, *, max_tokens: int) -> None:
        """`max_tokens`: maximum response length. Raises ConfigError."""
        self._config = config
        self._max_tokens = max_tokens
        self._advantage = load_formula(config.advantage, setting="algorithm.advantage")
        self._policy_loss = load_formula(config.policy_loss, setting="algorithm.policy_loss")
        self._masks, self._local_masks = (
            [load_formula(mask, setting="algorithm.masks") for mask in config.masks if mask.is_local == is_local]
            for is_local in (False, True)
        )
        self._selector = bind(config.policy_loss.selector, config.policy_loss) if config.policy_loss.selector else None
        self.requested = Requested(entropy=True, differentiate_entropy=config.entropy_coef > 0)
        self.state = ObjectiveState()

    @property
    def kl_coefficient(self) -> float:
        current = self.state.kl_coefficient
        return self._config.kl.coef if current is None else current

    @torch.no_grad()
    def prepare(self, batch: Batch) -> Batch:
        """Fill the columns that the loss needs, without gradient. Raises BatchError."""
        config = self._config
        # The correction comes first: rejected trajectories may leave baselines.
        batch = loss_inputs.correct_batch(batch, config=config)
        batch = loss_inputs.shape_rewards(
            batch, config=config, kl_coefficient=self.kl_coefficient, max_tokens=self._max_tokens
        )
        batch = loss_inputs.fill_advantages(batch, self._advantage, config=config.advantage, state=self.state.advantage)
        if config.distillation:
            batch = loss_inputs.add_teacher_advantages(batch, config=config.distillation)
        return batch.with_tokens(
            token_weights=loss_inputs.token_weights(batch, config=config, max_tokens=self._max_tokens),
            nll_weights=loss_inputs.nll_weights(batch, coefficient=config.positive_nll_coef),
        )

    def select_tokens(self, batch: Batch, *, update: int, seed: int) -> Batch:
        return loss_inputs.select_tokens(batch, masks=self._masks, selector=self._selector, update=update, seed=seed)

    def end_step(self, *, reference_kl: float, num_trajectories: int) -> None:
        if adaptive := self._config.kl.adaptive:
            self.state.kl_coefficient = kl.adaptive_coefficient(
                self.kl_coefficient,
                kl=reference_kl,
                target=adaptive.target,
                num_sequences=num_trajectories,
                horizon=adaptive.horizon,
            )

    def loss(self, tokens: Tokens, measured: dict[str, Tensor], *, metrics: StepMetrics) -> Tensor:
        """Part of the update's loss for `tokens`, in complete contexts, and its statistics. Raises BatchError.

        `measured`: outputs of the forward pass.
        """
        learner = measured["logprobs"]
        # Otherwise sums over contexts would be as long as the batch.
        numbers, contexts = torch.unique(tokens.contexts, return_inverse=True)
        tokens = tokens.replace(contexts=contexts)
        inputs, correction = self._loss_inputs(tokens, learner, num_sequences=len(numbers))
        # Impossible tokens (-inf) would make the loss infinite. NaN stays and ends the run: the model is broken.
        is_possible = learner.detach() != -torch.inf
        correction = correction._replace(is_kept=correction.is_kept & is_possible)
        is_trusted = self._trusted(tokens, learner.detach(), num_sequences=len(numbers))
        is_counted = correction.is_kept & (correction.weights > 0) & is_trusted
        # 0 * log_ratio: ranks call backward together, so a loss without counted tokens needs a graph.
        policy_losses, is_idle = 0 * inputs.log_ratio, ~is_trusted
        if is_counted.any():
            # Uncounted tokens must not affect their sequence's ratio.
            counted = inputs if is_counted.all() else inputs.take(is_counted)
            losses = self._policy_loss(counted)
            if not isinstance(losses, Tensor) or losses.shape != counted.log_ratio.shape:
                raise BatchError(
                    f"algorithm.policy_loss={self._config.policy_loss.kind} must return one loss per token "
                    f"({len(counted.log_ratio)}), got {losses!r:.200}."
                )
            policy_losses = torch.zeros_like(inputs.log_ratio).masked_scatter(is_counted, losses)
            # On a leaf, to keep the graph for the backward pass.
            leaf = counted.log_ratio.detach().requires_grad_()
            with torch.enable_grad():
                again = self._policy_loss(dataclasses.replace(counted, log_ratio=leaf))
            is_idle = is_idle.masked_scatter(is_counted, idle_tokens(again, leaf, counted.advantages))
        divergence = self._reference_kl(tokens, measured)
        token_losses = correction.weights * policy_losses + self._regularizers(tokens, measured, divergence)
        # A sum: the token weights include the denominator.
        loss = (known(tokens.token_weights) * correction.is_kept * token_losses).sum()
        if tokens.nll_weights is not None:
            loss = loss - (tokens.nll_weights * correction.is_kept * learner.masked_fill(~is_possible, 0.0)).sum()
        metrics.add(TokenStats(tokens, inputs, correction, is_idle, measured["entropies"], divergence), loss=loss)
        return loss

    def _loss_inputs(self, tokens: Tokens, learner: Tensor, *, num_sequences: int) -> tuple[LossInputs, Correction]:
        anchor = self._proximal_logprobs(tokens, learner.detach())
        if tokens.correction_weights is not None:
            # Correction of the whole batch.
            correction = Correction(tokens.correction_weights, known(tokens.is_kept), known(tokens.is_bounded))
        else:
            # Rejection compares learner and generator: the drift of an interpolated proximal policy is smaller.
            measure = partial(loss_inputs.ratio_inputs, tokens, num_sequences=num_sequences)
            drift, distance = map(measure, (anchor, learner.detach()))
            correction = correct(drift, learner=distance, config=self._config.correction)
        inputs = LossInputs(
            log_ratio=importance.token_log_ratio(learner, anchor),
            advantages=known(tokens.advantages),
            learner_logprobs=learner.detach(),
            sequences=tokens.contexts,
            num_sequences=num_sequences,
            is_selected=tokens.is_selected,
        )
        return inputs, correction

    def _trusted(self, tokens: Tokens, learner: Tensor, *, num_sequences: int) -> Tensor:
        all_tokens = torch.ones_like(tokens.sequences, dtype=torch.bool)
        is_trusted = all_tokens if tokens.is_trusted is None else tokens.is_trusted
        if self._local_masks:
            inputs = loss_inputs.mask_inputs(tokens, learner, num_sequences=num_sequences)
            for mask in self._local_masks:
                is_trusted = is_trusted & mask(inputs)
        return is_trusted

    def _proximal_logprobs(self, tokens: Tokens, learner_logprobs: Tensor) -> Tensor:
        if self._config.proximal == "generator":
            return tokens.generator_logprobs
        if self._config.proximal == "interpolate":
            # Lags relative to the start of the step, which produces version 1.
            alpha = importance.interpolation(tokens.lags)
            return importance.loglinear(tokens.generator_logprobs, learner_logprobs, alpha=alpha)
        if self._config.proximal == "reuse" or tokens.start_logprobs is None:
            # With one update per step, these are its starting values: ratio 1.
            return learner_logprobs
        return tokens.start_logprobs

    def _reference_kl(self, tokens: Tokens, measured: dict[str, Tensor]) -> Tensor:
        if "exact_kl" in measured:
            return measured["exact_kl"]
        if tokens.reference_logprobs is None:
            return torch.zeros_like(measured["logprobs"])
        inputs = KlInputs(measured["logprobs"], tokens.reference_logprobs, tokens.generator_logprobs)
        return kl.KL_ESTIMATORS[self._config.kl.estimator](inputs)

    def _regularizers(self, tokens: Tokens, measured: dict[str, Tensor], divergence: Tensor) -> Tensor:
        price = 0.0 if self._config.kl.apply_to == "reward" else self.kl_coefficient
        losses = price * divergence - self._config.entropy_coef * measured["entropies"]
        if penalty := self._config.correction.log_ratio_penalty:
            log_ratio = importance.token_log_ratio(measured["logprobs"], tokens.generator_logprobs)
            losses = losses + penalty * log_ratio.square()
        if self._config.distillation:
            losses = losses + _teacher_losses(tokens, measured, config=self._config.distillation)
        return losses


def _teacher_losses(tokens: Tokens, measured: dict[str, Tensor], *, config: DistillationConfig) -> Tensor:
    """float[N]; 0 if the teacher enters through advantages."""
    if config.divergence == "k1":
        return torch.zeros_like(measured["logprobs"])
    if config.divergence == "k3":
        return config.coef * distillation.sampled_k3(measured["logprobs"], known(tokens.teacher_logprobs))
    candidates = measured["candidate_logprobs"], measured["teacher_candidate_logprobs"]
    if config.divergence == "forward_kl_topk":
        return config.coef * distillation.forward_kl_topk(*candidates, renormalize=config.renormalize)
    return config.coef * distillation.generalized_jsd(*candidates, beta=config.beta, renormalize=config.renormalize)
