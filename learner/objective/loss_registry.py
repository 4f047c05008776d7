"""Surrogates: the table of policy losses, one entry per record of configs/policy_losses.py."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.configs.policy_losses import (
    AspoConfig,
    CispoConfig,
    ClipCovConfig,
    CustomPolicyLossConfig,
    DppoConfig,
    DroConfig,
    GmpoConfig,
    GspoConfig,
    KlCovConfig,
    PpoClipConfig,
    ReinforceConfig,
    SapoConfig,
    SppoConfig,
    ToprConfig,
    UnclippedConfig,
    VespoConfig,
)
from slipstream.learner.algorithms import policy_losses, segments, sequence_losses
from slipstream.learner.algorithms.policy_losses import idle_tokens
from slipstream.learner.errors import BatchError
from slipstream.runtime.import_path import load_function


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a surrogate may look at: the N tokens of whole trajectories of one microbatch."""

    learner_logprobs: Tensor
    """float32[N], without gradient."""
    advantages: Tensor
    """float32[N]."""
    sequences: Tensor
    """int64[N], which trajectory each token belongs to, from 0 on."""
    num_sequences: int
    """Trajectories."""
    is_selected: Tensor | None
    """bool[N], which tokens the loss has chosen among all of the update; None where it chooses none."""

    def take(self, is_taken: Tensor) -> "LossInputs":
        """Of the tokens where it is true."""
        is_selected = None if self.is_selected is None else self.is_selected[is_taken]
        return replace(
            self,
            learner_logprobs=self.learner_logprobs[is_taken],
            advantages=self.advantages[is_taken],
            sequences=self.sequences[is_taken],
            is_selected=is_selected,
        )


class PolicyLoss(NamedTuple):
    """What a surrogate says of each token."""

    losses: Tensor
    """float32[N], lower is better."""
    is_idle: Tensor
    """bool[N], whether the method itself took its gradient away."""


Surrogate = Callable[[Any, Tensor, LossInputs], Tensor]
"""(config, log(learner/proximal) with gradient, evidence) -> losses. The gradient of the log-ratio is that of
log pi_learner, so a loss needs no other variable."""


def _ppo_clip(config: PpoClipConfig, log_ratio: Tensor, seen: LossInputs) -> Tensor:
    return policy_losses.ppo_clip(
        log_ratio.exp(),
        seen.advantages,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )


def _reinforce(_: ReinforceConfig, log_ratio: Tensor, seen: LossInputs) -> Tensor:
    logprobs = seen.learner_logprobs + (log_ratio - log_ratio.detach())
    return policy_losses.reinforce(logprobs, seen.advantages)


def _unclipped(_: UnclippedConfig, log_ratio: Tensor, seen: LossInputs) -> Tensor:
    return policy_losses.unclipped(log_ratio, seen.advantages)


def _cispo(config: CispoConfig, log_ratio: Tensor, seen: LossInputs) -> Tensor:
    return policy_losses.cispo(log_ratio, seen.advantages, clip_low=config.clip_low, clip_high=config.clip_high)


def _sapo(config: SapoConfig, log_ratio: Tensor, seen: LossInputs) -> Tensor:
    return policy_losses.sapo(
        log_ratio, seen.advantages, tau_positive=config.tau_positive, tau_negative=config.tau_negative
    )


def _dro(config: DroConfig, log_ratio: Tensor, seen: LossInputs) -> Tensor:
    return policy_losses.dro(log_ratio, seen.advantages, beta=config.beta)


def _aspo(config: AspoConfig, log_ratio: Tensor, seen: LossInputs) -> Tensor:
    return policy_losses.aspo(
        log_ratio, seen.advantages, clip_low=config.clip_low, clip_high=config.clip_high, cap=config.cap
    )


def _dppo(config: DppoConfig, log_ratio: Tensor, seen: LossInputs) -> Tensor:
    loss = policy_losses.dppo_tv if config.divergence == "tv" else policy_losses.dppo_kl
    return loss(
        log_ratio,
        seen.advantages,
        seen.learner_logprobs,
        low=config.low,
        high=config.high,
        ratio_cap=config.ratio_cap,
    )


def _topr(config: ToprConfig, log_ratio: Tensor, seen: LossInputs) -> Tensor:
    if config.level == "token":
        return policy_losses.topr_token(log_ratio, seen.advantages)
    return _over_sequences(sequence_losses.topr, log_ratio, seen)


_GSPO_FORMS = {
    "sequence": sequence_losses.gspo,
    "token": sequence_losses.gspo_token,
    "length_scaled": sequence_losses.luspo,
}


def _gspo(config: GspoConfig, log_ratio: Tensor, seen: LossInputs) -> Tensor:
    loss = _GSPO_FORMS[config.form]
    return _over_sequences(loss, log_ratio, seen, clip_low=config.clip_low, clip_high=config.clip_high)


def _gmpo(config: GmpoConfig, log_ratio: Tensor, seen: LossInputs) -> Tensor:
    return _over_sequences(sequence_losses.gmpo, log_ratio, seen, clip_low=config.clip_low, clip_high=config.clip_high)


def _vespo(config: VespoConfig, log_ratio: Tensor, seen: LossInputs) -> Tensor:
    return _over_sequences(
        sequence_losses.vespo,
        log_ratio,
        seen,
        power_positive=config.power_positive,
        decay_positive=config.decay_positive,
        power_negative=config.power_negative,
        decay_negative=config.decay_negative,
    )


def _clip_cov(config: ClipCovConfig, log_ratio: Tensor, seen: LossInputs) -> Tensor:
    losses = policy_losses.ppo_clip(
        log_ratio.exp(), seen.advantages, clip_low=config.clip_low, clip_high=config.clip_high
    )
    return losses * _chosen(seen)


def _kl_cov(config: KlCovConfig, log_ratio: Tensor, seen: LossInputs) -> Tensor:
    return policy_losses.kl_cov(log_ratio, seen.advantages, _chosen(seen), coefficient=config.coefficient)


def _sppo(config: SppoConfig, log_ratio: Tensor, seen: LossInputs) -> Tensor:
    total = segments.sums(log_ratio, seen.sequences, num_segments=seen.num_sequences)
    win_rates = segments.means(seen.advantages, seen.sequences, num_segments=seen.num_sequences) + 0.5
    return sequence_losses.sppo(total, win_rates, eta=config.eta)[seen.sequences]


def own_function(config: CustomPolicyLossConfig) -> Callable[..., Any]:
    """The user's. Raises ConfigError."""
    return load_function(config.function, setting="algorithm.policy_loss", num_values=3, arguments=config.arguments)


def _custom(config: CustomPolicyLossConfig, log_ratio: Tensor, seen: LossInputs) -> Tensor:
    function = own_function(config)
    sequences = torch.unique(seen.sequences, return_inverse=True)[1]
    losses = function(log_ratio, seen.advantages, sequences, **config.arguments)
    if not isinstance(losses, Tensor) or losses.shape != log_ratio.shape:
        raise BatchError(
            f"algorithm.policy_loss.function={config.function} must return one loss per token ({len(log_ratio)}), got "
            f"{losses!r:.200}."
        )
    return losses


SURROGATES: dict[type, Surrogate] = {
    PpoClipConfig: _ppo_clip,
    ReinforceConfig: _reinforce,
    UnclippedConfig: _unclipped,
    CispoConfig: _cispo,
    SapoConfig: _sapo,
    DroConfig: _dro,
    AspoConfig: _aspo,
    DppoConfig: _dppo,
    ToprConfig: _topr,
    GspoConfig: _gspo,
    GmpoConfig: _gmpo,
    VespoConfig: _vespo,
    ClipCovConfig: _clip_cov,
    KlCovConfig: _kl_cov,
    SppoConfig: _sppo,
    CustomPolicyLossConfig: _custom,
}
"""Record -> function."""


def policy_loss(config: Any, log_ratio: Tensor, seen: LossInputs, *, is_counted: Tensor) -> PolicyLoss:
    """The configured surrogate over the tokens that count, bool[N].

    The others have no loss, and no share in the ratio of their sequence.
    """
    if not is_counted.any():
        return PolicyLoss(0 * log_ratio, torch.zeros_like(is_counted))
    surrogate, chosen = SURROGATES[type(config)], seen.take(is_counted)

    def losses(log_ratio: Tensor) -> Tensor:
        return surrogate(config, log_ratio, chosen)

    found = losses(log_ratio[is_counted])
    is_idle = torch.zeros_like(is_counted)
    is_idle[is_counted] = idle_tokens(losses, log_ratio[is_counted], chosen.advantages)
    return PolicyLoss(torch.zeros_like(log_ratio).masked_scatter(is_counted, found), is_idle)


def _over_sequences(loss: Callable[..., Tensor], log_ratio: Tensor, seen: LossInputs, **settings: float) -> Tensor:
    return loss(log_ratio, seen.advantages, seen.sequences, num_sequences=seen.num_sequences, **settings)


def _chosen(seen: LossInputs) -> Tensor:
    assert seen.is_selected is not None, "the loss chooses among all tokens of an update before it is formed"
    return seen.is_selected
