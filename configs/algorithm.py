"""The objective: advantage, correction, policy loss, KL, and aggregation, chosen independently."""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, structs

from slipstream.configs.advantages import (
    AdvantageConfig,
    GdpoConfig,
    GrpoConfig,
    OptimalTokenBaselineConfig,
    PrimeConfig,
    VtraceConfig,
    WinRateConfig,
)
from slipstream.configs.base import Config, ConfigError, Positive, Share
from slipstream.configs.learner import OptimizerConfig
from slipstream.configs.policy_losses import MaskConfig, PolicyLossConfig, PpoClipConfig, SppoConfig


class CriticOptimizerConfig(OptimizerConfig):
    """Optimizer of the critic and its learning rate schedule."""

    learning_rate: Positive = 1e-5
    """Peak of the learning rate schedule."""


class CriticConfig(Config):
    """Value model for advantages that need one (`gae`, `vtrace`): a separate trunk with one output per token."""

    key: ClassVar[str] = "critic"

    path: str | None = None
    """Initial checkpoint: a policy, or the `critic/model` folder of a checkpoint; null = `model.path`."""
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    value_clip: Positive | None = 0.5
    """Largest change of a value in one step, in reward units; null = unbounded."""
    warmup_steps: Annotated[int, Meta(ge=0)] = 0
    """Initial steps that train only the critic."""


class ProcessRewardOptimizerConfig(OptimizerConfig):
    """Optimizer of the process reward model and its learning rate schedule."""

    learning_rate: Positive = 1e-6
    """Peak of the learning rate schedule."""


class ProcessRewardConfig(Config):
    """Implicit process reward model for `advantage=prime`: a language model that learns in each step, before the
    policy, which answers are correct, and rewards tokens by its log-ratio to `model.path`."""

    key: ClassVar[str] = "process_reward"

    path: str | None = None
    """Initial checkpoint, a policy; null = `model.path`."""
    optimizer: ProcessRewardOptimizerConfig = ProcessRewardOptimizerConfig()
    beta: Positive = 0.05
    """Reward per nat of the log-ratio."""


class DistillationConfig(Config):
    """On-policy distillation from a teacher with the learner's vocabulary, `learner.algorithms.distillation`."""

    teacher_path: str
    """Folder or hub name of the teacher, in transformers format."""
    divergence: Literal["k1", "k3", "forward_kl_topk", "jsd_topk"] = "k1"
    """`k1`: reverse KL as an advantage per token. `k3`: k3 of the sampled token as a loss. `forward_kl_topk`,
    `jsd_topk`: forward KL or Jensen-Shannon divergence over the teacher's most likely tokens."""
    coef: Positive = 1.0
    """Weight relative to the task loss."""
    with_rewards: bool = True
    """Whether rewards count as well; false = only the teacher."""
    bound: Positive = 10.0
    """Largest advantage or loss of a token, nats; for `k1` and `k3`."""
    top_k: Annotated[int, Meta(ge=1)] = 32
    """Number of the teacher's most likely tokens; for `forward_kl_topk` and `jsd_topk`."""
    beta: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """Weight of the teacher in the mixture; for `jsd_topk`."""
    renormalize: bool = False
    """Whether to renormalize over the most likely tokens; false = all other tokens form one additional outcome."""

    @property
    def takes_candidates(self) -> bool:
        """Whether it compares the teacher's most likely tokens instead of the sampled one."""
        return self.divergence in ("forward_kl_topk", "jsd_topk")


class AdaptiveKlConfig(Config):
    """KL coefficient that steers the measured KL toward a target, `kl.adaptive_coefficient`."""

    target: Positive
    """Target KL, mean over the tokens of a step, nats."""
    horizon: Annotated[int, Meta(ge=1)] = 10_000
    """Trajectories over which the coefficient adapts; larger = slower."""


class KlConfig(Config):
    """KL penalty toward a reference policy. No reference is kept while `coef` is 0."""

    coef: Annotated[float, Meta(ge=0)] = 0.0
    """Penalty per nat and token; the initial value of an adaptive coefficient."""
    estimator: Literal["k1", "abs", "k2", "k3", "k1_st", "abs_st", "k3_st", "k3_off_policy", "full"] = "k3"
    """KL estimator, `learner.algorithms.kl`. `k1`, `abs`, `k2`, `k3`: of the sampled token. With `_st`
    (straight-through): value of that estimator, gradient of k2. `k3_off_policy`: k3 times the ratio learner/generator.
    `full`: over the whole vocabulary. Only `k2`, the `_st` forms, `k3_off_policy`, and `full` have the gradient of
    the KL."""
    apply_to: Literal["loss", "reward"] = "loss"
    """`loss`: a term of the loss. `reward`: subtracted from the reward of each token."""
    adaptive: AdaptiveKlConfig | None = None
    """Adaptive coefficient; null = constant."""
    refresh_every_steps: Annotated[int, Meta(ge=1)] | None = None
    """Steps after which the learner's current policy becomes the reference; null = the initial policy stays."""

    def __post_init__(self) -> None:
        if self.apply_to == "reward" and self.estimator not in ("k1", "abs", "k2", "k3"):
            raise ConfigError(
                f"algorithm.kl.apply_to=reward takes estimator k1, abs, k2 or k3, got {self.estimator}: a reward "
                "has no gradient, and is measured at the start of the step."
            )
        if self.coef == 0 and (self.adaptive or self.refresh_every_steps):
            raise ConfigError(
                "algorithm.kl.coef must be > 0 for adaptive and refresh_every_steps, got 0: nothing is charged."
            )


class RewardShapingConfig(Config):
    """Reward shaping before advantages, in the order of the fields."""

    parts: dict[str, float] = {}
    """Reward part -> weight in a sum that replaces the total; empty = the total."""
    overlong_buffer: Positive | None = None
    """Soft overlong penalty of DAPO: over the last N tokens of the longest response, the reward falls linearly by up to
    1; below 1, a fraction of `generators.sampling.max_tokens`. null = off."""
    normalize: Literal["none", "batch", "group"] = "none"
    """Normalize to mean 0 and standard deviation 1: over the `batch`, or within each `group`."""
    epsilon: Positive = 1e-6
    """Added to that standard deviation."""
    mask_truncated: bool = False
    """Whether to exclude responses that were cut off at the maximum length from the loss; they stay in the baseline of
    their group."""


# --- correction for an older or numerically different generator -------------------------------------------------------
def check_order(what: str, low: float | None, high: float | None) -> None:
    """Raise ConfigError if the lower bound exceeds the upper one."""
    if low is not None and high is not None and low > high:
        raise ConfigError(f"{what} must be in order, got {low:g} > {high:g}.")


class RejectionConfig(Config):
    """Rejection of tokens or trajectories from the loss, `learner.algorithms.rejection`."""

    statistic: Literal["k1", "k2", "k3"] = "k1"
    """Statistic of log(learner/generator) of a token. `k1`: the log-ratio. `k2`: half its square. `k3`: ratio - 1 -
    log-ratio."""
    over: Literal["token", "sum", "mean", "max"] = "mean"
    """`token`: judge each token. `sum`, `mean`, `max`: judge each trajectory by this statistic of its tokens (the mean
    of k1 is the geometric mean ratio)."""
    low: Positive | None = None
    """Smallest accepted ratio learner/generator, only for `k1`; null = unbounded."""
    high: Positive | None = None
    """Largest accepted ratio learner/generator for `k1`; largest value of the statistic for `k2` and `k3`; null =
    unbounded."""

    def __post_init__(self) -> None:
        if self.low is None and self.high is None:
            raise ConfigError("algorithm.correction.reject: an entry must have low or high, got neither.")
        check_order("algorithm.correction.reject: low, high", self.low, self.high)
        if self.low is not None and self.statistic != "k1":
            raise ConfigError(
                f"algorithm.correction.reject: low goes with statistic=k1, got it with {self.statistic}, which is "
                "never negative and has an upper bound only."
            )
        if self.statistic == "k1" and self.over == "max":
            raise ConfigError("algorithm.correction.reject: over=max needs statistic=k2 or k3, got k1: see `veto`.")


class CorrectionConfig(Config):
    """Correction for a generator that is older or numerically different: weights and masks per token from the ratio
    proximal/generator, without gradient, and an optional penalty toward the generator."""

    level: Literal["none", "token", "sequence", "geometric"] = "token"
    """Weight of a token. `none`: 1. `token`: its own ratio. `sequence`: the product of the ratios of its trajectory.
    `geometric`: their geometric mean."""
    outside: Literal["truncate", "mask"] = "truncate"
    """Weights outside `min_weight` and `max_weight`: `truncate` to the bound, or `mask` to zero."""
    min_weight: Positive | None = None
    """Smallest weight; null = unbounded."""
    max_weight: Positive | None = 2.0
    """Largest weight; null = unbounded."""
    normalize: bool = False
    """Divide bounded weights by their batch mean: over tokens for `level=token`, otherwise over trajectories."""
    reject: list[RejectionConfig] = []
    """Rejections; a token stays in the loss only if every entry accepts it."""
    veto: tuple[Positive, Positive] | None = None
    """Bounds of token ratios: a trajectory with any token outside leaves the loss; null = off."""
    exclude_rejected_from_baseline: bool = False
    """Whether a completely rejected trajectory also leaves its group's baseline."""
    loss_denominator: Literal["all_tokens", "kept_tokens"] = "all_tokens"
    """Tokens that count in the denominator of the loss: all trainable tokens, or those not rejected."""
    log_ratio_penalty: Annotated[float, Meta(ge=0)] = 0.0
    """Weight of log(learner/generator)^2 in the loss of every token that is not rejected: a pull toward the sampling
    policy, even where a clip, a mask, or equal rewards leave no gradient."""

    def __post_init__(self) -> None:
        bounds = self.min_weight is not None or self.max_weight is not None or self.outside == "mask"
        if self.level == "none" and (bounds or self.normalize):
            raise ConfigError(
                "algorithm.correction: min_weight, max_weight, outside=mask and normalize need a level, got none: "
                "there are no weights; choose algorithm/correction=token_tis, or level=token, sequence or geometric."
            )
        check_order("algorithm.correction: min_weight, max_weight", self.min_weight, self.max_weight)
        check_order("algorithm.correction: veto", *(self.veto or (None, None)))

    @property
    def rejects(self) -> bool:
        """Whether tokens or trajectories can leave the loss."""
        return bool(self.reject) or self.veto is not None

    @property
    def needs_whole_batch(self) -> bool:
        """Whether the weights of a microbatch depend on the rest of the batch."""
        return self.normalize or (
            self.rejects and (self.exclude_rejected_from_baseline or self.loss_denominator == "kept_tokens")
        )


_MEANS_OF_SEQUENCES = ("seq_mean_token_mean", "prompt_mean")


class EssLearningRateConfig(Config):
    """Learning rate that follows the effective sample size (VCPO), `importance.ess_learning_rate_scale`."""

    level: Literal["token", "sequence"] = "sequence"
    """Importance weights, before any bound: one per `token`, or per `sequence`."""
    power: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """Exponent: scale = effective fraction ^ power."""
    floor: Share = 0.1
    """Smallest scale of the learning rate."""


class AlgorithmConfig(Config):
    """Objective: shaping of rewards, advantages, policy loss, corrections, masks, and penalties."""

    reward: RewardShapingConfig = RewardShapingConfig()
    advantage: AdvantageConfig = GrpoConfig()
    """Advantage per trajectory or token, from shaped rewards."""
    critic: CriticConfig = CriticConfig()
    process_reward: ProcessRewardConfig = ProcessRewardConfig()
    policy_loss: PolicyLossConfig = PpoClipConfig()
    """Policy loss per token, from the ratio learner/proximal and the advantage."""
    masks: list[MaskConfig] = []
    """Masks of tokens that leave the policy loss because the learner has moved too far from the sampling policy."""
    correction: CorrectionConfig = CorrectionConfig()
    proximal: Literal["auto", "recompute", "reuse", "generator", "interpolate"] = "auto"
    """Proximal policy of the ratio. `recompute`: the learner at the start of the step, from a separate forward pass.
    `reuse`: the same, from the update's own forward pass (needs one update per step). `auto`: `reuse` if it gives the
    same result and no other setting needs the pass, otherwise `recompute`; recorded in `config.yaml`. `generator`: the
    generator, without correction weights (bypass). `interpolate`: between generator and learner according to the lag of
    each token (A-3PO)."""
    loss_aggregation: Literal[
        "token_mean", "token_sum", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "prompt_mean"
    ] = "token_mean"
    """Reduction of token losses to one number. Denominators are global over microbatches and ranks."""
    loss_aggregation_length: Annotated[int, Meta(ge=1)] | None = None
    """Constant of `seq_mean_token_sum_norm`, tokens; null = `generators.sampling.max_tokens`."""
    distillation: DistillationConfig | None = None
    """On-policy distillation, in addition to or instead of rewards; null = off."""
    kl: KlConfig = KlConfig()
    entropy_coef: Annotated[float, Meta(ge=0)] = 0.0
    """Weight of the entropy bonus."""
    positive_nll_coef: Annotated[float, Meta(ge=0)] = 0.0
    """Weight of the negative log-likelihood of correct answers (VAPO)."""
    ess_learning_rate: EssLearningRateConfig | None = None
    """Learning rate that follows the effective sample size; null = off."""
    updates_per_step: Annotated[int, Meta(ge=1)] = 1
    """Optimizer updates per claimed batch."""

    def __post_init__(self) -> None:
        if self.proximal == "auto":
            # Allowed here: the record is not shared yet. config.yaml thus records the resolved value.
            # `reuse` takes the same step and saves the pass, unless the correction's drops must be known before the
            # gradient: masks select among the remaining tokens, and an update with no token left must not change the
            # weights.
            drops = self.correction.rejects or (self.correction.outside == "mask" and self.needs_current_logprobs)
            can_reuse = self.updates_per_step == 1 and not drops and not self._takes_start_logprobs
            structs.force_setattr(self, "proximal", "reuse" if can_reuse else "recompute")
        _check_proximal(self)
        _check_advantage(self)
        _check_policy_loss(self)

    @property
    def second_model(self) -> CriticConfig | ProcessRewardConfig | None:
        """Model that is trained beside the policy."""
        if self.advantage.needs_critic:
            return self.critic
        return self.process_reward if self.advantage.needs_process_rewards else None

    @property
    def needs_reference(self) -> bool:
        """Whether the policy, or a second model, is compared with a reference policy."""
        return self.kl.coef > 0 or self.advantage.needs_process_rewards

    @property
    def signal_beside_rewards(self) -> str:
        """Setting that gives groups with equal rewards a gradient; empty = none."""
        if self.advantage.compares_groups or self.advantage.needs_process_rewards:
            return f"algorithm.advantage={self.advantage.kind}"
        if isinstance(self.advantage, GdpoConfig) or self.reward.parts:
            return "parts of the reward that are weighted separately"
        return "algorithm.distillation" if self.distillation else ""

    @property
    def needs_current_logprobs(self) -> bool:
        """Whether tokens are selected over a whole update, by learner log-probabilities at its start."""
        return any(not mask.is_local for mask in self.masks) or bool(self.policy_loss.selector)

    @property
    def needs_start_logprobs(self) -> bool:
        """Whether the step starts with a separate forward pass for learner log-probabilities."""
        return (
            (self.proximal == "recompute" and (self.policy_loss.has_ratio or self.updates_per_step > 1))
            or (self.proximal == "generator" and self.correction.rejects)
            or self._takes_start_logprobs
        )

    @property
    def _takes_start_logprobs(self) -> bool:
        """Whether anything but the ratio needs that pass."""
        return (
            self.correction.needs_whole_batch
            or (self.kl.apply_to == "reward" and self.kl.coef > 0)
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
            "algorithm.correction.normalize, exclude_rejected_from_baseline and loss_denominator=kept_tokens need the "
            f"weights of the whole batch before the first gradient, got algorithm.proximal={config.proximal}: choose "
            "proximal=auto."
        )
    if config.proximal == "interpolate" and not config.policy_loss.has_ratio:
        raise ConfigError(
            "algorithm.proximal=interpolate splits the log-ratio learner/generator between weight and ratio, got "
            f"algorithm.policy_loss={config.policy_loss.kind}, which has no ratio: a part of it would be lost; choose "
            "proximal=auto."
        )


def _check_advantage(config: AlgorithmConfig) -> None:
    is_shaped = config.reward != RewardShapingConfig(mask_truncated=config.reward.mask_truncated)
    if config.advantage.unshaped and (is_shaped or config.kl.apply_to == "reward"):
        raise ConfigError(
            f"algorithm.advantage={config.advantage.kind} compares {config.advantage.unshaped}, got rewards that are "
            "shaped (algorithm.reward, or algorithm.kl.apply_to=reward): leave them, or choose another advantage."
        )
    has_rewards = config.distillation is None or config.distillation.with_rewards
    if not has_rewards and config.kl.apply_to == "reward":
        raise ConfigError(
            "algorithm.distillation.with_rewards=false leaves rewards out, got algorithm.kl.apply_to=reward, which "
            "would be left out with them: choose apply_to=loss."
        )
    is_around_another = config.policy_loss.has_ratio and config.proximal in ("generator", "interpolate")
    if isinstance(config.advantage, VtraceConfig) and (config.correction.level != "none" or is_around_another):
        raise ConfigError(
            "algorithm.advantage=vtrace needs algorithm.correction.level=none and a ratio around the learner itself, "
            f"got level={config.correction.level}, proximal={config.proximal}: its advantages contain the ratio "
            "learner/generator already, and it would count twice; choose algorithm/correction=none, proximal=auto."
        )
    if isinstance(config.advantage, OptimalTokenBaselineConfig | PrimeConfig) and config.reward.mask_truncated:
        raise ConfigError(
            f"algorithm.advantage={config.advantage.kind} needs algorithm.reward.mask_truncated=false, got true: its "
            "baselines are made of the tokens of the group, and those of a masked answer are missing."
        )
    if config.advantage.needs_process_rewards and config.kl.refresh_every_steps:
        raise ConfigError(
            f"algorithm.advantage={config.advantage.kind} needs algorithm.kl.refresh_every_steps=null, got "
            f"{config.kl.refresh_every_steps}: process rewards are relative to a reference that never changes."
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
    if config.policy_loss.counts_length and config.loss_aggregation not in _MEANS_OF_SEQUENCES:
        raise ConfigError(
            f"algorithm.policy_loss={config.policy_loss.kind} with these settings needs algorithm.loss_aggregation="
            f"{' or '.join(_MEANS_OF_SEQUENCES)}, got {config.loss_aggregation}: the length of an answer would count "
            "twice."
        )
