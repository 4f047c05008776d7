"""The objective: advantage x correction x policy loss x KL x aggregation, each a choice of its own."""

from typing import Annotated, Literal

from msgspec import Meta, structs

from slipstream.configs.advantages import (
    AdvantageConfig,
    GdpoConfig,
    GrpoConfig,
    OptimalTokenBaselineConfig,
    VtraceConfig,
    WinRateConfig,
)
from slipstream.configs.algorithm_terms import (
    CorrectionConfig,
    CriticConfig,
    DistillationConfig,
    KlConfig,
    RewardShapingConfig,
)
from slipstream.configs.base import Config, ConfigError
from slipstream.configs.policy_losses import MaskConfig, PolicyLossConfig, PpoClipConfig, SppoConfig

_MEANS_OF_SEQUENCES = ("seq_mean_token_mean", "prompt_mean")


class EssLearningRateConfig(Config):
    """A learning rate that follows the effective sample size (VCPO), `importance.ess_learning_rate_scale`."""

    level: Literal["token", "sequence"] = "sequence"
    """Importance weights that are counted, before any bound. `token`: one per token. `sequence`: one per trajectory."""
    power: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """Exponent: scale = effective share ^ power."""
    floor: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """Smallest scale of the learning rate."""


class AlgorithmConfig(Config):
    """The objective, composed of independent choices."""

    reward: RewardShapingConfig = RewardShapingConfig()
    advantage: AdvantageConfig = GrpoConfig()
    """Advantage function: shaped rewards to one advantage per trajectory or token."""
    critic: CriticConfig = CriticConfig()
    policy_loss: PolicyLossConfig = PpoClipConfig()
    """Policy loss function: the ratio learner/proximal and the advantage to one loss per token."""
    masks: list[MaskConfig] = []
    """Masks of tokens that leave the policy loss because the learner has moved away from the policy that sampled them.
    """
    correction: CorrectionConfig = CorrectionConfig()
    proximal: Literal["auto", "recompute", "reuse", "generator", "interpolate"] = "auto"
    """Policy that the ratio is taken around. `recompute`: the learner at the start of the step, by a forward pass.
    `reuse`: the same, by the update's own values (one update per step). `auto`: `reuse` where that gives the same step
    and no other setting takes the pass, else `recompute`; `config.yaml` holds which. `generator`: the generator,
    without correction weights (bypass). `interpolate`: between generator and learner by each token's lag (A-3PO)."""
    aggregation: Literal[
        "token_mean", "token_sum", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "prompt_mean"
    ] = "token_mean"
    """Reduction of token losses to one number; denominators are global over microbatches and ranks."""
    aggregation_length: Annotated[int, Meta(ge=1)] | None = None
    """Constant of `seq_mean_token_sum_norm`, tokens; null = `generators.sampling.max_tokens`."""
    distillation: DistillationConfig | None = None
    """On-policy distillation from a teacher, beside or instead of rewards; null = off."""
    kl: KlConfig = KlConfig()
    entropy_coefficient: Annotated[float, Meta(ge=0)] = 0.0
    """Weight of the entropy bonus."""
    positive_nll_coefficient: Annotated[float, Meta(ge=0)] = 0.0
    """Weight of the negative log-likelihood of entirely right answers (VAPO)."""
    ess_learning_rate: EssLearningRateConfig | None = None
    """Learning rate that follows the effective sample size; null = off."""
    updates_per_step: Annotated[int, Meta(ge=1)] = 1
    """Optimizer updates into which a claimed batch is split."""

    def __post_init__(self) -> None:
        if self.proximal == "auto":
            # The record is complete only now, and nobody else has seen it: a run's config.yaml holds what is used.
            structs.force_setattr(self, "proximal", "reuse" if self._can_reuse else "recompute")
        _check_proximal(self)
        _check_advantage(self)
        _check_policy_loss(self)

    @property
    def signal_beside_rewards(self) -> str:
        """The setting by which a group of equal rewards still has a gradient; empty where there is none."""
        if self.advantage.compares_groups:
            return f"algorithm.advantage={self.advantage.kind}"
        if isinstance(self.advantage, GdpoConfig) or self.reward.parts:
            return "parts of the reward that are weighted separately"
        return "algorithm.distillation" if self.distillation else ""

    @property
    def needs_current_logprobs(self) -> bool:
        """Whether tokens are selected among all of an update by the learner's log-probabilities at its start."""
        return any(not mask.is_local for mask in self.masks) or bool(self.policy_loss.selector)

    @property
    def needs_start_logprobs(self) -> bool:
        """Whether the learner's log-probabilities at the start of the step take a forward pass of their own."""
        return (
            (self.proximal == "recompute" and (self.policy_loss.has_ratio or self.updates_per_step > 1))
            or (self.proximal == "generator" and self.correction.rejects)
            or self._takes_start_logprobs
        )

    @property
    def _can_reuse(self) -> bool:
        """Whether the ratio around the update's own values gives the same step as around recomputed ones, and saves the
        pass."""
        correction = self.correction
        # What the correction drops must be known before the gradient: masks choose among the rest, and an update of
        # which nothing is left must not move.
        drops = correction.rejects or (correction.bound == "mask" and self.needs_current_logprobs)
        return self.updates_per_step == 1 and not drops and not self._takes_start_logprobs

    @property
    def _takes_start_logprobs(self) -> bool:
        """Whether something beside the ratio takes that forward pass."""
        return (
            self.correction.needs_whole_batch
            or (self.kl.charged_in == "reward" and self.kl.coefficient > 0)
            or self.advantage.needs_start_logprobs
            or self.ess_learning_rate is not None
            or (self.distillation is not None and self.distillation.divergence == "k1")
        )


def _check_proximal(config: AlgorithmConfig) -> None:
    if config.proximal == "reuse" and config.policy_loss.has_ratio and config.updates_per_step > 1:
        raise ConfigError(
            f"algorithm.proximal=reuse needs algorithm.updates_per_step=1, got {config.updates_per_step}: "
            "after the first update the values at the start of the step are gone; choose proximal=auto."
        )
    if config.proximal == "generator" and config.correction.level != "none":
        reason = (
            "the ratio learner/generator already corrects for staleness, a weight would count it twice"
            if config.policy_loss.has_ratio
            else "the weight generator/generator is 1 everywhere, and the loss has no ratio of its own"
        )
        raise ConfigError(
            f"algorithm.proximal=generator needs algorithm.correction.level=none, got {config.correction.level}: "
            f"{reason}; choose algorithm/correction=none, or proximal=auto."
        )
    if config.correction.needs_whole_batch and config.proximal in ("reuse", "interpolate"):
        raise ConfigError(
            "algorithm.correction.normalise, rebaseline and denominator=kept need weights of the whole batch before "
            f"the first gradient, got algorithm.proximal={config.proximal}: choose proximal=auto."
        )
    if config.proximal == "interpolate" and not config.policy_loss.has_ratio:
        raise ConfigError(
            "algorithm.proximal=interpolate splits the log-ratio learner/generator between weight and ratio, got "
            f"algorithm.policy_loss={config.policy_loss.kind}, which has no ratio: a part of it would be lost; choose "
            "proximal=auto."
        )


def _check_advantage(config: AlgorithmConfig) -> None:
    is_shaped = config.reward != RewardShapingConfig(truncated=config.reward.truncated)
    if config.advantage.unshaped and (is_shaped or config.kl.charged_in == "reward"):
        raise ConfigError(
            f"algorithm.advantage={config.advantage.kind} compares {config.advantage.unshaped}, got rewards that are "
            "shaped (algorithm.reward, or algorithm.kl.charged_in=reward): leave them, or choose another advantage."
        )
    has_rewards = config.distillation is None or config.distillation.with_rewards
    if not has_rewards and config.kl.charged_in == "reward":
        raise ConfigError(
            "algorithm.distillation.with_rewards=false leaves rewards out, got algorithm.kl.charged_in=reward, which "
            "would be left out with them: choose charged_in=loss."
        )
    is_around_another = config.policy_loss.has_ratio and config.proximal in ("generator", "interpolate")
    if isinstance(config.advantage, VtraceConfig) and (config.correction.level != "none" or is_around_another):
        raise ConfigError(
            "algorithm.advantage=vtrace needs algorithm.correction.level=none and a ratio around the learner itself, "
            f"got level={config.correction.level}, proximal={config.proximal}: its advantages contain the ratio "
            "learner/generator already, and it would count twice; choose algorithm/correction=none, proximal=auto."
        )
    if isinstance(config.advantage, OptimalTokenBaselineConfig) and config.reward.truncated == "mask":
        raise ConfigError(
            "algorithm.advantage=optimal_token_baseline needs algorithm.reward.truncated=train, got mask: its "
            "baselines are made of the tokens of the group, and those of a masked answer are missing."
        )


def _check_policy_loss(config: AlgorithmConfig) -> None:
    found = ""
    if config.advantage.is_per_token:
        found = f"algorithm.advantage={config.advantage.kind}"
    elif config.distillation is not None and config.distillation.divergence == "k1":
        found = "algorithm.distillation.divergence=k1, whose advantages differ from token to token"
    if config.policy_loss.needs_equal_advantages and found:
        raise ConfigError(
            f"algorithm.policy_loss={config.policy_loss.kind} needs advantages that are equal within a sequence, got "
            f"{found}: choose policy_loss=gspo with form=token, or a loss per token."
        )
    if isinstance(config.policy_loss, SppoConfig) != isinstance(config.advantage, WinRateConfig):
        raise ConfigError(
            "algorithm.policy_loss=sppo needs algorithm.advantage=win_rate and no other loss takes it, got "
            f"policy_loss={config.policy_loss.kind} with advantage={config.advantage.kind}: sppo compares log-ratios "
            "with the share of answers that are beaten."
        )
    if config.policy_loss.counts_length and config.aggregation not in _MEANS_OF_SEQUENCES:
        raise ConfigError(
            f"algorithm.policy_loss={config.policy_loss.kind} with these settings needs algorithm.aggregation="
            f"{' or '.join(_MEANS_OF_SEQUENCES)}, got {config.aggregation}: the length of an answer would count twice."
        )
