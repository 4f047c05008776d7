"""Drawing: which groups a step may train on, which of them it does, how often, and how old they may be."""

from typing import Annotated, Literal

from msgspec import Meta

from slipstream.configs.base import Config, ConfigError


class FifoConfig(Config, tag="fifo", tag_field="kind"):
    """Oldest ready group first."""


class FreshestConfig(Config, tag="freshest", tag_field="kind"):
    """The group first whose oldest token has the newest version."""


class UniformConfig(Config, tag="uniform", tag_field="kind"):
    """Every group with the same chance, drawn from the run's seed and the step."""


class PrioritizedConfig(Config, tag="prioritized", tag_field="kind"):
    """The more a group's rewards differ, the likelier it is drawn; its loss is weighed down by as much.

    Source: Schaul et al., Prioritized Experience Replay, arXiv:1511.05952, section 3.3-3.4.
    Differs: the priority is the standard deviation of a group's rewards, in steps of powers of two from 1/256 up, so
    that a group whose rewards are all equal is rare, never stuck. Weights are of a draw without repetition, and not
    divided by the largest: with `correction=1` the expected gradient is that of a uniform draw.
    """

    exponent: Annotated[float, Meta(ge=0, le=4)] = 0.6
    """Chance is proportional to priority ** exponent; 0 = uniform."""
    correction: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Weight is (groups drawn / (ready groups * probability of being drawn)) ** correction; 0 = no weights."""


SamplerConfig = FifoConfig | FreshestConfig | UniformConfig | PrioritizedConfig
"""Any of them."""


class KeepAllConfig(Config, tag="none", tag_field="kind"):
    """Every complete group may be trained on."""


KEEP_ALL = KeepAllConfig()
"""What a store does that is told nothing."""


class ZeroSignalConfig(Config, tag="zero_signal", tag_field="kind"):
    """A group is rejected whose rewards are all alike: compared with each other, they teach nothing.

    Source: dynamic sampling of DAPO, arXiv:2503.14476, section 3.2.
    Differs: judges rewards instead of right and wrong, and each group by itself when its last member arrives: another
    prompt takes its place at once, while the groups of the step under way are still coming in.
    """

    min_spread: Annotated[float, Meta(gt=0)] = 1e-6
    """Greatest minus least reward that a group must have; the reward of its greedy baseline is one of them."""


class AccuracyConfig(Config, tag="accuracy", tag_field="kind"):
    """A group is rejected unless the share of its sampled members that are entirely right lies between two bounds.

    above < right / answered < below

    Source: DAPO, arXiv:2503.14476, eq. 11, with bounds of 0 and 1.
    """

    above: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """A share this low is too low; 0 = all wrong."""
    below: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """A share this high is too high; 1 = all right."""

    def __post_init__(self) -> None:
        if self.above >= self.below:
            raise ConfigError(
                f"buffer.filter.above must be < buffer.filter.below ({self.below:g}), got {self.above:g}: every group "
                "would be rejected."
            )


FilterConfig = KeepAllConfig | ZeroSignalConfig | AccuracyConfig
"""Any of them."""


class ReuseConfig(Config):
    """Training on a group more than once."""

    max_uses: Annotated[int, Meta(ge=1, le=1000)] = 1
    """Steps that may train on one group; 1 = none is used again."""
    fresh_fraction: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of a step's groups that were never trained on, while there are that many; used ones make up the rest."""
    samples_per_insert: Annotated[float, Meta(ge=1)] | None = None
    """Uses per group that arrived, at most, on average over the run; absent: only `max_uses` bounds them."""
    max_age: Annotated[int, Meta(ge=1)] | None = None
    """Lag beyond which a group is not used again (its tokens then may be as old as that); absent: none."""
    max_groups: Annotated[int, Meta(ge=1)] = 4096
    """Groups kept to be used again; beyond it those that became ready first are let go."""

    def __post_init__(self) -> None:
        if 1 / self.fresh_fraction > self.max_uses:
            raise ConfigError(
                f"buffer.reuse.fresh_fraction must be >= 1 / max_uses ({1 / self.max_uses:.3g}), got "
                f"{self.fresh_fraction:g}: each group would have to be used {1 / self.fresh_fraction:.3g} times on "
                f"average to fill the steps, and {self.max_uses} is the most."
            )


class StalenessConfig(Config):
    """How old a token may be when it is trained on."""

    max_lag: Annotated[int, Meta(ge=0)] = 4
    """Versions between the learner's and the one that sampled the token; 0 = synchronous."""
    on_stale: Literal["mask", "drop"] = "mask"
    """Treatment of older tokens. mask: they leave the loss, their trajectory's reward stays in its group's baseline.

    drop: a ready group with such a token expires, and another prompt is admitted for it.
    """


class MixConfig(Config):
    """Training on stored rollouts of another run beside this run's own."""

    archive: str = ""
    """Folder of the archive; empty: none."""
    fraction: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """Share of a step's groups that come from it, drawn uniformly from the run's seed and the step."""
