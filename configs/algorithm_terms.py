"""What is done to rewards before they become advantages, `slipstream.learner.algorithms.reward_shaping`."""

from typing import Annotated, Literal

from msgspec import Meta

from slipstream.configs.base import Config, ConfigError
from slipstream.configs.learner import OptimizerConfig


# @@ The critic: the value model that advantages with a baseline of its own take.
class CriticOptimizerConfig(OptimizerConfig):
    """AdamW and its schedule, at a rate of its own."""

    learning_rate: Annotated[float, Meta(gt=0)] = 1e-5
    """Peak learning rate."""


class CriticConfig(Config):
    """A trunk of its own with one number per token on top; it is trained by the engine the policy is trained by."""

    path: str | None = None
    """Checkpoint it begins from: a policy's, or the `critic/model` folder of a checkpoint; None = model.path."""
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    """How it moves."""
    clip: Annotated[float, Meta(gt=0)] | None = 0.5
    """How far a value may move in one step, in units of the reward; None = any far."""
    warmup_steps: Annotated[int, Meta(ge=0)] = 0
    """Steps at the beginning of the run in which the critic alone learns."""


# @@ On-policy distillation: a teacher says, token by token, what it thinks of what the learner's policy wrote.
class DistillationConfig(Config):
    """`slipstream.learner.algorithms.distillation`; the teacher has the learner's vocabulary."""

    teacher_path: str
    """Folder or hub name of the teacher, in transformers format."""
    divergence: Literal["k1", "k3", "forward_kl_topk", "jsd_topk"] = "k1"
    """Reverse KL as an advantage per token | k3 of the sampled token as a loss | forward KL over the teacher's most
    likely tokens | Jensen-Shannon divergence over those."""
    coefficient: Annotated[float, Meta(gt=0)] = 1.0
    """Weight beside the task's own loss."""
    with_rewards: bool = True
    """Whether rewards are learned from as well; false = the teacher alone."""
    bound: Annotated[float, Meta(gt=0)] = 10.0
    """Largest advantage or loss of a token, nats; k1 and k3."""
    top_k: Annotated[int, Meta(ge=1)] = 32
    """Most likely tokens of the teacher; forward_kl_topk and jsd_topk."""
    beta: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """Share of the teacher in the mixture; jsd_topk."""
    renormalise: bool = False
    """Over those tokens alone | with all others as one more outcome."""

    @property
    def takes_candidates(self) -> bool:
        """Whether the teacher's most likely tokens are compared, not the sampled one."""
        return self.divergence in ("forward_kl_topk", "jsd_topk")


# @@ The divergence from a reference policy: how it is measured, where it is charged, and who the reference is.
class AdaptiveKlConfig(Config):
    """Moves the coefficient so that the measured KL stays at a target, `controllers.adaptive_kl_coefficient`."""

    target: Annotated[float, Meta(gt=0)]
    """KL aimed at, mean over the tokens of a step, nats."""
    horizon: Annotated[int, Meta(ge=1)] = 10_000
    """Trajectories over which the coefficient follows."""


class KlConfig(Config):
    """No reference policy is kept while `coefficient` is 0."""

    coefficient: Annotated[float, Meta(ge=0)] = 0.0
    """Price of one nat per token; where it begins, when it is adaptive."""
    estimator: Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+", "k3_off_policy", "full"] = "k3"
    """`slipstream.learner.algorithms.kl`: of the sampled token; with + the value of one and the gradient of k2, which is that of
    the KL | k3 times ratio learner/generator | over the whole vocabulary."""
    charged_in: Literal["loss", "reward"] = "loss"
    """A term of the loss | taken off the reward of each token."""
    adaptive: AdaptiveKlConfig | None = None
    """None = the coefficient stays."""
    refresh_every_steps: Annotated[int, Meta(ge=1)] | None = None
    """The reference becomes the learner of that moment; None = it stays the initial policy."""

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
    """Applied in the order of the fields."""

    parts: dict[str, float] = {}
    """Named part of the reward -> weight, instead of the reward function's own total; empty = the total."""
    overlong_buffer: Annotated[int, Meta(ge=1)] | None = None
    """DAPO's soft punishment: over the last so many tokens of the longest response the reward falls by up to 1."""
    normalise: Literal["none", "batch", "group"] = "none"
    """Mean 0 and deviation 1 over the batch | within each group."""
    epsilon: Annotated[float, Meta(gt=0)] = 1e-6
    """Added to that deviation."""
    truncated: Literal["train", "mask"] = "train"
    """Responses cut off at the longest length are trained on | leave the loss and stay in their group's baseline."""
