"""What is optimised: advantage x correction x policy loss x KL x aggregation, each a choice of its own."""

from typing import Annotated, Literal

from msgspec import Meta

from slipstream.configs.advantages import (
    OUTSIDE_GROUP,
    WITH_CRITIC,
    AdvantageConfig,
    GdpoConfig,
    GrpoConfig,
    OptimalTokenBaselineConfig,
    PassAtKConfig,
    ReinforcePlusPlusConfig,
    RemaxConfig,
    VtraceConfig,
    WinRateConfig,
)
from slipstream.configs.algorithm_terms import CriticConfig, DistillationConfig, KlConfig, RewardShapingConfig
from slipstream.configs.base import Config, ConfigError
from slipstream.configs.correction import CorrectionConfig
from slipstream.configs.policy_losses import (
    CHOOSING,
    WITHOUT_RATIO,
    GmpoConfig,
    GspoConfig,
    MaskConfig,
    PolicyLossConfig,
    PpoClipConfig,
    SppoConfig,
)

_COMPARES_RAW: dict[type, str] = {
    RemaxConfig: "rewards with that of a greedy answer as it came",
    GdpoConfig: "the parts of rewards as they came",
    PassAtKConfig: "right answers with wrong ones",
}
"""Advantages that are not made of shaped rewards."""


_MEANS_OF_SEQUENCES = ("seq_mean_token_mean", "prompt_mean")


class EssLearningRateConfig(Config):
    """The learning rate follows the effective sample size, `controllers.ess_learning_rate_scale` (VCPO)."""

    level: Literal["token", "sequence"] = "sequence"
    """Whose importance weights are counted, before any bound."""
    power: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """Scale = share ^ power."""
    floor: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """Smallest scale."""


class AlgorithmConfig(Config):
    """One objective."""

    reward: RewardShapingConfig = RewardShapingConfig()
    """Rewards -> the rewards that are compared."""
    advantage: AdvantageConfig = GrpoConfig()
    """Those -> advantages."""
    critic: CriticConfig = CriticConfig()
    """The value model, where advantages take values (gae, vtrace); else there is none."""
    policy_loss: PolicyLossConfig = PpoClipConfig()
    """Ratio learner/proximal and advantage -> loss per token."""
    masks: list[MaskConfig] = []
    """Tokens that leave because the learner has moved away from what wrote them."""
    correction: CorrectionConfig = CorrectionConfig()
    """Weight proximal/generator per token, without gradient."""
    proximal: Literal["recompute", "reuse", "generator", "interpolate"] = "recompute"
    """The policy the ratio is taken around: the learner at the start of the step, by a forward pass | by the update's
    own values (one update per step) | the generator itself, without correction weights ("bypass") | between generator
    and learner according to each token's lag (A-3PO)."""
    aggregation: Literal[
        "token_mean", "token_sum", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "prompt_mean"
    ] = "token_mean"
    """How token losses become one number; denominators are global over microbatches and ranks."""
    aggregation_length: Annotated[int, Meta(ge=1)] | None = None
    """The constant of `seq_mean_token_sum_norm`; None = generators.sampling.max_tokens."""
    distillation: DistillationConfig | None = None
    """A teacher beside or instead of rewards; None = none."""
    kl: KlConfig = KlConfig()
    """Divergence from a reference policy."""
    entropy_coefficient: Annotated[float, Meta(ge=0)] = 0.0
    """Weight of the entropy bonus."""
    positive_nll_coefficient: Annotated[float, Meta(ge=0)] = 0.0
    """Weight of the negative log-likelihood of entirely right answers (VAPO)."""
    ess_learning_rate: EssLearningRateConfig | None = None
    """None = the learning rate of the schedule."""
    updates_per_step: Annotated[int, Meta(ge=1)] = 1
    """Optimizer updates a claimed batch is split into."""

    def __post_init__(self) -> None:
        for check in _CHECKS:
            check(self)

    @property
    def has_ratio(self) -> bool:
        """Whether the policy loss depends on where the ratio is taken around."""
        return not isinstance(self.policy_loss, WITHOUT_RATIO)

    @property
    def has_critic(self) -> bool:
        """Whether advantages take values."""
        return isinstance(self.advantage, WITH_CRITIC)

    @property
    def signal_beside_rewards(self) -> str:
        """The setting with which a group of equal rewards teaches all the same; empty where it does not."""
        if isinstance(self.advantage, OUTSIDE_GROUP):
            return f"algorithm.advantage={self.advantage.__struct_config__.tag}"
        if isinstance(self.advantage, GdpoConfig) or self.reward.parts:
            return "parts of the reward that are weighed by themselves"
        return "algorithm.distillation" if self.distillation else ""

    @property
    def needs_collisions(self) -> bool:
        """Whether the chance of drawing the same token twice is wanted."""
        return isinstance(self.advantage, OptimalTokenBaselineConfig)

    @property
    def needs_current_logprobs(self) -> bool:
        """Whether tokens are chosen among all of an update by the learner's log-probabilities at its start."""
        return bool(self.masks) or isinstance(self.policy_loss, CHOOSING)

    @property
    def needs_start_logprobs(self) -> bool:
        """Whether the learner's log-probabilities at the start of the step take a forward pass of their own."""
        return (
            (self.proximal == "recompute" and (self.has_ratio or self.updates_per_step > 1))
            or (self.proximal == "generator" and self.correction.rejects)
            or self.correction.needs_whole_batch
            or (self.kl.charged_in == "reward" and self.kl.coefficient > 0)
            or isinstance(self.advantage, OptimalTokenBaselineConfig | VtraceConfig)
            or self.ess_learning_rate is not None
            or (self.distillation is not None and self.distillation.divergence == "k1")
        )


def _check_one_update(config: AlgorithmConfig) -> None:
    if config.proximal == "reuse" and config.has_ratio and config.updates_per_step > 1:
        raise ConfigError(
            f"algorithm.proximal=reuse needs algorithm.updates_per_step=1, got {config.updates_per_step}: "
            "after the first update the values at the start of the step are gone."
        )


def _check_not_counted_twice(config: AlgorithmConfig) -> None:
    if config.proximal == "generator" and config.correction.level != "none":
        reason = (
            "the ratio learner/generator already corrects for staleness, a weight would count it twice"
            if config.has_ratio
            else "between generator and generator there is nothing to weigh, and the loss has no ratio of its own"
        )
        raise ConfigError(
            f"algorithm.proximal=generator needs algorithm.correction.level=none, got {config.correction.level}: "
            f"{reason}; choose algorithm/correction=none, or proximal=recompute."
        )


def _check_whole_batch(config: AlgorithmConfig) -> None:
    if config.correction.needs_whole_batch and config.proximal in ("reuse", "interpolate"):
        raise ConfigError(
            "algorithm.correction.normalise, rebaseline and denominator=kept need weights of the whole batch before "
            f"the first gradient, got algorithm.proximal={config.proximal}: choose proximal=recompute."
        )


def _check_raw_rewards(config: AlgorithmConfig) -> None:
    """What is compared is not the shaped reward, so that shaping it would change nothing."""
    compared = _COMPARES_RAW.get(type(config.advantage))
    is_shaped = config.reward != RewardShapingConfig(truncated=config.reward.truncated)
    if compared and (is_shaped or config.kl.charged_in == "reward"):
        raise ConfigError(
            f"algorithm.advantage={type(config.advantage).__struct_config__.tag} compares {compared}, got rewards that "
            "are shaped (algorithm.reward, or algorithm.kl.charged_in=reward): leave them, or choose another advantage."
        )


def _check_teacher_alone(config: AlgorithmConfig) -> None:
    has_rewards = config.distillation is None or config.distillation.with_rewards
    if not has_rewards and config.kl.charged_in == "reward":
        raise ConfigError(
            "algorithm.distillation.with_rewards=false leaves rewards out, got algorithm.kl.charged_in=reward, which "
            "would go with them: choose charged_in=loss."
        )


def _check_interpolate(config: AlgorithmConfig) -> None:
    if config.proximal == "interpolate" and not config.has_ratio:
        raise ConfigError(
            "algorithm.proximal=interpolate shares the way from generator to learner between weight and ratio, got "
            f"algorithm.policy_loss={type(config.policy_loss).__struct_config__.tag}, which has no ratio: half of it "
            "would be lost; choose proximal=recompute or reuse."
        )


def _check_vtrace(config: AlgorithmConfig) -> None:
    if not isinstance(config.advantage, VtraceConfig):
        return
    if config.correction.level != "none" or (config.has_ratio and config.proximal in ("generator", "interpolate")):
        raise ConfigError(
            "algorithm.advantage=vtrace needs algorithm.correction.level=none and a ratio around the learner itself, "
            f"got level={config.correction.level}, proximal={config.proximal}: its advantages contain the ratio "
            "learner/generator already, and it would count twice; choose algorithm/correction=none, proximal=recompute."
        )


def _check_sequence_level(config: AlgorithmConfig) -> None:
    """A sequence's ratio has one gradient for all of its tokens."""
    loss = config.policy_loss
    is_per_token = isinstance(loss, GspoConfig) and loss.form == "token"
    if is_per_token or not isinstance(loss, GspoConfig | GmpoConfig | SppoConfig):
        return
    found = ""
    if isinstance(config.advantage, (*WITH_CRITIC, OptimalTokenBaselineConfig, ReinforcePlusPlusConfig)):
        found = f"algorithm.advantage={type(config.advantage).__struct_config__.tag}"
    elif config.distillation is not None and config.distillation.divergence == "k1":
        found = "algorithm.distillation.divergence=k1, whose advantages differ from token to token"
    if found:
        raise ConfigError(
            f"algorithm.policy_loss={type(loss).__struct_config__.tag} needs advantages that are equal within a "
            f"sequence, got {found}: choose policy_loss=gspo with form=token, or a loss per token."
        )


def _check_preference(config: AlgorithmConfig) -> None:
    if isinstance(config.policy_loss, SppoConfig) != isinstance(config.advantage, WinRateConfig):
        raise ConfigError(
            "algorithm.policy_loss=sppo goes with algorithm.advantage=win_rate and no other: what it compares the "
            "log-ratio with is the share of answers that are beaten."
        )


def _check_lengths_count_once(config: AlgorithmConfig) -> None:
    """A loss that is made of whole sequences, and says so at each of their tokens."""
    loss = config.policy_loss
    is_luspo = isinstance(loss, GspoConfig) and loss.form == "length_scaled"
    if (is_luspo or isinstance(loss, SppoConfig)) and config.aggregation not in _MEANS_OF_SEQUENCES:
        name = "gspo with form=length_scaled" if is_luspo else "sppo"
        raise ConfigError(
            f"algorithm.policy_loss={name} needs algorithm.aggregation={' or '.join(_MEANS_OF_SEQUENCES)}, got "
            f"{config.aggregation}: long answers would weigh by their length once more."
        )


def _check_token_baseline(config: AlgorithmConfig) -> None:
    if isinstance(config.advantage, OptimalTokenBaselineConfig) and config.reward.truncated == "mask":
        raise ConfigError(
            "algorithm.advantage=optimal_token_baseline needs algorithm.reward.truncated=train, got mask: its "
            "baselines are made of the tokens of the group, and those of a masked answer are not there."
        )


_CHECKS = (
    _check_one_update,
    _check_not_counted_twice,
    _check_whole_batch,
    _check_raw_rewards,
    _check_teacher_alone,
    _check_interpolate,
    _check_vtrace,
    _check_sequence_level,
    _check_preference,
    _check_lengths_count_once,
    _check_token_baseline,
)
