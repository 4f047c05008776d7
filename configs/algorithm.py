"""The objective: independent choices of advantage, correction, policy loss, KL, and aggregation."""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, structs

from slipstream.configs.algorithm_terms import (
    AdvantageConfig,
    GdpoConfig,
    GrpoConfig,
    MaskConfig,
    OptimalTokenBaselineConfig,
    PolicyLossConfig,
    PpoClipConfig,
    PrimeConfig,
    SppoConfig,
    VtraceConfig,
    WinRateConfig,
)
from slipstream.configs.base import Config, Positive, require
from slipstream.configs.learner import OptimizerConfig


class CriticOptimizerConfig(OptimizerConfig):
    """Optimizer of the critic and its learning rate schedule."""

    learning_rate: Positive = 1e-5
    """Peak of the learning rate schedule."""


class CriticConfig(Config):
    """Value model for `gae` and `vtrace`: a separate trunk with one output per token."""

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
    """Implicit process reward model for `advantage=prime`: a language model that learns before the policy which answers
    are correct, and rewards tokens by its log-ratio to `model.path`."""

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
    top_k: Annotated[int, Meta(ge=1)] = 32
    """Number of the teacher's most likely tokens; for `forward_kl_topk` and `jsd_topk`."""
    beta: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """Weight of the teacher in the mixture; for `jsd_topk`."""
    renormalize: bool = False
    """Renormalize over the most likely tokens; false = all others form one more outcome."""

    @property
    def takes_candidates(self) -> bool:
        """Whether it compares the teacher's most likely tokens."""
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
        is_fit = self.apply_to == "loss" or self.estimator in ("k1", "abs", "k2", "k3")
        must = "be k1, abs, k2 or k3 with apply_to=reward"
        why = "a reward has no gradient, and is measured at the start of the step"
        require(is_fit, "algorithm.kl.estimator", must, got=self.estimator, why=why)
        is_fit = self.coef > 0 or not (self.adaptive or self.refresh_every_steps)
        must = "be > 0 for adaptive and refresh_every_steps"
        require(is_fit, "algorithm.kl.coef", must, got=self.coef, why="nothing is charged")


class RewardShapingConfig(Config):
    """Reward shaping before advantages, in the order of the fields."""

    parts: dict[str, float] = {}
    """Reward part -> weight in a sum that replaces the total; empty = the total."""
    overlong_buffer: Positive | None = None
    """Soft overlong penalty of DAPO: over the last N tokens of the longest response, the reward falls linearly by up to
    1; below 1, a fraction of `generators.sampling.max_tokens`. null = off."""
    normalize: Literal["none", "batch", "group"] = "none"
    """Normalize to mean 0 and standard deviation 1: over the `batch`, or within each `group`."""
    mask_truncated: bool = False
    """Exclude responses cut off at the maximum length from the loss; they stay in their group's baseline."""


# --- correction for an older or numerically different generator -------------------------------------------------------
def check_order(what: str, low: float | None, high: float | None) -> None:
    """Raise ConfigError if the lower bound exceeds the upper one."""
    is_fit = low is None or high is None or low <= high
    require(is_fit, what, "be in order", got=f"{low} and {high}", why="no ratio lies between them")


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
        key, statistic = "an entry of algorithm.correction.reject", self.statistic
        is_bound = self.low is not None or self.high is not None
        require(is_bound, key, "have low or high", got="neither", why="it would reject nothing")
        check_order("algorithm.correction.reject: low, high", self.low, self.high)
        is_fit, why = self.low is None or statistic == "k1", "others are never negative and have an upper bound only"
        require(is_fit, key, "have statistic=k1 with low", got=statistic, why=why)
        is_fit, must = statistic != "k1" or self.over != "max", "have statistic=k2 or k3 with over=max"
        require(is_fit, key, must, got="k1", why="`veto` judges the ratios of a trajectory")


class CorrectionConfig(Config):
    """Correction for an older or numerically different generator: weights and masks per token from the ratio
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
    loss_denominator: Literal["all_tokens", "kept_tokens"] = "all_tokens"
    """Tokens that the mean of the loss divides by. `all_tokens`: rejected ones count too. `kept_tokens`: they don't."""
    log_ratio_penalty: Annotated[float, Meta(ge=0)] = 0.0
    """Weight of log(learner/generator)^2 in the loss of every token that is not rejected: a pull toward the sampling
    policy, even where a clip, a mask, or equal rewards leave no gradient."""

    def __post_init__(self) -> None:
        bounds = self.min_weight is not None or self.max_weight is not None or self.outside == "mask"
        must = "not be none with min_weight, max_weight, outside=mask or normalize"
        why = "without weights they do nothing; choose algorithm/correction=token_tis, or token, sequence or geometric"
        is_fit = self.level != "none" or not (bounds or self.normalize)
        require(is_fit, "algorithm.correction.level", must, got=self.level, why=why)
        check_order("algorithm.correction: min_weight, max_weight", self.min_weight, self.max_weight)
        check_order("algorithm.correction: veto", *(self.veto or (None, None)))

    @property
    def rejects(self) -> bool:
        """Whether tokens or trajectories can leave the loss."""
        return bool(self.reject) or self.veto is not None

    @property
    def needs_whole_batch(self) -> bool:
        """Whether the weights of a microbatch depend on the rest of the batch."""
        return self.normalize or (self.rejects and self.loss_denominator == "kept_tokens")


_MEANS_OF_SEQUENCES = ("seq_mean_token_mean", "prompt_mean")


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
    """Denominator of the ratio learner/proximal. `generator`: the policy that sampled the token, without correction
    weights (bypass). `recompute`: the learner at the start of the step, from an extra forward pass (decoupled PPO).
    `reuse`: the same without that pass; needs one update per step. `interpolate`: between generator and learner
    according to the lag of each token (A-3PO). `auto`: `reuse` if it is equivalent and no other setting needs the pass,
    otherwise `recompute`; recorded in `config.yaml`."""
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
    ess_learning_rate: bool = False
    """Learning rate that follows the effective sample size of the sequence weights (VCPO)."""
    updates_per_step: Annotated[int, Meta(ge=1)] = 1
    """Optimizer updates per claimed batch."""

    def __post_init__(self) -> None:
        if self.proximal == "auto":
            # Allowed here: the record is not shared yet. config.yaml thus records the resolved value.
            # `reuse` takes the same step without the pass, unless the correction's drops must be known before the
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
        """Whether anything is compared with a reference policy."""
        return self.kl.coef > 0 or self.advantage.needs_process_rewards

    @property
    def signal_beside_rewards(self) -> str:
        """Setting with which equal rewards have a gradient; empty = none."""
        if self.advantage.compares_groups or self.advantage.needs_process_rewards:
            return f"algorithm.advantage={self.advantage.kind}"
        if isinstance(self.advantage, GdpoConfig) or self.reward.parts:
            return "parts of the reward that are weighted separately"
        return "algorithm.distillation" if self.distillation else ""

    @property
    def needs_current_logprobs(self) -> bool:
        """Whether tokens are selected by learner log-probabilities at an update's start."""
        return any(not mask.is_local for mask in self.masks) or bool(self.policy_loss.selector)

    @property
    def needs_start_logprobs(self) -> bool:
        """Whether a step starts with a forward pass for learner log-probabilities."""
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
            or self.ess_learning_rate
            or (self.distillation is not None and self.distillation.divergence == "k1")
        )


def _check_proximal(config: AlgorithmConfig) -> None:
    proximal, level, loss = config.proximal, config.correction.level, config.policy_loss
    is_fit = proximal != "reuse" or not loss.has_ratio or config.updates_per_step == 1
    must = "be 1 with proximal=reuse"
    why = "after the first update the values at the start of the step are gone; choose proximal=auto"
    require(is_fit, "algorithm.updates_per_step", must, got=config.updates_per_step, why=why)
    twice = "the ratio learner/generator already corrects for staleness, a weight would count it twice"
    never = "the weight generator/generator is 1 everywhere, and the loss has no ratio of its own"
    why = f"{twice if loss.has_ratio else never}; choose algorithm/correction=none, or proximal=auto"
    must = "be none with algorithm.proximal=generator"
    require(proximal != "generator" or level == "none", "algorithm.correction.level", must, got=level, why=why)
    is_fit = not (config.correction.needs_whole_batch and proximal in ("reuse", "interpolate"))
    must = "be auto, recompute or generator with algorithm.correction.normalize or loss_denominator=kept_tokens"
    why = "they need the weights of the whole batch before the first gradient; choose proximal=auto"
    require(is_fit, "algorithm.proximal", must, got=proximal, why=why)
    must = f"not be interpolate with algorithm.policy_loss={loss.kind}, which has no ratio"
    why = "it splits the log-ratio learner/generator between weight and ratio, and would lose a part; choose auto"
    require(proximal != "interpolate" or loss.has_ratio, "algorithm.proximal", must, got=proximal, why=why)


def _check_advantage(config: AlgorithmConfig) -> None:
    advantage, reward, kl, level = config.advantage, config.reward, config.kl, config.correction.level
    key, charges_reward = f"algorithm.advantage={advantage.kind}", kl.apply_to == "reward"
    is_shaped = charges_reward or reward != RewardShapingConfig(mask_truncated=reward.mask_truncated)
    got = "shaped ones (algorithm.reward, or algorithm.kl.apply_to=reward)"
    why = f"it compares {advantage.unshaped}; leave rewards unshaped, or choose another advantage"
    require(not (advantage.unshaped and is_shaped), key, "have unshaped rewards", got=got, why=why)
    has_rewards = config.distillation is None or config.distillation.with_rewards
    must = "be loss with algorithm.distillation.with_rewards=false"
    why = "a penalty in rewards would be left out with them"
    require(has_rewards or not charges_reward, "algorithm.kl.apply_to", must, got=kl.apply_to, why=why)
    is_around_learner = not config.policy_loss.has_ratio or config.proximal not in ("generator", "interpolate")
    is_fit = not isinstance(advantage, VtraceConfig) or (level == "none" and is_around_learner)
    must = "have algorithm.correction.level=none and a ratio around the learner itself"
    why = "its advantages contain the ratio learner/generator already, and it would count twice; choose "
    why += "algorithm/correction=none, proximal=auto"
    require(is_fit, key, must, got=f"level={level}, proximal={config.proximal}", why=why)
    is_fit = not (isinstance(advantage, OptimalTokenBaselineConfig | PrimeConfig) and reward.mask_truncated)
    why = "its baselines are made of the tokens of the group, and those of a masked answer are missing"
    require(is_fit, "algorithm.reward.mask_truncated", f"be false with {key}", got=True, why=why)
    is_fit = not (advantage.needs_process_rewards and kl.refresh_every_steps)
    must, why = f"be null with {key}", "process rewards are relative to a reference that never changes"
    require(is_fit, "algorithm.kl.refresh_every_steps", must, got=kl.refresh_every_steps, why=why)


def _check_policy_loss(config: AlgorithmConfig) -> None:
    advantage, loss = config.advantage, config.policy_loss
    key, got = f"algorithm.policy_loss={loss.kind}", ""
    if advantage.is_per_token:
        got = f"algorithm.advantage={advantage.kind}"
    elif config.distillation is not None and config.distillation.divergence == "k1":
        got = "algorithm.distillation.divergence=k1, whose advantages differ from token to token"
    must, why = "have advantages that are equal within a sequence", "choose gspo with form=token, or a loss per token"
    require(not (loss.needs_equal_advantages and got), key, must, got=got, why=why)
    is_fit = isinstance(loss, SppoConfig) == isinstance(advantage, WinRateConfig)
    must, got = "be sppo with algorithm.advantage=win_rate and only then", f"{loss.kind} with {advantage.kind}"
    why = "sppo compares log-ratios with the share of answers that are beaten"
    require(is_fit, "algorithm.policy_loss", must, got=got, why=why)
    is_fit = not loss.counts_length or config.loss_aggregation in _MEANS_OF_SEQUENCES
    must, why = f"be {' or '.join(_MEANS_OF_SEQUENCES)} with {key}", "the length of an answer would count twice"
    require(is_fit, "algorithm.loss_aggregation", must, got=config.loss_aggregation, why=why)
