"""The divergence from a reference policy: how it is measured, where it is charged, and who the reference is."""

from typing import Annotated, Literal

from msgspec import Meta

from configs.base import Config, ConfigError


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
    """`learner.algorithms.kl`: of the sampled token; with + the value of one and the gradient of k2, which is that of
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
