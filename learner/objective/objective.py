"""Objective: advantage x correction x policy loss x KL x entropy, put together from the algorithm's settings.

Per token, with sg = no gradient, w = correction(pi_proximal / pi_generator):

    loss = sg(w) * policy_loss(pi_learner / pi_proximal) + kl.coefficient * KL(learner, reference)
           - entropy_coefficient * entropy + positive_nll_coefficient * [right] * (-log pi_learner)
           + distillation.coefficient * divergence(learner, teacher)

`algorithm.proximal` says which policy pi_proximal is. Tokens that are not kept have no loss; those that a mask does not
trust have no policy loss.
"""

import torch
from torch import Tensor

from slipstream.configs.algorithm import AlgorithmConfig
from slipstream.learner.algorithms import controllers, importance, kl
from slipstream.learner.algorithms.logprobs import Requested
from slipstream.learner.batching.batch import Batch, Tokens, known
from slipstream.learner.metrics.step_metrics import StepMetrics
from slipstream.learner.metrics.token_stats import TokenStats
from slipstream.learner.objective.importance_correction import Correction, correct
from slipstream.learner.objective.loss_inputs import learning_rate_scale, prepare
from slipstream.learner.objective.loss_registry import LossInputs, PolicyLoss, policy_loss
from slipstream.learner.objective.rewards import kl_coefficient
from slipstream.learner.objective.state import ObjectiveState
from slipstream.learner.objective.token_selection import select_tokens
from slipstream.learner.training.frozen_models import teaching_losses


class Objective:
    """What is minimised. Life: (prepare -> (select_tokens -> loss*)* -> end_step)*."""

    def __init__(self, config: AlgorithmConfig, *, max_tokens: int) -> None:
        """`max_tokens`: longest response."""
        self._config = config
        self._max_tokens = max_tokens
        self.state = ObjectiveState()
        """What it carries from step to step; restored from a checkpoint."""

    @property
    def config(self) -> AlgorithmConfig:
        """Its settings."""
        return self._config

    @property
    def requested(self) -> Requested:
        """What a forward pass with gradient must tell."""
        return Requested(entropy=True, differentiate_entropy=self._config.entropy_coefficient > 0)

    def prepare(self, batch: Batch) -> Batch:
        """All that the loss needs to know without a gradient. Raises BatchError."""
        return prepare(batch, config=self._config, state=self.state, max_tokens=self._max_tokens)

    def learning_rate_scale(self, batch: Batch) -> float:
        """Factor of the learning rate in this step."""
        return learning_rate_scale(batch, config=self._config.ess_learning_rate)

    def select_tokens(self, batch: Batch, *, update: int, seed: int) -> Batch:
        """Pick out tokens among all of an optimizer update, from `current_logprobs`; `seed` is for random picks."""
        return select_tokens(batch, config=self._config, update=update, seed=seed)

    def end_step(self, *, reference_kl: float, num_trajectories: int) -> None:
        """Move what is adaptive, by what was measured."""
        adaptive = self._config.kl.adaptive
        if adaptive:
            self.state.kl_coefficient = controllers.adaptive_kl_coefficient(
                kl_coefficient(self._config, self.state),
                kl=reference_kl,
                target=adaptive.target,
                num_sequences=num_trajectories,
                horizon=adaptive.horizon,
            )

    def loss(self, tokens: Tokens, measured: dict[str, Tensor], *, metrics: StepMetrics) -> Tensor:
        """The part of the update's loss that these tokens make, whole trajectories; what it saw goes into `metrics`.

        `measured`: what the forward pass said of them.
        """
        learner = measured["logprobs"]
        numbers, sequences = torch.unique(tokens.sequences, return_inverse=True)
        tokens = tokens.replace(sequences=sequences)
        anchor = self._proximal_logprobs(tokens, learner.detach())
        correction = self._correction(tokens, anchor, learner.detach(), num_sequences=len(numbers))
        log_ratio = importance.token_log_ratio(learner, anchor)
        found = self._policy_loss(tokens, log_ratio, learner.detach(), correction, num_sequences=len(numbers))
        divergence = self._reference_kl(tokens, measured)
        token_losses = correction.weights * found.losses + self._regularisers(tokens, measured, divergence)
        loss = (known(tokens.token_weights) * correction.is_kept * token_losses).sum()
        if tokens.nll_weights is not None:
            loss = loss - (tokens.nll_weights * correction.is_kept * learner).sum()
        facts = TokenStats(
            log_ratio=log_ratio,
            learner_logprobs=learner if tokens.start_logprobs is None else tokens.start_logprobs,
            generator_logprobs=tokens.generator_logprobs,
            weights=correction.weights,
            is_bounded=correction.is_bounded,
            is_kept=correction.is_kept,
            is_idle=found.is_idle,
            entropies=measured["entropies"],
            reference_kl=divergence,
            lags=tokens.lags,
            sequences=sequences,
            num_sequences=len(numbers),
        )
        metrics.add(facts, loss=loss)
        return loss

    def _policy_loss(
        self, tokens: Tokens, log_ratio: Tensor, learner_logprobs: Tensor, correction: Correction, *, num_sequences: int
    ) -> PolicyLoss:
        seen = LossInputs(
            learner_logprobs, known(tokens.advantages), tokens.sequences, num_sequences, tokens.is_selected
        )
        is_counted = correction.is_kept & (correction.weights > 0)
        if tokens.is_trusted is None:
            return policy_loss(self._config.policy_loss, log_ratio, seen, is_counted=is_counted)
        is_counted = is_counted & tokens.is_trusted
        found = policy_loss(self._config.policy_loss, log_ratio, seen, is_counted=is_counted)
        return found._replace(is_idle=found.is_idle | ~tokens.is_trusted)

    def _regularisers(self, tokens: Tokens, measured: dict[str, Tensor], divergence: Tensor) -> Tensor:
        """KL, entropy and teacher, per token."""
        price = 0.0 if self._config.kl.charged_in == "reward" else kl_coefficient(self._config, self.state)
        losses = price * divergence - self._config.entropy_coefficient * measured["entropies"]
        if self._config.distillation:
            losses = losses + teaching_losses(tokens, measured, config=self._config.distillation)
        return losses

    def _proximal_logprobs(self, tokens: Tokens, learner_logprobs: Tensor) -> Tensor:
        if self._config.proximal == "generator":
            return tokens.generator_logprobs
        if self._config.proximal == "interpolate":
            # Versions counted from the learner's at the start of the step, which makes version 1.
            alpha = importance.interpolation(-tokens.lags, proximal_version=0, learner_version=1)
            return importance.loglinear(tokens.generator_logprobs, learner_logprobs, alpha=alpha)
        if self._config.proximal == "reuse" or tokens.start_logprobs is None:
            return learner_logprobs
        return tokens.start_logprobs

    def _correction(
        self, tokens: Tokens, anchor: Tensor, learner_logprobs: Tensor, *, num_sequences: int
    ) -> Correction:
        """That of the whole batch where it is known, else from the update's own values."""
        if tokens.correction_weights is not None:
            return Correction(tokens.correction_weights, known(tokens.is_kept), known(tokens.is_bounded))
        found = correct(
            importance.token_log_ratio(anchor, tokens.generator_logprobs),
            tokens,
            learner_log_ratio=importance.token_log_ratio(learner_logprobs, tokens.generator_logprobs),
            num_sequences=num_sequences,
            config=self._config.correction,
        )
        return found if tokens.is_kept is None else found._replace(is_kept=found.is_kept & tokens.is_kept)

    def _reference_kl(self, tokens: Tokens, measured: dict[str, Tensor]) -> Tensor:
        learner, reference, estimator = measured["logprobs"], tokens.reference_logprobs, self._config.kl.estimator
        if "exact_kl" in measured:
            return measured["exact_kl"]
        if reference is None:
            return torch.zeros_like(learner)
        if estimator == "k3_off_policy":
            return kl.k3_off_policy(learner, reference, tokens.generator_logprobs)
        return kl.KL_ESTIMATORS[estimator](learner, reference)
