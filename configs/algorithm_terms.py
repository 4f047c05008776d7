"""Terms of the objective: reward shaping, critic, distillation, KL divergence, importance weights and rejections."""

from typing import Annotated, Literal

from msgspec import Meta

from slipstream.configs.base import Config, ConfigError
from slipstream.configs.learner import OptimizerConfig

Positive = Annotated[float, Meta(gt=0)]


class CriticOptimizerConfig(OptimizerConfig):
    """AdamW of the critic and its learning rate schedule."""

    learning_rate: Annotated[float, Meta(gt=0)] = 1e-5
    """Peak of the learning rate schedule."""


class CriticConfig(Config):
    """The value model of advantages that take values (gae, vtrace): a separate trunk with one number per token."""

    path: str | None = None
    """Checkpoint it starts from: a policy's, or the `critic/model` folder of a checkpoint; null = `model.path`."""
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    clip: Annotated[float, Meta(gt=0)] | None = 0.5
    """Largest change of a value in one step, in units of the reward; null = unbounded."""
    warmup_steps: Annotated[int, Meta(ge=0)] = 0
    """First steps of the run in which the critic alone learns."""


class DistillationConfig(Config):
    """On-policy distillation from a teacher with the learner's vocabulary, `learner.algorithms.distillation`."""

    teacher_path: str
    """Folder or hub name of the teacher, in transformers format."""
    divergence: Literal["k1", "k3", "forward_kl_topk", "jsd_topk"] = "k1"
    """`k1`: reverse KL as an advantage per token. `k3`: k3 of the sampled token as a loss. `forward_kl_topk`: forward
    KL over the teacher's most likely tokens. `jsd_topk`: Jensen-Shannon divergence over the same."""
    coefficient: Annotated[float, Meta(gt=0)] = 1.0
    """Weight beside the loss of the task."""
    with_rewards: bool = True
    """Whether rewards count as well; false = the teacher alone."""
    bound: Annotated[float, Meta(gt=0)] = 10.0
    """Largest advantage or loss of a token, nats; for `k1` and `k3`."""
    top_k: Annotated[int, Meta(ge=1)] = 32
    """Number of the teacher's most likely tokens; for `forward_kl_topk` and `jsd_topk`."""
    beta: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """Share of the teacher in the mixture; for `jsd_topk`."""
    renormalise: bool = False
    """Whether the most likely tokens alone form the distribution; false = all others are one more outcome."""

    @property
    def takes_candidates(self) -> bool:
        """Whether the teacher's most likely tokens are compared, not the sampled one."""
        return self.divergence in ("forward_kl_topk", "jsd_topk")


class AdaptiveKlConfig(Config):
    """A coefficient that keeps the measured KL at a target, `kl.adaptive_coefficient`."""

    target: Annotated[float, Meta(gt=0)]
    """Target of the KL, mean over the tokens of a step, nats."""
    horizon: Annotated[int, Meta(ge=1)] = 10_000
    """Trajectories over which the coefficient follows; more = slower."""


class KlConfig(Config):
    """Divergence from a reference policy; none is kept while `coefficient` is 0."""

    coefficient: Annotated[float, Meta(ge=0)] = 0.0
    """Price of one nat per token; the initial value of an adaptive coefficient."""
    estimator: Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+", "k3_off_policy", "full"] = "k3"
    """Estimator of the KL, `learner.algorithms.kl`. `k1`, `abs`, `k2`, `k3`: of the sampled token. With `+`: the value
    of that estimator and the gradient of k2, which is that of the KL. `k3_off_policy`: k3 times the ratio
    learner/generator. `full`: over the whole vocabulary. `k2`, those with `+`, `k3_off_policy` and `full` have the
    gradient of the KL."""
    charged_in: Literal["loss", "reward"] = "loss"
    """`loss`: a term of the loss. `reward`: subtracted from the reward of each token."""
    adaptive: AdaptiveKlConfig | None = None
    """Adaptive coefficient; null = constant."""
    refresh_every_steps: Annotated[int, Meta(ge=1)] | None = None
    """Steps after which the current learner becomes the reference; null = the initial policy stays."""

    def __post_init__(self) -> None:
        if self.charged_in == "reward" and self.estimator not in ("k1", "abs", "k2", "k3"):
            raise ConfigError(
                f"algorithm.kl.charged_in=reward takes estimator k1, abs, k2 or k3, got {self.estimator}: a reward "
                "has no gradient, and is measured at the start of the step."
            )
        if self.coefficient == 0 and (self.adaptive or self.refresh_every_steps):
            raise ConfigError(
                "algorithm.kl.coefficient must be > 0 for adaptive and refresh_every_steps, got 0: nothing is charged."
            )


class RewardShapingConfig(Config):
    """Shaping of rewards before they are compared, in the order of the fields."""

    parts: dict[str, float] = {}
    """Weights of named parts of the reward, instead of the total of the reward function; empty = the total."""
    overlong_buffer: Annotated[int, Meta(ge=1)] | None = None
    """DAPO's soft penalty: over the last so many tokens of the longest response the reward falls by up to 1; null =
    off."""
    normalise: Literal["none", "batch", "group"] = "none"
    """Mean 0 and standard deviation 1: `batch` over the batch, `group` within each group."""
    epsilon: Annotated[float, Meta(gt=0)] = 1e-6
    """Term added to that standard deviation."""
    truncated: Literal["train", "mask"] = "train"
    """Responses that reach the longest length. `train`: trained on. `mask`: leave the loss, and stay in the baseline of
    their group."""


# --- correction for a generator that is older or numerically different ------------------------------------------------
def check_order(what: str, low: float | None, high: float | None) -> None:
    """Raise ConfigError for a lower bound above the upper one."""
    if low is not None and high is not None and low > high:
        raise ConfigError(f"{what} must be in order, got {low:g} > {high:g}.")


class RejectionConfig(Config):
    """Tokens or trajectories that leave the loss, `learner.algorithms.rejection`."""

    statistic: Literal["k1", "k2", "k3"] = "k1"
    """Statistic of log(learner/generator) of a token. `k1`: itself. `k2`: half its square. `k3`: ratio - 1 - log ratio.
    """
    over: Literal["token", "sum", "mean", "max"] = "mean"
    """`token`: each token alone. `sum`, `mean`, `max`: each trajectory by that of its tokens (the mean of k1 is the
    geometric mean ratio)."""
    low: Positive | None = None
    """Smallest accepted ratio learner/generator, for `k1` only; null = unbounded."""
    high: Positive | None = None
    """Largest accepted ratio learner/generator for `k1`, largest value of the statistic for `k2` and `k3`; null =
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
    """Correction for a generator that is older or numerically different: weights and masks from the ratio
    proximal/generator of each token, without gradient, and a pull back to the generator."""

    level: Literal["none", "token", "sequence", "geometric"] = "token"
    """Weight of a token. `none`: 1. `token`: its own ratio. `sequence`: the product of the ratios of its trajectory.
    `geometric`: their geometric mean."""
    bound: Literal["truncate", "mask"] = "truncate"
    """Weights outside of low and high: `truncate` to the bound, `mask` to zero."""
    low: Positive | None = None
    """Smallest weight; null = unbounded."""
    high: Positive | None = 2.0
    """Largest weight; null = unbounded."""
    normalise: bool = False
    """Divide bounded weights by their mean over the batch: of tokens for `level=token`, else of trajectories."""
    reject: list[RejectionConfig] = []
    """Rejections; a token stays in the loss when every entry accepts it."""
    veto: tuple[Positive, Positive] | None = None
    """Bounds of token ratios: a trajectory with one token outside leaves the loss; null = off."""
    rebaseline: bool = False
    """Whether a trajectory without any token left leaves the baseline of its group as well."""
    denominator: Literal["all", "kept"] = "all"
    """Tokens that the aggregation counts. `all`: all that were to be trained on. `kept`: those not rejected."""
    log_ratio_penalty: Annotated[float, Meta(ge=0)] = 0.0
    """Weight of log(learner/generator)^2 in the loss of every token that is not rejected: it pulls back to the policy
    that sampled, also where a clip or a mask has taken the gradient away, and in groups whose rewards are equal."""

    def __post_init__(self) -> None:
        bounds = self.low is not None or self.high is not None or self.bound == "mask"
        if self.level == "none" and (bounds or self.normalise):
            raise ConfigError(
                "algorithm.correction: low, high, bound=mask and normalise need a level, got level=none: there are no "
                "weights; choose algorithm/correction=token_tis, or level=token, sequence or geometric."
            )
        check_order("algorithm.correction: low, high", self.low, self.high)
        check_order("algorithm.correction: veto", *(self.veto or (None, None)))

    @property
    def rejects(self) -> bool:
        """Whether tokens or trajectories may leave the loss."""
        return bool(self.reject) or self.veto is not None

    @property
    def needs_whole_batch(self) -> bool:
        """Whether the weights of a microbatch depend on the rest of the batch."""
        return self.normalise or (self.rejects and (self.rebaseline or self.denominator == "kept"))
