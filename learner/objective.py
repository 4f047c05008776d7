"""Objective: advantage x correction x policy loss x KL x entropy, put together from the algorithm's settings.

Per token, with sg = no gradient, w = correction(pi_anchor / pi_generator):

    loss = sg(w) * policy_loss + kl_coefficient * k3(learner, reference) - entropy_coefficient * entropy

ppo_clip is the decoupled form: its ratio is learner / proximal, and the anchor is the proximal policy. reinforce has no
ratio of its own, so the anchor is the learner itself.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from configs.algorithm import (
    AlgorithmConfig,
    DrGrpoConfig,
    GrpoConfig,
    NoCorrectionConfig,
    PpoClipConfig,
    ReinforceConfig,
    RlooConfig,
    TokenMaskConfig,
    TokenTisConfig,
)
from learner.algorithms import advantages, aggregation, importance, kl, policy_losses
from learner.batch import Microbatch
from learner.diagnostics import Tally

_ADVANTAGES: dict[type, Callable[[Any, Tensor, Tensor], Tensor]] = {
    GrpoConfig: lambda config, rewards, groups: advantages.grpo(rewards, groups, epsilon=config.epsilon),
    DrGrpoConfig: lambda config, rewards, groups: advantages.dr_grpo(rewards, groups),
    RlooConfig: lambda config, rewards, groups: advantages.rloo(rewards, groups),
}
_CORRECTIONS: dict[type, Callable[[Any, Tensor], Tensor]] = {
    TokenTisConfig: lambda config, ratio: importance.token_tis(ratio, cap=config.cap),
    TokenMaskConfig: lambda config, ratio: importance.token_mask(ratio, low=config.low, high=config.high),
    NoCorrectionConfig: lambda config, ratio: torch.ones_like(ratio),
}
_AGGREGATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "token_mean": aggregation.token_mean,
    "seq_mean_token_mean": aggregation.seq_mean_token_mean,
    "seq_mean_token_sum": aggregation.seq_mean_token_sum,
}


class Objective:
    """What is minimised."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config
        self._clip = _clip_bounds(config.policy_loss)

    @property
    def needs_proximal(self) -> bool:
        """Whether the proximal log-probabilities must be computed at the start of a step."""
        return self._clip is not None and self._config.proximal == "recompute"

    @property
    def differentiates_entropy(self) -> bool:
        """Whether entropies need a gradient."""
        return self._config.entropy_coefficient > 0

    def advantages(self, rewards: Tensor, groups: Tensor) -> Tensor:
        """Rewards [B] and group indices [B] -> advantages [B]."""
        return _ADVANTAGES[type(self._config.advantage)](self._config.advantage, rewards, groups)

    def token_weights(self, num_tokens: Tensor) -> Tensor:
        """Loss tokens of all sequences of an optimizer update [B] -> weight of each of their tokens [B]."""
        return _AGGREGATIONS[self._config.aggregation](num_tokens)

    def loss(
        self,
        microbatch: Microbatch,
        learner_logprobs: Tensor,
        entropies: Tensor,
        *,
        proximal_logprobs: Tensor | None,
        reference_logprobs: Tensor | None,
        tally: Tally,
    ) -> Tensor:
        """This microbatch's part of the update's loss; what it saw goes into `tally`.

        Without `proximal_logprobs` the learner's own values, detached, stand for them.
        """
        proximal = learner_logprobs.detach() if proximal_logprobs is None else proximal_logprobs
        drift = importance.token_ratio(proximal, microbatch.generator_logprobs)
        weights = _CORRECTIONS[type(self._config.correction)](self._config.correction, drift)
        ratio = importance.token_ratio(learner_logprobs, proximal)
        token_losses = weights * self._policy_loss(learner_logprobs, ratio, microbatch.advantages)
        token_losses = token_losses - self._config.entropy_coefficient * entropies
        reference_k3 = _reference_k3(learner_logprobs, reference_logprobs)
        token_losses = token_losses + self._config.kl_coefficient * reference_k3
        loss = (microbatch.token_weights * token_losses).sum()
        self._note(tally, microbatch, proximal, drift, weights, ratio.detach(), entropies, reference_k3, loss)
        return loss

    def _policy_loss(self, learner_logprobs: Tensor, ratio: Tensor, advantage: Tensor) -> Tensor:
        if self._clip is None:
            return policy_losses.reinforce(learner_logprobs, advantage)
        return policy_losses.ppo_clip(ratio, advantage, **self._clip)

    @torch.no_grad()
    def _note(
        self,
        tally: Tally,
        microbatch: Microbatch,
        proximal: Tensor,
        drift: Tensor,
        weights: Tensor,
        ratio: Tensor,
        entropies: Tensor,
        reference_k3: Tensor,
        loss: Tensor,
    ) -> None:
        generator = microbatch.generator_logprobs
        clipped = policy_losses.is_clipped(ratio, microbatch.advantages, **self._clip) if self._clip else ratio * 0
        sums = {
            "tokens": ratio.numel(),
            "computed_tokens": microbatch.num_tokens,
            "loss": loss,
            "ratio": ratio.sum(),
            "clipped": clipped.sum(),
            "weight": weights.sum(),
            "weight_changed": (weights != drift).sum(),
            "k1": kl.k1(generator, proximal).sum(),
            "k3": kl.k3(generator, proximal).sum(),
            "raw_weight": drift.sum(),
            "raw_weight_squared": drift.square().sum(),
            "nonfinite": importance.nonfinite(proximal, generator).sum(),
            "entropy": entropies.sum(),
            "reference_k3": reference_k3.sum(),
        }
        tally.add(sums, {"ratio": ratio, "mismatch": importance.token_log_ratio(proximal, generator).abs()})


def _clip_bounds(config: PpoClipConfig | ReinforceConfig) -> dict[str, float] | None:
    if isinstance(config, ReinforceConfig):
        return None
    return {"clip_low": config.clip_low, "clip_high": config.clip_high}


def _reference_k3(learner_logprobs: Tensor, reference_logprobs: Tensor | None) -> Tensor:
    if reference_logprobs is None:
        return torch.zeros_like(learner_logprobs)
    return kl.k3(learner_logprobs, reference_logprobs)
