"""How tokens of an older or numerically different generator are weighed and rejected."""

from typing import Annotated, Literal

from msgspec import Meta

from slipstream.configs.base import Config, ConfigError

Positive = Annotated[float, Meta(gt=0)]


def check_order(what: str, low: float | None, high: float | None) -> None:
    """Raises ConfigError."""
    if low is not None and high is not None and low > high:
        raise ConfigError(f"{what} must be in order, got {low:g} > {high:g}.")


class LagBoundConfig(Config):
    """Other bounds for tokens of some lag on; a trajectory that is judged as one has the lag of its oldest token."""

    min_lag: Annotated[int, Meta(ge=1)]
    """Smallest lag it holds for."""
    low: Positive | None = None
    """None: as for the lags below."""
    high: Positive | None = None
    """None: as for the lags below."""

    def __post_init__(self) -> None:
        if self.low is None and self.high is None:
            raise ConfigError("algorithm.correction.by_lag: an entry must have low or high, got neither.")
        check_order("algorithm.correction.by_lag: low, high", self.low, self.high)


class RejectionConfig(Config):
    """Tokens or trajectories that leave the loss, `slipstream.learner.algorithms.rejection`."""

    statistic: Literal["k1", "k2", "k3"] = "k1"
    """Of log(learner/generator) per token: itself, half its square, or ratio - 1 - log ratio."""
    over: Literal["token", "sum", "mean", "max"] = "mean"
    """Judge each token | each trajectory by the sum, mean (k1: geometric mean ratio) or largest of its tokens."""
    low: Positive | None = None
    """k1 only: smallest ratio learner/generator that is kept; None = any."""
    high: Positive | None = None
    """k1: largest ratio learner/generator that is kept; k2, k3: largest value of the statistic. None = any."""
    by_lag: list[LagBoundConfig] = []
    """Other bounds for older tokens."""

    def __post_init__(self) -> None:
        if self.low is None and self.high is None and not self.by_lag:
            raise ConfigError("algorithm.correction.reject: an entry must have low, high or by_lag, got none of them.")
        check_order("algorithm.correction.reject: low, high", self.low, self.high)
        has_low = self.low is not None or any(entry.low is not None for entry in self.by_lag)
        if has_low and self.statistic != "k1":
            raise ConfigError(
                f"algorithm.correction.reject: low goes with statistic=k1, got it with {self.statistic}, which is "
                "never negative and has an upper bound only."
            )
        if self.statistic == "k1" and self.over == "max":
            raise ConfigError("algorithm.correction.reject: over=max needs statistic=k2 or k3, got k1: see `veto`.")


class CorrectionConfig(Config):
    """Weights and masks from the ratio proximal/generator of each token, without gradient."""

    level: Literal["none", "token", "sequence", "geometric"] = "token"
    """What the weight of a token is made of: nothing (1) | its own ratio | the product | the geometric mean of its
    trajectory's ratios."""
    bound: Literal["truncate", "mask"] = "truncate"
    """Weights outside [low, high] become the bound | zero."""
    low: Positive | None = None
    """Smallest weight; None = any."""
    high: Positive | None = 2.0
    """Largest weight; None = any."""
    by_lag: list[LagBoundConfig] = []
    """Other bounds for older tokens."""
    normalise: bool = False
    """Divide bounded weights by their mean over the batch: tokens for level=token, trajectories for the others."""
    reject: list[RejectionConfig] = []
    """What leaves the loss; a token stays when every entry keeps it."""
    veto: tuple[Positive, Positive] | None = None
    """A trajectory with any token ratio outside these two bounds leaves."""
    rebaseline: bool = False
    """Whether a trajectory that left entirely leaves its group's baseline as well."""
    denominator: Literal["all", "kept"] = "all"
    """Tokens counted by the aggregation: all that were to be trained on | those not rejected."""

    def __post_init__(self) -> None:
        if self.level == "none" and (self.normalise or self.by_lag or self.bound == "mask"):
            raise ConfigError(
                "algorithm.correction: normalise, by_lag and bound=mask need a level, got level=none: there are no "
                "weights; choose token, sequence or geometric."
            )
        check_order("algorithm.correction: low, high", self.low, self.high)
        check_order("algorithm.correction: veto", *(self.veto or (None, None)))

    @property
    def rejects(self) -> bool:
        """Whether anything may leave the loss."""
        return bool(self.reject) or self.veto is not None

    @property
    def needs_whole_batch(self) -> bool:
        """Whether a microbatch alone cannot tell the weights."""
        return self.normalise or (self.rejects and (self.rebaseline or self.denominator == "kept"))
