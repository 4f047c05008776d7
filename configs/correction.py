"""Importance weights and rejection of tokens from an older or numerically different generator."""

from typing import Annotated, Literal

from msgspec import Meta

from slipstream.configs.base import Config, ConfigError

Positive = Annotated[float, Meta(gt=0)]


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
