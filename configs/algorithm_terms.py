"""Terms of the objective: reward shaping, critic, distillation, KL divergence."""

from typing import Annotated, Literal

from msgspec import Meta

from slipstream.configs.base import Config, ConfigError
from slipstream.configs.learner import OptimizerConfig


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
